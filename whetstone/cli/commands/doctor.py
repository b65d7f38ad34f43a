"""`whetstone doctor`: check the model servers and the log, or plan a model's memory (by `whetstone.doctor`)."""

from operator import itemgetter
from typing import Annotated, NoReturn

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
from whetstone.config.settings import Settings, load
from whetstone.doctor import log_checks, memory_plan, vllm_checks
from whetstone.doctor.rendering import severity
from whetstone.stack.admin_client import launch_arguments


def doctor(
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonObjectOption = False,
    stored: Annotated[bool, typer.Option("--stored", help="Show the last test, made at the start or since")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show each check with what its result means")] = False,
    log: Annotated[bool, typer.Option("--log", help="Only check the log; send nothing to vLLM")] = False,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="MODEL", help="Only plan the memory of this folder or hub name")
    ] = None,
    device_gb: Annotated[
        float | None, typer.Option("--device-gb", min=1, help="Memory of a card in GiB [the GPUs that are here]")
    ] = None,
    shared: Annotated[
        bool | None, typer.Option("--shared/--own", help="vLLM and the trainer have the same card, or not")
    ] = None,
) -> None:
    """Check whether training can rely on the stack's vLLM, and whether the log contains anything to learn from.

    Sends vLLM about fifteen short requests. Then it checks the newest attempts in the database: are they grouped,
    rewarded, and rewarded differently; how often does the base model succeed; were they sampled without restrictions;
    do tools have side effects?

    With `--memory` it starts nothing and asks no server: it says what vLLM and the trainer would get of the GPUs with
    this model, the longest row, the tokens of KV cache, and if it does not fit, what would. `up` keeps to this plan.

    The worst result comes first, and what is well in one line; `--verbose` has each check with its meaning.

    Exit code 0 if vLLM provides all that training needs, or the model fits; 1 if not; 2 if no vLLM answers, or the
    model's files cannot be read. Findings in the log are only warnings.

    Examples:

        whetstone doctor
        whetstone doctor --log --json

        whetstone doctor --memory Qwen/Qwen2.5-7B-Instruct --device-gb 24 --shared
    """
    if memory is not None:
        plans(load(config, data=data), memory, device_gb, shared, as_json=as_json)
    settings = running_settings(data, config)
    if log:
        checks = log_checks.examine(engine_of(settings), settings)
        show(checks, lambda: log_checks.shown(checks, settings.policy, verbose=verbose), as_json=as_json)
        return
    test = (
        vllm_checks.last_test(settings, store_of(settings))
        if stored
        else vllm_checks.examine(settings, launch_arguments(settings.data))
    )
    logged = log_checks.examine(engine_of(settings), settings) if has_database(settings) else ()
    parts = [(severity(test.checks), vllm_checks.shown(test, verbose=verbose))]
    if logged:
        parts.append((severity(logged), log_checks.shown(logged, settings.policy, verbose=verbose)))
    parts.sort(key=itemgetter(0), reverse=True)
    show(msgspec.to_builtins(test) | {"log": logged}, lambda: Group(*(one for _, one in parts)), as_json=as_json)
    if not stored and not (
        has_database(settings) and store_of(settings).keep_self_test(settings.project, settings.policy, test)
    ):
        errors.print(f"not stored: there is no policy {settings.policy} yet; `whetstone up` makes it", style="dim")
    raise typer.Exit(0 if test.trainable else 1)


def plans(settings: Settings, model: str, device_gb: float | None, shared: bool | None, *, as_json: bool) -> NoReturn:
    """Show the plan of a model's memory, and end with 0 if it fits, else 1."""
    planned = memory_plan.examine(settings, model, device_gb, shared)
    show(memory_plan.as_object(planned, settings), lambda: memory_plan.shown(planned, settings), as_json=as_json)
    raise typer.Exit(0 if planned.fits else 1)
