"""Write a bill of materials for each lock that users install: `sbom.py FOLDER`. CycloneDX 1.6, as JSON.

The same lock gives the same file, byte for byte: there is no time in it, and its serial number comes from its content.
A component's `distribution` has the SHA-256 of every file that the lock permits.
"""

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).resolve().parent
LOCKS = ("cpu", "server", "trainer", "server-cuda", "trainer-cuda", "trainer-unsloth")
"""What `make install`, the images and GPU hosts install; the locks of tests and tools are left out."""
SPECIFICATION = "1.6"
PYTORCH = "https://download.pytorch.org/whl/"

_PINNED = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)(?: ; (?P<where>[^\\\n]+?))? *\\?$"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> Iterator[dict[str, Any]]:
    """Return a component for each package of a lock, in its order.

    Raises:
        ValueError: a line is neither a pinned package nor a hash, an option or a comment.
    """
    component: dict[str, Any] | None = None
    for line in lock.splitlines():
        if pinned := _PINNED.match(line):
            if component:
                yield component
            component = _component(pinned["name"], pinned["version"], pinned["where"])
        elif hashes := _HASH.findall(line):
            if component is None:
                raise ValueError(f"a hash before the first package: {line!r}")
            listed = component["externalReferences"][0]["hashes"]
            listed.extend({"alg": "SHA-256", "content": content} for content in hashes)
        elif line.strip() and not line.lstrip().startswith(("#", "--")):
            raise ValueError(f"no pinned package: {line!r}")
    if component:
        yield component


def bill(name: str, lock: str, version: str) -> dict[str, Any]:
    """Return the bill of materials of the lock `name` for a version of Whetstone."""
    digest = hashlib.sha256(f"{name} {version}\n{lock}".encode()).hexdigest()
    whetstone = {
        "type": "application",
        "bom-ref": f"pkg:pypi/whetstone-proxy@{version}",
        "name": "whetstone-proxy",
        "version": version,
        "purl": f"pkg:pypi/whetstone-proxy@{version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "properties": [{"name": "whetstone:lock", "value": f"requirements/{name}.lock"}],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32], version=4)}",
        "version": 1,
        "metadata": {"component": whetstone},
        "components": list(components(lock)),
    }


def _component(name: str, version: str, where: str | None) -> dict[str, Any]:
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{canonical}@{quote(version, safe='')}"
    # A local version, such as PyTorch's +cpu, is on PyTorch's own index.
    url = PYTORCH if "+" in version else f"https://pypi.org/project/{canonical}/{version}/"
    component = {
        "type": "library",
        "bom-ref": purl if where is None else f"{purl}#{where}",
        "name": canonical,
        "version": version,
        "purl": purl,
        "externalReferences": [{"type": "distribution", "url": url, "hashes": []}],
    }
    # Some packages are only for some machines.
    return component if where is None else component | {"properties": [{"name": "whetstone:marker", "value": where}]}


def main(folder: Path) -> None:
    """Write a file for each lock into `folder`."""
    source = (HERE.parent / "whetstone" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "([^"]+)"', source, re.MULTILINE)[0]
    folder.mkdir(parents=True, exist_ok=True)
    for name in LOCKS:
        made = bill(name, (HERE / f"{name}.lock").read_text(encoding="utf-8"), version)
        file = folder / f"whetstone-{version}-{name}.cdx.json"
        file.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"{file}: {len(made['components'])} packages\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sbom"))
