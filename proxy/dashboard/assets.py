"""Read the files under static/ once: styles, scripts, the vendored libraries. They are public."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
URL = "/ui/static/"
KINDS = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
"""The file types that are served; licences and other files are not."""


@dataclass(frozen=True)
class Asset:
    """One file as it is served."""

    body: bytes
    kind: bytes
    version: str
    """Hash of the content. It is in the file's URL, so that browsers may cache the file forever."""


@cache
def files() -> dict[str, Asset]:
    """Return the served files by their name relative to the folder."""
    paths = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in KINDS)
    return {path.relative_to(FOLDER).as_posix(): _asset(path) for path in paths}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, KINDS[path.suffix], hashlib.sha256(body).hexdigest()[:12])
