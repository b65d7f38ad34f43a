"""Remember how long vLLM's last start took, as an estimate for the next one: a small file in the data folder."""

from contextlib import suppress
from pathlib import Path

import msgspec

FILE = "vllm_start.json"


class StartTime(msgspec.Struct, frozen=True):
    """A start of vLLM that succeeded."""

    model: str
    servers: int
    seconds: float


def expected_s(data: Path, model: str, servers: int) -> float | None:
    """Return how many seconds the last start of as many servers with this model took; None if it is unknown."""
    with suppress(OSError, msgspec.DecodeError):
        last = msgspec.json.decode((data / FILE).read_bytes(), type=StartTime)
        return last.seconds if (last.model, last.servers) == (model, servers) else None
    return None


def remember(data: Path, start: StartTime) -> None:
    """Store how long a start took. A full disk does not matter: the next start then has no estimate."""
    with suppress(OSError):
        (data / FILE).write_bytes(msgspec.json.encode(start) + b"\n")
