"""`whetstone doctor --memory`: a table for people, an object for programs, and a code that says whether it fits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.shapes import write

Run = Callable[..., Any]


@pytest.fixture
def sizes(tmp_path: Path) -> dict[str, str]:
    return {size: str(write(tmp_path, size)) for size in ("7B", "14B")}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_fits_ends_with_0_and_says_who_gets_what(whetstone: Run, sizes: dict[str, str]) -> None:
    done = whetstone("doctor", "--memory", sizes["7B"], "--device-gb", "24", "--shared")
    assert done.code == 0
    printed = " ".join(done.out.split())
    for part in ("7.6B parameters, on 24 GiB", "vLLM sleeps while a step trains", "tokens; longest request 2"):
        assert part in printed
    assert "learning rate 1e-05" in printed and "rows of 8192 tokens" in printed and printed.endswith("it fits")


def test_what_does_not_fit_ends_with_1_and_says_what_would(whetstone: Run, sizes: dict[str, str]) -> None:
    done = whetstone("doctor", "--memory", sizes["14B"], "--device-gb", "24")
    assert done.code == 1
    printed = " ".join(done.out.split())
    assert "it does not fit: vLLM needs 30.5 GiB" in printed and printed.endswith("What would fit: cards of 40 GiB")


def test_programs_read_bytes(whetstone: Run, sizes: dict[str, str]) -> None:
    done = whetstone("doctor", "--memory", sizes["7B"], "--device-gb", "80", "--own", "--json")
    plan = json.loads(done.out)
    assert (plan["mode"], plan["fits"], plan["gpu_memory_utilization"]) == ("own", True, 0.92)
    assert plan["card_bytes"] == 80 * 2**30 and plan["trainer"]["base"] == 15_231_233_024
    assert plan["learning_rate"] == 1e-5 and plan["max_row_tokens"] == 8192


def test_settings_count(whetstone: Run, sizes: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "whetstone.toml").write_text("[vllm]\nshares_device = false\n[trainer]\nmax_row_tokens = 4096\n")
    done = whetstone("doctor", "--memory", sizes["7B"], "--device-gb", "48", "--shared", "--json")
    assert json.loads(done.out)["mode"] == "beside"


def test_no_model_and_no_gpu_are_one_sentence_each(
    whetstone: Run, sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing = whetstone("doctor", "--memory", str(tmp_path / "none"), "--device-gb", "24")
    assert nothing.code == 2 and "config.json cannot be read" in " ".join(nothing.err.split())
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    unnamed = whetstone("doctor", "--memory", sizes["7B"])
    assert unnamed.code == 2 and "name the memory of a card with --device-gb" in " ".join(unnamed.err.split())


def test_the_gpus_that_are_here_are_the_default(
    whetstone: Run, sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a, 24564, NVIDIA L4'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = whetstone("doctor", "--memory", sizes["7B"], "--json")
    plan = json.loads(done.out)
    assert (done.code, plan["mode"], plan["card_bytes"]) == (0, "asleep", 24564 * 2**20)
