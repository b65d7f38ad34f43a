"""`python -m whetstone.vllm_arguments`: how vLLM is to be started for these settings, where nobody does it by itself.

Prints shell words: the environment, then the command. What `whetstone up` does on one machine, other machines' own
means do by this. Starts nothing.
"""

import shlex
import sys
from collections.abc import Sequence

from whetstone import vllm
from whetstone.settings import Settings, SettingsError, load

PORT = 8001


def arguments(settings: Settings, host: str = "0.0.0.0", port: int = PORT) -> list[str]:
    """The server's arguments, listening on `host`: only where nobody but Whetstone reaches it."""
    command = vllm.command(settings, port)
    given = command[command.index("--model") :]
    given[given.index("--host") + 1] = host
    return given


def lines(settings: Settings) -> list[str]:
    """The environment a line each, then the command."""
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in vllm.environment(settings).items()]
    return [*variables, shlex.join(["python3", "-m", "vllm.entrypoints.openai.api_server", *arguments(settings)])]


def main(told: Sequence[str]) -> int:
    """Print them; 2 where the settings cannot be used."""
    if told:
        sys.stdout.write(f"{__doc__}\nSettings come from whetstone.toml and WHETSTONE_…; it takes no argument.\n")
        return 0 if told[0] in ("-h", "--help") else 2
    try:
        settings = load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in lines(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
