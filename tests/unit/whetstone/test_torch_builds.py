"""Packages of another build than torch are found, and hidden from processes that transformers would break."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import wrong_builds
from whetstone.torch_builds import PACKAGES

ROOT = Path(__file__).parents[3]
REPORT = """
import json
from pathlib import Path
from whetstone import torch_builds
print(json.dumps({
    "mismatched": torch_builds.mismatched(),
    "warning": torch_builds.warning(),
    "environment": torch_builds.environment(),
    "other": torch_builds.environment(Path("/opt/other/bin/python")),
}))
"""
VLLM_IMPORTS = "from transformers.models.auto import image_processing_auto"
"""The first import of vLLM's that needs torchvision if it is installed."""


def python(program: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **more}
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def report(folder: Path) -> dict[str, Any]:
    ended = python(REPORT, folder)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_packages_of_another_build_are_named_with_the_remedy(tmp_path: Path) -> None:
    wrong_builds.install(tmp_path)
    told = report(tmp_path)
    assert told["mismatched"] == [f"{name} {release}" for name, release in wrong_builds.RELEASES.items()]
    assert "torchvision 0.28.0" in told["warning"]
    assert told["warning"].endswith("pip uninstall torchvision torchaudio torchcodec")
    assert told["other"] == {}, "another Python has packages of its own"


@pytest.mark.long(part="stacks")
def test_transformers_and_its_children_do_without_them(tmp_path: Path) -> None:
    wrong_builds.install(tmp_path)
    broken = python(VLLM_IMPORTS, tmp_path)
    assert broken.returncode != 0 and wrong_builds.ERROR in broken.stderr
    hidden = report(tmp_path)["environment"]
    assert python(VLLM_IMPORTS, tmp_path, **hidden).returncode == 0
    child = "import multiprocessing as m; m.get_context('spawn').Pool(1).map(__import__, ['{}'])"
    for package in PACKAGES:
        told = python(f"if __name__ == '__main__': {child.format(package)}", tmp_path, **hidden).stderr
        assert told.splitlines()[-1].startswith("ModuleNotFoundError"), told
    assert hidden["PYTHONPATH"].endswith(f"{tmp_path}{os.pathsep}{ROOT}"), "what was on the path stays there"


@pytest.mark.parametrize("build", ["+cpu", None])
def test_nothing_is_hidden_where_the_builds_are_one_or_none_is_installed(tmp_path: Path, build: str | None) -> None:
    if build is not None:
        wrong_builds.install(tmp_path, build)
    assert report(tmp_path) == {"mismatched": [], "warning": None, "environment": {}, "other": {}}
