"""`python -m judge`: whether every reward function of the settings is found. Exit 1 if not, saying why."""

import sys

from judge.sandbox import NotFound, Sandbox
from whetstone.settings import Settings, load


def main(settings: Settings) -> int:
    """Start each function's process once; return 1 if one was not found."""
    missing = 0
    for policy, learning in settings.learning.items():
        for function in learning.rewards:
            with Sandbox(function) as box:
                try:
                    box.start()
                except NotFound as error:
                    missing = 1
                    sys.stdout.write(
                        f"learning.{policy}: reward function {function.name!r} ({function.run}): {error}\n"
                    )
    return missing


if __name__ == "__main__":
    sys.exit(main(load()))
