"""Check that all that judging needs exists: reward functions, rubrics, keys (`python -m judge`). Exit 1 if not."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing

from judge.reward_functions.sandbox import NotFound, Sandbox
from whetstone.config.rewards import BASE, JudgeSettings
from whetstone.config.settings import Settings, load


def missing(settings: Settings) -> Iterator[str]:
    """Yield what is missing, one sentence each. Starts each reward function's process once."""
    for policy, learning in settings.learning.items():
        for function in learning.rewards:
            with closing(Sandbox(function)) as box:
                try:
                    box.start()
                except NotFound as error:
                    yield (
                        f"learning.{policy}: reward function {function.name!r} ({function.run}): {error}; correct "
                        "`run`: `package.module:function`, importable from this folder, PYTHONPATH or the environment, "
                        "or the path of a file that may be executed"
                    )
        for path in filter(None, (learning.ruler.rubric, *learning.ruler.rubrics.values())):
            try:
                path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                yield f"learning.{policy}.ruler: the rubric {path} cannot be read: {error}"
    for name, judge in settings.judges.items():
        if judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
            yield f"judges.{name}: the environment variable {judge.api_key_env} that holds its key is not set"
        if settings.spending.usd_per_day is not None and judge.model != BASE and not _has_price(judge):
            yield (
                f"judges.{name}: spending.usd_per_day is set, and the price of {judge.model} is unknown; set "
                "usd_per_million_prompt_tokens and usd_per_million_completion_tokens (0 if it costs nothing)"
            )


def _has_price(judge: JudgeSettings) -> bool:
    # Imported here: it loads litellm, which a stack without a spending cap need not wait for.
    from judge.ruler.llm import priced

    return priced(judge)


def main(settings: Settings) -> int:
    """Print what is missing; return 1 if anything is."""
    problems = list(missing(settings))
    sys.stdout.writelines(f"{sentence}\n" for sentence in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(load()))
