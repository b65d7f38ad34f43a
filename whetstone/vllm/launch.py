"""`python -m whetstone.vllm.launch`: print how vLLM is to be started with these settings, on machines without `up`.

The output is shell words: the environment, then the command. It is for vLLM's build for GPUs; with `--cpu`, for its CPU
build. `whetstone up` does the same on one machine. Nothing is started.
"""

import shlex
import sys
from collections.abc import Sequence

from whetstone.config.settings import Settings, SettingsError, load
from whetstone.vllm import client

PORT = 8001


CPU = "--cpu"


def arguments(settings: Settings, host: str = "0.0.0.0", port: int = PORT, *, cpu: bool = False) -> list[str]:
    """Return the server's arguments, listening on `host`. Use an address that only Whetstone can reach."""
    command = client.command(settings, port, cpu=cpu)
    given = command[command.index("--model") :]
    given[given.index("--host") + 1] = host
    return given


def lines(settings: Settings, *, cpu: bool = False) -> list[str]:
    """Return one line for each environment variable, then the command."""
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in client.environment(settings).items()]
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server", *arguments(settings, cpu=cpu)]
    return [*variables, shlex.join(command)]


def main(arguments: Sequence[str]) -> int:
    """Print the lines; return 2 if the settings cannot be used."""
    cpu = list(arguments) == [CPU]
    if arguments and not cpu:
        sys.stdout.write(f"{__doc__}\nSettings come from whetstone.toml and WHETSTONE_…; its only argument is {CPU}.\n")
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        settings = load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in lines(settings, cpu=cpu))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
