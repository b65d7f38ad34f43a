"""The bills of materials: every package of a lock with its version and all hashes, and the same bytes each time."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name

from whetstone import __version__

FOLDER = Path(__file__).parents[2] / "requirements"


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    """requirements/sbom.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("sbom", FOLDER / "sbom.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cpu", "server", "trainer", "server-cuda", "trainer-cuda", "trainer-unsloth"])
def test_every_package_of_a_lock_is_there_with_all_hashes(sbom: ModuleType, name: str) -> None:
    lock = (FOLDER / f"{name}.lock").read_text(encoding="utf-8")
    made = sbom.bill(name, lock, __version__)
    pinned = [line.split(" ")[0].split("==") for line in lock.splitlines() if re.match(r"[A-Za-z0-9]\S*==", line)]
    listed = [(component["name"], component["version"]) for component in made["components"]]
    assert listed == [(canonicalize_name(package.split("[")[0]), version) for package, version in pinned]
    hashes = [one["content"] for part in made["components"] for one in part["externalReferences"][0]["hashes"]]
    assert hashes == re.findall(r"sha256:([0-9a-f]{64})", lock)
    references = [component["bom-ref"] for component in made["components"]]
    assert len(set(references)) == len(references)


def test_it_is_cyclonedx_and_names_the_release(sbom: ModuleType) -> None:
    made = sbom.bill("cpu", "torch==2.13.0+cpu \\\n    --hash=sha256:" + "0" * 64 + "\n", "0.2.0")
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    assert made["metadata"]["component"]["purl"] == "pkg:pypi/whetstone-proxy@0.2.0"
    (torch,) = made["components"]
    assert torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert torch["externalReferences"][0]["url"].startswith("https://download.pytorch.org/")


def test_the_same_locks_make_the_same_files(
    sbom: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("one", "two"):
        sbom.main(tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(f"whetstone-{__version__}-{name}.cdx.json" for name in sbom.LOCKS)
    for name in files:
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert first == second and json.loads(first)["components"]


@pytest.mark.parametrize("line", ["torch>=2", "-r other.lock", "./wheels/torch.whl"])
def test_a_line_that_pins_no_package_is_refused(sbom: ModuleType, line: str) -> None:
    with pytest.raises(ValueError, match="no pinned package"):
        list(sbom.components(f"{line}\n"))
