"""`whetstone doctor`: check the model servers and the log. The work is done by `whetstone.doctor`."""

from typing import Annotated

import msgspec
import typer
from rich.console import Group

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    engine_of,
    errors,
    has_database,
    running_settings,
    show,
    store_of,
)
from whetstone.doctor import log_checks, vllm_checks
from whetstone.stack.admin_client import launch_arguments


def doctor(
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonObjectOption = False,
    stored: Annotated[bool, typer.Option("--stored", help="Show the last test, made at the start or since")] = False,
    log: Annotated[bool, typer.Option("--log", help="Only check the log; send nothing to vLLM")] = False,
) -> None:
    """Check whether training can rely on the stack's vLLM, and whether the log contains anything to learn from.

    Sends vLLM about fifteen short requests. Then it checks the newest attempts in the database: are they grouped,
    rewarded, and rewarded differently; how often does the base model succeed; were they sampled without restrictions;
    do tools have side effects?

    Exit code 0 if vLLM provides all that training needs, 1 if not, 2 if no vLLM answers. Findings in the log are only
    warnings.

    Examples:

        whetstone doctor
        whetstone doctor --log --json
    """
    settings = running_settings(data, config)
    if log:
        checks = log_checks.examine(engine_of(settings), settings)
        show(checks, lambda: log_checks.shown(checks, settings.policy), as_json=as_json)
        return
    test = (
        vllm_checks.last_test(settings, store_of(settings))
        if stored
        else vllm_checks.examine(settings, launch_arguments(settings.data))
    )
    logged = log_checks.examine(engine_of(settings), settings) if has_database(settings) else ()
    tables = [vllm_checks.shown(test), *([log_checks.shown(logged, settings.policy)] if logged else [])]
    show(msgspec.to_builtins(test) | {"log": logged}, lambda: Group(*tables), as_json=as_json)
    if not stored and not (
        has_database(settings) and store_of(settings).keep_self_test(settings.project, settings.policy, test)
    ):
        errors.print(f"not stored: there is no policy {settings.policy} yet; `whetstone up` makes it", style="dim")
    raise typer.Exit(0 if test.trainable else 1)
