"""`whetstone init`: write the first settings file, by questions or by options."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.markup import escape

from whetstone.cli.options import ConfigOption, DataOption, check, console, errors
from whetstone.cli.tables import first_settings as first
from whetstone.config.settings import CONFIG_VARIABLE, Settings, SettingsError
from whetstone.config.settings_file import text, write

T = TypeVar("T")


def init(
    model: Annotated[str | None, typer.Option("--model", help="Base model: folder or hub name [starter]")] = None,
    vllm: Annotated[
        str | None, typer.Option("--vllm", metavar="URL", help="Where vLLM runs, or `up`, which starts one [up]")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Name that apps ask for [by the model]")] = None,
    rewards: Annotated[
        str | None, typer.Option("--rewards", help="Where rewards come from: feedback, code or judge [feedback]")
    ] = None,
    function: Annotated[
        str | None, typer.Option("--function", help="With code: package.module:name, or a program [rewards:score]")
    ] = None,
    judge: Annotated[
        str | None, typer.Option("--judge", help="With judge: the model, as litellm names it [base]")
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="sqlite, or postgresql+psycopg://… [sqlite]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: take the defaults of what no option gives")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a whetstone.toml in which each setting has a comment, from five answers.

    Asks for the model, where vLLM runs, the policy's name, where rewards come from, and the database. An option
    answers its question. The file is written only if `whetstone up` can use it, in one move, and never over another
    one without `--force`.

    Exit code 0 if it is written, 2 if not.

    Examples:

        whetstone init
        whetstone init --yes --model Qwen/Qwen2.5-7B-Instruct --policy support
    """
    path = config or Path(os.environ.get(CONFIG_VARIABLE) or "whetstone.toml")
    if path.exists() and not force:
        raise SettingsError(f"{path} is there already; --force replaces it")
    check(
        {
            "--function goes with --rewards code": function is not None and rewards != "code",
            "--judge goes with --rewards judge": judge is not None and rewards != "judge",
        }
    )

    def answer(question: str, given: str | None, default: str, checked: Callable[[str], T]) -> T:
        if given is None and not yes:
            return _ask(question, default, checked)
        return checked(default if given is None else given)

    base = answer("Base model, a folder or a hub name", model, first.STARTER, first.model)
    urls = answer("The URL of a vLLM that runs, or `up` to have one started", vllm, first.UP, first.vllm)
    name = answer("Policy, the name that apps send as `model`", policy, first.policy_for(base), first.policy)
    source = answer("Rewards from feedback, code or judge", rewards, "feedback", first.rewards)
    by = None
    if source == "code":
        by = answer("The function, package.module:name, or a program", function, first.FUNCTION, first.function)
    elif source == "judge":
        question = "The model that judges, as litellm names it, or `base`"
        by = answer(question, judge, first.JUDGE, partial(first.judge, model_name=base))
    stored = answer("Database, `sqlite` or a URL of PostgreSQL", database, first.SQLITE, first.database)
    answers = first.Answers(base, urls, name, source, by, stored, str(data or "data"))
    content = text([*first.tables(answers)])
    settings = write(path, content, replace=force, private=answers.has_password)
    _print_next(path, settings, answers, config)


def _ask(question: str, default: str, checked: Callable[[str], T]) -> T:
    """Ask until the answer is valid.

    Raises:
        SettingsError: there is no answer.
    """
    while True:
        try:
            return checked(typer.prompt(question, default=default).strip())
        except SettingsError as error:
            errors.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        except typer.Abort:
            raise SettingsError(
                "nothing is written: not all questions were answered. Each has an option; --yes takes the defaults"
            ) from None


def _print_next(path: Path, settings: Settings, answers: first.Answers, config: Path | None) -> None:
    where = "" if config is None else f" --config {config}"
    url = f"http://{settings.proxy.host}:{settings.proxy.port}"
    lines = [f"{path} is written; each setting has a comment"]
    if answers.rewards == "code" and answers.by is not None and ":" in answers.by:
        lines.append(f"`up` looks for {answers.by} in this folder: docs/rewards_in_code.md has examples")
    lines += [
        f"next: `whetstone up{where}`, then base_url {url}/v1 and model {settings.policy} in your app",
        f"dashboard: {url}/ui shows what is missing until the first step",
    ]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
