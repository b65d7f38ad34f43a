"""Install the packages of a client into an environment of its own, and run its app there, in an empty home."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.table import RESULT, Client
from benchmarks.kit.process import ROOT

ENVIRONMENTS = ROOT / "data" / "clients"
APPS = Path(__file__).with_name("apps")
MODEL = "starter"
TIMEOUT_S = 300.0
NO_TELEMETRY = {
    "ANONYMIZED_TELEMETRY": "False",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NEXT_TELEMETRY_DISABLED": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
    "OTEL_SDK_DISABLED": "true",
}
"""What the clients document for it: none reports to its makers, and none waits for servers that it cannot reach."""


@dataclass(frozen=True)
class RunResult:
    """The end of an app."""

    exit_code: int
    output: str
    errors: str


def install(client: Client) -> Path:
    """Return the environment of a client; make it first where it is not there with these packages.

    Raises:
        subprocess.CalledProcessError: it cannot be made.
    """
    folder = ENVIRONMENTS / client.environment
    stamp, wanted = folder / "installed.txt", "\n".join(client.packages)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in _npm(client, folder) if client.in_node else _uv(client, folder):
            subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return folder


def _uv(client: Client, folder: Path) -> Iterator[list[str]]:
    uv = str(Path(sys.executable).with_name("uv"))
    yield [uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")]
    yield [uv, "pip", "install", "--quiet", "--python", str(folder / "venv"), *client.packages]


def _npm(client: Client, folder: Path) -> Iterator[list[str]]:
    (folder / "package.json").write_text('{"private": true}')
    yield ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-update-notifier", *client.packages]


async def run(client: Client, environment: Path, url: str, folder: Path) -> RunResult:
    """Run the app of a client against a proxy, in a folder of its own."""
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir(parents=True)
    (work / "weather.txt").write_text(f"{RESULT} and sunny\n")
    process = await asyncio.create_subprocess_exec(
        *_command(client, environment),
        cwd=work,
        env=_variables(environment, url, home),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        output, errors = b"", f"still running after {TIMEOUT_S:g} s".encode()
    finally:
        # Its children too: an MCP server, a session that was left open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        code = await process.wait()
    return RunResult(code, output.decode(errors="replace"), errors.decode(errors="replace"))


def _command(client: Client, environment: Path) -> list[str]:
    if not client.in_node:
        # -P: an app is named after its client, and must not be imported in its place.
        return [str(environment / "venv" / "bin" / "python"), "-P", str(APPS / "python" / client.program), client.kind]
    if client.program.endswith(".sh"):
        return ["sh", str(APPS / "node" / client.program)]
    # Node looks for packages beside the file.
    return ["node", shutil.copy(APPS / "node" / client.program, environment)]


def _variables(environment: Path, url: str, home: Path) -> Mapping[str, str]:
    programs = [environment / "venv" / "bin", environment / "node_modules" / ".bin"]
    return NO_TELEMETRY | {
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_MODEL": MODEL,
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "MODEL": MODEL,
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
    }
