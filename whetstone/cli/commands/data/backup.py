"""`whetstone backup` and `restore`: options, output and exit codes. The work is done by `whetstone.backup`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape

from whetstone.backup.archive import Manifest
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    console,
    errors,
    has_database,
    print_json,
    running_settings,
)
from whetstone.config.settings import SettingsError, config_file, load
from whetstone.transfer.exporting.files import format_size


def backup(
    target: Annotated[
        Path, typer.Argument(help="New file that ends in .tar, or a folder: the time then names the file")
    ],
    secrets: Annotated[
        bool, typer.Option("--secrets", help="With passwords in whetstone.toml, and the secret of feedback tokens")
    ] = False,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Back up database, adapters, journal and whetstone.toml into one file, while the stack runs.

    The copy of the database is of one moment, and the journal has what was not in it then. PostgreSQL needs pg_dump.
    Base models and logs are not in it. Without --secrets, passwords in whetstone.toml are replaced by ***. The file
    contains what people wrote: its mode is 0600.

    Exit code 0 done; 1 the adapter of a version was not there: the file has everything else.

    Examples:

        whetstone backup /backups
        whetstone backup before-upgrade.tar --secrets
    """
    from whetstone.backup.create import create

    settings = running_settings(data, config)
    if not has_database(settings):
        raise SettingsError(f"there is no database in {settings.data}: name the stack's folder with --data")
    made = create(settings, target, config_file(config)[0], secrets=secrets)
    missing = [f"{version}: no adapter at {path}" for version, path in made.manifest.missing.items()]
    if as_json:
        print_json({"file": str(made.file), "bytes": made.bytes, **_facts(made.manifest), "missing": missing})
    else:
        _print(f"{made.file}: {format_size(made.bytes)}, {_contents(made.manifest)}")
        if not secrets:
            errors.print("without secrets: --secrets adds passwords and the secret of feedback tokens", style="dim")
        _print_faults(missing)
    raise typer.Exit(1 if missing else 0)


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `whetstone backup` made")],
    check: Annotated[
        bool, typer.Option("--check", help="Only try it, in a temporary folder; nothing is changed")
    ] = False,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Restore a backup into an empty data folder and an empty database, all or nothing.

    All hashes, the database, the number of rows of each table and the adapter of each version are checked first. With
    PostgreSQL (needs pg_restore), name an empty database in `database`; --check creates one on that server, and drops
    it. The backup's whetstone.toml is put into the data folder: compare it with yours.

    Exit code 0 it matches; 1 something is missing; 2 the file is damaged, or the target is not empty: nothing was
    restored.

    Examples:

        whetstone restore before-upgrade.tar --check
        whetstone restore before-upgrade.tar --data restored
    """
    from whetstone.backup import restore as restoring

    settings = load(config, data=data)
    result = restoring.check(file, settings) if check else restoring.restore(file, settings)
    if as_json:
        print_json({"file": str(file), "checked_only": check, **_facts(result.manifest), "faults": result.faults})
    else:
        manifest = result.manifest
        _print(f"{file}, of {manifest.created_at}, Whetstone {manifest.whetstone}: {_contents(manifest)}")
        _print_faults(result.faults)
        if not result.faults:
            _print("everything matches" if check else f"restored into {settings.data}; start it with `whetstone up`")
    raise typer.Exit(1 if result.faults else 0)


def _contents(manifest: Manifest) -> str:
    rows = manifest.rows
    return (
        f"{manifest.database} at revision {manifest.revision}, {rows.get('completions', 0):,} completions, "
        f"{rows.get('feedback', 0):,} feedback, {len(manifest.adapters)} adapters, {len(manifest.files)} files"
    )


def _facts(manifest: Manifest) -> dict[str, Any]:
    facts = msgspec.to_builtins(manifest)
    return {name: facts[name] for name in ("created_at", "whetstone", "database", "revision", "rows", "secrets")} | {
        "adapters": sorted(manifest.adapters), "files": len(manifest.files),
    }  # fmt: skip


def _print(line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)


def _print_faults(faults: list[str]) -> None:
    for fault in faults:
        errors.print(escape(fault), style="red", highlight=False, soft_wrap=True)
