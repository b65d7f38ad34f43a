"""The files under static/, read once: styles, scripts, the vendored libraries. They are no secret; anybody may have
them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
URL = "/ui/static/"
KINDS = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
"""What is served; licences and the like stay where they are."""


@dataclass(frozen=True)
class Asset:
    """One file as it is served."""

    body: bytes
    kind: bytes
    version: str
    """Of its content; its address names it, so that browsers may keep the file for good."""


def read() -> dict[str, Asset]:
    """Name below the folder -> file."""
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in KINDS)
    return {path.relative_to(FOLDER).as_posix(): _asset(path) for path in found}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, KINDS[path.suffix], hashlib.sha256(body).hexdigest()[:12])
