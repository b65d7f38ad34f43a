"""Commands on versions: move them by hand, list, export, import and fork them.

If a stack runs, its proxy makes the moves, and the next request uses the result; otherwise they are made in the
database.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, Row

from whetstone import torch_builds
from whetstone.config.settings import Settings, as_environment
from whetstone.domain.ids import version_id
from whetstone.registry import adapters, manual_moves, version_store, versions
from whetstone.registry.projects import Store, UnknownPolicy
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import store_of
from whetstone.registry.remote.sources import cache_folder
from whetstone.registry.versions import LedgerError, Move
from whetstone.stack import admin_client

T = TypeVar("T")


class _MoveResult(msgspec.Struct):
    """The fields of the proxy's answer that are used here."""

    before: int
    live_version: int
    rejected: tuple[int, ...]


class ImportResult(msgspec.Struct):
    """The output of `trainer.adopt`."""

    manifest_sha256: str
    rank: int
    why_no_step: str | None


class Versions:
    """The versions of the settings' policies."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def rows(self, policy: str) -> list[dict[str, Any]]:
        """Return the policy's versions, the newest first.

        Raises:
            UnknownPolicy: there is no such policy.
        """
        self._policy(policy)
        with self._reader.connect() as connection:
            return version_store.versions(connection, self._settings.project, policy)

    def promote(self, policy: str, version: int, reason: str | None) -> Move:
        """Make a version live.

        Raises:
            RefusedByProxy, LedgerError: it is refused, or it is unknown whether it was done.
            ProxyUnreachable: the running proxy cannot be called.
            UnknownPolicy: there is no such policy.
        """
        response = self._ask(policy, "promote", {"version": version, "reason": reason})
        if response is not None:
            return _move(response)
        self._whole(policy, version)
        return self._directly(
            policy,
            lambda connection, now: manual_moves.promote(connection, self._settings, policy, version, reason, now),
        )

    def roll_back(self, policy: str, to: int | None, reason: str | None) -> Move:
        """Go back along the lineage; without `to`, to the version that the live one was trained from.

        Raises:
            RefusedByProxy, LedgerError: it is refused, or it is unknown whether it was done.
            ProxyUnreachable: the running proxy cannot be called.
            UnknownPolicy: there is no such policy.
        """
        response = self._ask(policy, "rollback", {"to": to, "reason": reason})
        if response is not None:
            return _move(response)
        self._policy(policy)
        with self._reader.connect() as connection:
            target = versions.step_back(connection, self._settings.project, policy, to)
        self._whole(policy, target)
        return self._directly(
            policy,
            lambda connection, now: manual_moves.roll_back(connection, self._settings, policy, target, reason, now),
        )

    def before(self, policy: str) -> int | None:
        """Return the version that a rollback would make live; None if there is none."""
        with suppress(LedgerError), self._reader.connect() as connection:
            return versions.step_back(connection, self._settings.project, policy)
        return None

    def pin(self, policy: str, version: int, *, pinned: bool) -> None:
        """Keep a version loaded and on the disk, or stop doing so.

        Raises:
            RefusedByProxy, LedgerError: it is refused, or it is unknown whether it was done.
            ProxyUnreachable: the running proxy cannot be called.
            UnknownPolicy: there is no such policy.
        """

        if self._ask(policy, "pin", {"version": version, "pinned": pinned}) is None:
            self._directly(
                policy,
                lambda connection, now: manual_moves.pin(
                    connection, self._settings, policy, version, pinned=pinned, now=now
                ),
            )

    def export(self, policy: str, version: int, folder: Path, *, merged: bool) -> None:
        """Write the adapter in peft's format, or the base model with the adapter merged into its weights.

        Raises:
            LedgerError: there is no such version, it has no adapter, or its files are damaged.
            NotCopied: the folder is not empty, or cannot be written.
        StoreError: its files are on another machine, and cannot be pulled.
            RefusedByProxy: the merge failed.
        """
        model = self._policy(policy)["model_path"]
        source = self._folder(self._whole(policy, version))
        if source is None:
            raise LedgerError(f"version {version} of {policy} is the base model: it has no adapter")
        if merged:
            adapters.check_new(folder)
            self._trainer(model, "trainer.merge", str(source), model, str(folder.resolve()))
        else:
            adapters.export(source, folder, model)

    def fork(self, policy: str, version: int, new_policy: str) -> int:
        """Copy a version into another policy, including the optimizer. Return its number there.

        Raises:
            LedgerError: there is no such version, it has no adapter, or its files are damaged.
            UnknownPolicy: the policy to copy it to does not exist.
            NotCopied: the copy cannot be written.
        """
        row = self._whole(policy, version)
        source = self._folder(row)
        if source is None:
            raise LedgerError(f"version {version} of {policy} is the base model, from which every policy begins")
        number, folder = self._number(new_policy)
        adapters.copy(source, folder)
        self._add(new_policy, number, folder, row.manifest_sha256, origin=row.id)
        return number

    def bring_in(self, source: Path, policy: str) -> tuple[int, ImportResult]:
        """Import an adapter that peft wrote as a version of the policy. Return its number, and the findings about it.

        Raises:
            UnknownPolicy: there is no such policy.
            RefusedByProxy: it is not a LoRA of this base model that vLLM could serve, or cannot be written.
        """
        if not (source / adapters.CONFIG).is_file():
            raise admin_client.RefusedByProxy(
                f"{source} has no {adapters.CONFIG}: name a folder that peft has saved an adapter in"
            )
        model = self._policy(policy)["model_path"]
        number, folder = self._number(policy)
        lines = self._trainer(model, "trainer.adopt", str(source.resolve()), str(folder)).splitlines()
        imported = msgspec.json.decode(lines[-1], type=ImportResult)
        self._add(policy, number, folder, imported.manifest_sha256, origin=str(source.resolve()))
        return number, imported

    def _policy(self, policy: str) -> dict[str, Any]:
        """Return the policy's row."""
        rows = {row["id"]: row for row in Store(self._engine).policies(self._settings.project)}
        if policy not in rows or rows[policy]["upstream"] is not None:
            own = [name for name, row in rows.items() if row["upstream"] is None]
            raise UnknownPolicy(
                f"there is no policy {policy!r} with versions of its own; there are: {', '.join(own) or 'none yet'}. "
                "Those of the settings are made when the stack starts"
            )
        return rows[policy]

    def _whole(self, policy: str, version: int) -> Row[Any]:
        """Return the version's row, after checking its files."""
        self._policy(policy)
        with self._reader.connect() as connection:
            row = versions.version_row(connection, self._settings.project, policy, version)
        manual_moves.check_files(row, self._settings)
        return row

    def _folder(self, row: Row[Any]) -> Path | None:
        """Return the folder of a version's adapter on this machine; None for the base model.

        With an adapter store, a folder that another machine's trainer wrote is pulled.
        """
        if row.adapter_path is None:
            return None
        folder, store = Path(row.adapter_path), store_of(self._settings.adapters)
        if store is None or folder.is_dir():
            return folder
        return AdapterCache(cache_folder(self._settings.data), store).fetch(row.manifest_sha256)

    def _ask(self, policy: str, move: str, fields: dict[str, Any]) -> bytes | None:
        """Return the running proxy's answer; None if no stack runs, and only then the move is made here."""
        try:
            return admin_client.ask(self._settings.data, policy, move, fields, look=f"`whetstone versions {policy}`")
        except admin_client.StackNotRunning:
            return None

    def _directly(self, policy: str, move: Callable[[Connection, datetime], T]) -> T:
        """Make a move in the database."""
        self._policy(policy)
        with self._engine.begin() as connection:
            versions.lock(connection, self._settings.project, policy)
            return move(connection, datetime.now(UTC))

    def _number(self, policy: str) -> tuple[int, Path]:
        """Reserve a version number, and return it with the version's folder."""
        number = self._directly(
            policy, lambda connection, _: version_store.take_number(connection, self._settings.project, policy)
        )
        return number, self._settings.data.resolve() / "adapters" / version_id(policy, number)

    def _add(self, policy: str, number: int, folder: Path, manifest_sha256: str, origin: str) -> None:
        """Add the version's row, and remove the folder if that fails. If the process is killed, the folder stays, but
        no version ever refers to it: its number is used up."""
        try:
            self._directly(
                policy,
                lambda connection, now: version_store.add(
                    connection, self._settings.project, policy, number, folder=folder,
                    manifest_sha256=manifest_sha256, origin=origin, now=now,
                ),
            )  # fmt: skip
        except BaseException:
            if number not in (row["version"] for row in self.rows(policy)):
                adapters.remove(folder)
            raise

    def _trainer(self, model: str, module: str, *arguments: str) -> str:
        """Run a program of the trainer, which has torch, with this base model, and return its output.

        Raises:
            RefusedByProxy: it failed, with the reason that it gives.
        """
        python = self._settings.trainer.python
        # The environment contains all settings; a whetstone.toml in the working directory must not add to them.
        ours = as_environment(self._settings.model_copy(update={"model": model}), config=Path(os.devnull))
        environment = {**os.environ, **ours, **torch_builds.environment(python)}
        # -P: the working directory, which may be a foreign adapter, must not be imported from.
        command = [str(python or sys.executable), "-P", "-m", module, *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise admin_client.RefusedByProxy(
                ended.stderr.strip().rpartition("\n")[2] or f"{module} ended with {ended.returncode}"
            )
        return ended.stdout


def _move(answer: bytes) -> Move:
    moved = msgspec.json.decode(answer, type=_MoveResult)
    return Move(moved.before, moved.live_version, moved.rejected)
