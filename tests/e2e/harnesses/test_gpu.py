"""The runbook for GPUs, as far as a machine without one goes: what it computes, and its rehearsal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as runbook
from benchmarks.gpu import cards
from benchmarks.gpu.cards import Peak
from benchmarks.gpu.load import Answer, first_token_s, longest_silence_s, reward_of, tokens_per_s
from benchmarks.gpu.peak import peak_of
from benchmarks.gpu.report import markdown, write
from benchmarks.gpu.scene import compared, unlike_parents
from benchmarks.gpu.tasks import learn, summary
from benchmarks.gpu.variants import Variant, variants
from whetstone.memory.devices import Card
from whetstone.memory.training import TRAINER_BYTES

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = [sys.executable, "-m", "benchmarks.gpu"]


@pytest.mark.slow
def test_without_a_gpu_it_stops_with_one_sentence_before_it_starts_anything(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}  # no nvidia-smi
    command = [*RUNBOOK, "--report", str(tmp_path / "report"), "--data", str(tmp_path / "data")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "report").exists()
    assert "no NVIDIA driver" in sentence and "driver 580 or later" in sentence and "`--rehearse`" in sentence


@pytest.mark.stack
@pytest.mark.timeout(900)
@pytest.mark.long(part="harnesses")
def test_a_rehearsal_measures_all_that_a_cpu_can(tmp_path: Path) -> None:
    command = [*RUNBOOK, "--rehearse", "--report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (model,) = [name for name in report if name.endswith("starter, without a GPU")]
    figures = report[model]
    (shape,) = report["share of peak"]
    assert shape["shape"] == "tiny" and shape["TFLOPS"] > 0 and "MFU" not in shape
    assert report["faults"] == [] and figures["afterwards"]["status"] == 200
    assert all(row["tokens/s"] > 0 for row in figures["serving alone"])
    (step,) = figures["steps"]
    assert step["state"] == "promoted" and step["mismatch_k3"] < 1e-6
    assert {row["version"]: row["probe_k3"] for row in figures["parity, k3 in nats a token"]}[1] < 1e-6
    assert {row["part"] for row in figures["most memory, MiB"]} >= {"vllm", "trainer", "proxy"}
    assert all(row["host_mib"] > 0 for row in figures["most memory, MiB"])
    assert "**It holds.**" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.mark.stack
@pytest.mark.timeout(1800)
@pytest.mark.long(part="real")
def test_a_rehearsal_learns_a_task_where_one_is_named(smollm2: Path, tmp_path: Path) -> None:
    command = [*RUNBOOK, "--rehearse", "--model", str(smollm2), "--task", "routing", "--report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    task = report[f"{smollm2}, task routing"]
    assert [row["measured"] for row in task["held out"]] == ["before", "after"]
    assert task["median step, seconds by phase"]["train"] > 0
    assert json.loads((tmp_path / "0" / "routing.json").read_text())["steps"][0]["state"] == "promoted"


def answer(began_at: float, *events_at: float, tokens: int) -> Answer:
    return Answer(began_at=began_at, ended_at=events_at[-1], tokens=tokens, events_at=list(events_at))


def test_speed_and_pause_are_those_of_the_time_that_is_asked_for() -> None:
    answers = [answer(0, 1, 2, 3, 4, tokens=8), answer(2, 9, 10, tokens=4), Answer(began_at=0, error="gone")]
    assert tokens_per_s(answers, 0, 5) == 8 / 5
    assert tokens_per_s(answers, 2, 10) == (6 + 2) / 8
    assert longest_silence_s(answers, 0, 10) == 5
    assert longest_silence_s(answers, 11, 15) == 4
    assert first_token_s(answers, 0, 10) == [1, 7] and first_token_s(answers, 1, 10) == [7]


def test_a_reward_is_the_share_of_a_letter() -> None:
    assert reward_of("eels") == 0.5 and reward_of("") == 0


def program(tmp_path: Path, script: str) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_memory_of_processes_is_that_which_nvidia_smi_names(tmp_path: Path) -> None:
    smi = program(tmp_path, "echo '12, 700'; echo '13, [N/A]'; echo '12, 300'")
    assert cards.used_mib(smi) == {12: 1000}
    assert cards.used_mib(str(tmp_path / "nothing")) == cards.used_mib(program(tmp_path, "exit 9")) == {}


def test_a_machine_is_used_as_up_would_and_with_one_card_and_with_unsloth(tmp_path: Path) -> None:
    one, two = (Card(index, "GPU-1", 24 * 2**30, "NVIDIA L4") for index in (0, 3))
    nothing = tmp_path / "python"
    assert [variant.cards for variant in variants([], nothing)] == [()]
    assert [variant.cards for variant in variants([one], nothing)] == [(0,)]
    assert [variant.cards for variant in variants([one, two], nothing)] == [(0, 3), (0,)]
    nothing.touch()
    first, second, unsloth = variants([one, two], nothing)
    assert (first.name, second.name, unsloth.cards) == ("a card each", "one card shared", (0, 3))
    assert unsloth.settings == {"trainer__backend": "unsloth", "trainer__python": nothing}


def test_a_variant_shows_its_cards_for_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Variant("some", (1, 2)).visible():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with Variant("all").visible():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA A100-SXM4-80GB", 312),
     ("NVIDIA GeForce RTX 4090", 165), ("Tesla T4", None)],
)  # fmt: skip
def test_a_cards_peak_is_looked_up_by_its_name(card: str, peak: float | None) -> None:
    assert peak_of(card) == peak


def test_a_version_further_from_the_trainer_than_twice_its_parent_is_a_fault() -> None:
    near = {"version": 1, "decision": "pass", "figures": {"k3": 0.002, "parent_k3": 0.001}}
    far = {"version": 2, "decision": "pass", "figures": {"k3": 0.0021, "parent_k3": 0.001}}
    tiny = {"version": 3, "decision": "pass", "figures": {"k3": 1e-9, "parent_k3": 1e-12}}
    other = {"version": 2, "decision": "pass", "figures": {"mean": 0.5}}
    assert unlike_parents([near, far, tiny, other]) == ["version 2: k3 0.0021 nats a token, its parent 0.001"]


def test_a_tasks_summary_has_what_was_measured_and_where_a_step_spends_its_time() -> None:
    steps = [{"kind": "grpo", "phases": {"train": seconds, "probe": 1.0}} for seconds in (2.0, 4.0, 9.0)]
    measured = {"before": {"share": [0.1, 0.0, 0.2]}, "after": {"share": [0.5, 0.4, 0.6], "gain": [0.4, 0.3, 0.5]}}
    summarised = summary({"steps": [{"kind": "sft"}, *steps], "measured": measured, "seconds": {"after": 60.0}})
    assert summarised["held out"] == [
        {"measured": "before", "share": 0.1},
        {"measured": "after", "share": 0.5, "gain": 0.4, "from": 0.3, "to": 0.5},
    ]
    assert list(summarised["median step, seconds by phase"].items()) == [("train", 4.0), ("probe", 1.0)]


def test_a_task_that_does_not_end_is_a_fault_and_no_earlier_report_is_read(tmp_path: Path) -> None:
    (tmp_path / "routing.json").write_text("{}")
    figures, (fault,) = learn("routing", str(tmp_path / "no model"), tmp_path, tmp_path / "data", ["--steps", "x"])
    assert fault == "routing: ended with exit code 2" and "invalid int value" in figures["output"]


PLAN: dict[str, Any] = {
    "gpu_memory_utilization": 0.5,
    "card_bytes": 24 * 2**30,
    "trainer": {"base": 3 * 2**30, "activations": 2**30},
    "host_bytes": 10 * 2**30,
}
"""Of what `whetstone doctor --memory --json` prints, what the runbook reads."""


def test_a_plan_is_held_against_the_peaks() -> None:
    peaks = {"vllm": Peak(12000, 4000), "trainer": Peak(9000, 3000), "proxy": Peak(0, 100)}
    rows = {row["what"]: (row["planned MiB"], row["measured MiB"]) for row in compared(PLAN, peaks)}
    assert rows == {
        "GPU memory of a vLLM": (12288, 12000),
        "GPU memory of the trainer": (4096 + TRAINER_BYTES / 2**20, 9000),
        "host memory": (10240, 7100),
    }
    assert compared({"output": "no such model"}, peaks) == []


def test_a_report_is_written_for_programs_and_for_people(tmp_path: Path) -> None:
    report = {
        "faults": ["it stopped | early"],
        "model": {"seconds": 1.23456, "log": "a\nb", "steps": [{"step": 1}, {"step": 2, "kl": 0.1}]},
    }
    as_json, as_markdown = write(tmp_path / "new", report)
    assert json.loads(as_json.read_text(encoding="utf-8")) == report
    page = as_markdown.read_text(encoding="utf-8")
    assert page == markdown(report)
    assert "**1 faults.**" in page and "- it stopped | early" in page and "| seconds | 1.235 |" in page
    assert "```\na\nb\n```" in page and "### steps\n\n| step | kl |\n| --- | --- |\n| 1 |  |\n| 2 | 0.1 |" in page


def test_the_environment_lists_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runbook, "cards", lambda: (Card(0, "GPU-1", 80 * 2**30, "NVIDIA H100 80GB HBM3"),))
    one = {"index": 0, "uuid": "GPU-1", "memory_bytes": 80 * 2**30, "name": "NVIDIA H100 80GB HBM3"}
    assert runbook.environment()["cards"] == [one]
