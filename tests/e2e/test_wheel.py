"""The built wheel has everything that the product needs at run time, and runs where there is no checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import wrong_builds
from tests.docs_blocks import pages
from tests.e2e.test_stack import query
from whetstone import __version__
from whetstone.torch_builds import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
OURS = ("proxy", "judge", "trainer", "migrations", "whetstone")
EXTRAS = re.compile(r"(?:whetstone-proxy|-e '\.)\[([a-z,]+)\]")
"""What a page has pip install, from the index or from the checkout."""
FILES = """
import json
from importlib.resources import files
from judge.ruler import prompt
from migrations import run
from proxy.dashboard import assets, rendering
from whetstone.demo import demo
from whetstone.config.settings import STARTER
found = [prompt.__file__, run.__file__, assets.FOLDER, rendering.TEMPLATES, demo.AGENT, STARTER]
assert files("whetstone") / "starter" == STARTER
print(json.dumps([str(path) for path in found]))
"""


def ran(*command: str | Path) -> str:
    """What it prints. It must succeed."""
    ended = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git tracks."""
    source, into = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ran("git", "ls-files", "pyproject.toml", "README.md", "LICENSE", *OURS).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    ran(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, source)
    (built,) = into.iterdir()
    return built


def test_the_wheel_has_the_name_it_is_published_under_and_the_version_of_the_code(wheel: Path) -> None:
    assert wheel.name == f"whetstone_proxy-{__version__}-py3-none-any.whl"


def test_every_file_of_our_packages_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        there = {name for name in packed.namelist() if name.split("/")[0] in OURS}
    assert there == set(ran("git", "ls-files", *OURS).splitlines())


def test_the_extras_that_pages_name_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    named = {name for text in texts for extras in EXTRAS.findall(text) for name in extras.split(",")}
    assert {"serving", "training", "demo"} <= named <= set(project["optional-dependencies"])


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, beside packages as pip chooses them without a lock.

    Other people's packages are those of this environment. Its list of paths is not read, so no checkout is found.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "theirs.pth").write_text("\n".join(theirs), encoding="utf-8")
    wrong_builds.install(packages)
    return python.parent


def outside(folder: Path, *command: str | Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """Run it in the folder; nothing in the environment leads to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = list(map(str, command))
    return subprocess.run(told, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_what_the_product_needs_lies_in_its_packages(installed: Path, tmp_path: Path) -> None:
    assert "base_url" in outside(tmp_path, installed / "whetstone", "--help").stdout
    told = outside(tmp_path, installed / "python", "-c", FILES)
    assert told.returncode == 0, told.stderr
    for path in map(Path, json.loads(told.stdout)):
        assert path.exists() and path.is_relative_to(installed.parent)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.long(part="stacks")
@pytest.mark.timeout(600)
def test_the_demo_runs_in_an_empty_folder_beside_a_torchvision_of_another_build(
    installed: Path, tmp_path: Path
) -> None:
    ended = outside(tmp_path, installed / "whetstone", "demo", "--steps", "1", "--games", "20", timeout_s=500)
    # One step teaches nothing: whether the intervals part is chance.
    assert ended.returncode == (0 if "the reward rose" in ended.stdout else 1), ended.stdout + ended.stderr
    assert " 0 failed requests" in ended.stdout
    assert f"pip uninstall {' '.join(PACKAGES)}" in " ".join(ended.stdout.split())
    data = tmp_path / "data" / "demo"
    assert (data / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert query(data, "SELECT state FROM admin_steps WHERE step = 1") == [{"state": "promoted"}]
    (policy,) = query(data, "SELECT model_path FROM policies")
    assert Path(policy["model_path"]).is_relative_to(installed.parent)
