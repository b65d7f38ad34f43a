"""How fast a step computes, in the benchmark's short form: TRL's own trainer beside ours, on a smaller model."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.long(part="trl")
@pytest.mark.timeout(600)
def test_a_step_is_as_trls_and_several_times_as_fast_as_trl_fed_one_row_a_call(tmp_path: Path) -> None:
    # One thread, for several wait for one another where other work runs too. Against merged rows such work could hide
    # the difference, so the whole benchmark asks for 1.5 and this one for none.
    report = tmp_path / "report.json"
    small = ["--vocabulary", "512", "--layers", "2", "--threads", "1"]
    options = ["--turns", "2", "8", "--repeats", "3", "--enough", "4", "0", *small]
    python = ROOT / ".venv-trl" / "bin" / "python"
    assert python.exists(), "TRL's environment is not there: `make test` and `make steps` build it"
    command = [python, "-W", "ignore", "-m", "benchmarks.learning.step", *options, "--json", report]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(report.read_text())
    assert {(one["turns"], one["who"]) for one in results} == {
        (turns, who)
        for turns in (2, 8)
        for who in ("ours", "ours, whole step", "TRL, row per call", "TRL, merged rows")
    }
    read = {(one["turns"], one["who"]): one["read_tokens"] for one in results}
    # 256 tokens of the prompt once; of each trajectory 32 sampled in each turn and 32 read before each but the first.
    assert read[2, "ours"] == 256 + 8 * (2 * 32 + 32)
    assert read[8, "ours"] == 256 + 8 * (8 * 32 + 7 * 32)
    assert read[8, "TRL, merged rows"] == 8 * (256 + 8 * 32 + 7 * 32)
