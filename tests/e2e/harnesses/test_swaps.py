"""Swaps under load in their short form, and that the proof can fail: each thing that is wrong is reported."""

import math
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from benchmarks.swaps.adapters import Sets
from benchmarks.swaps.figures import (
    AFTER_S,
    BEFORE_S,
    TOLERANCE_NATS,
    RequestOutcome,
    Swap,
    fits,
    gaps,
    late,
    percentile,
    stalls,
    stepped_back,
    waits,
)
from benchmarks.swaps.records import RecordedCompletion, judge, recorded
from benchmarks.swaps.scene import kill, settings_of
from migrations import schema
from tests.conftest import Seed
from whetstone.registry.adapters import verify

ROOT = Path(__file__).resolve().parents[3]

PROMPT, ANSWER = (1, 11, 5), tuple(range(20, 36))


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("parts", "swaps"),
    [("swaps", 3), pytest.param("swaps,killed", 8, marks=pytest.mark.long(part="harnesses"))],
)
def test_swaps_under_load_fail_no_request_and_mix_no_versions_and_a_killed_server_comes_back(
    parts: str, swaps: int
) -> None:
    command = [sys.executable, "-m", "benchmarks.swaps", "--short", "--seed", "1", "--parts", parts]
    command += ["--swaps", str(swaps), "--every", "3", "--connections", "8"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "it holds" in run.stdout
    assert "18 of 18 caught" in run.stdout


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    """Two sets of random weights."""
    data = tmp_path_factory.mktemp("swaps")
    return Sets(settings_of(data, 0), data / "sets", 0, (4, 4))


def completion(sets: Sets, speaker: int, version: int) -> RecordedCompletion:
    """A completion by one speaker, recorded as this version's."""
    return RecordedCompletion("c", version, PROMPT, ANSWER, tuple(sets.logprobs(speaker, PROMPT, ANSWER)))


def test_versions_alternate_between_the_two_sets() -> None:
    assert [Sets.speaker(version) for version in range(6)] == [0, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("version", [0, 1, 2, 7, 50])
def test_a_completion_by_its_version_fits(sets: Sets, version: int) -> None:
    verdict = judge([completion(sets, Sets.speaker(version), version)], sets)
    assert (verdict.completions, verdict.tokens, verdict.misfits) == (1, len(ANSWER), ())
    assert verdict.worst_gap < TOLERANCE_NATS / 10


@pytest.mark.parametrize(("speaker", "version"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_a_completion_by_another_version_is_a_fault(sets: Sets, speaker: int, version: int) -> None:
    (misfit,) = judge([completion(sets, speaker, version)], sets).misfits
    assert misfit.startswith(f"c: {len(ANSWER)} tokens, off by ")


@pytest.mark.parametrize("switch", [4, 8, 12, 15])
def test_a_completion_that_switched_on_the_way_is_a_fault_whichever_version_is_recorded(
    sets: Sets, switch: int
) -> None:
    one, other = completion(sets, 1, 1), completion(sets, 2, 2)
    mixed = replace(one, logprobs=one.logprobs[:switch] + other.logprobs[switch:])
    assert judge([mixed], sets).misfits
    assert judge([replace(mixed, version=2)], sets).misfits


def test_a_switch_shows_in_the_half_it_lies_in() -> None:
    assert gaps([0.0] * 8, [0.0] * 6 + [-1.0] * 2) == (0.0, 0.5)
    assert gaps([0.0] * 3, [-3.0, 0.0, 0.0]) == (1.5, 0.0)


@pytest.mark.parametrize("computed", [[math.nan] * 2, [-0.5], []])
def test_what_cannot_be_compared_fits_nothing(computed: list[float]) -> None:
    assert not fits([-0.5, -0.5], computed)
    assert not fits([], [])


def outcome(began_at: float, version: int | None = 1, **values: Any) -> RequestOutcome:
    """A whole stream that begins a trajectory: its first event after 10 ms, its end after 30."""
    events = [began_at + 0.01, began_at + 0.02]
    given = {"streamed": True, "new": True, "whole": True, "events_at": events, "ended_at": began_at + 0.03} | values
    return RequestOutcome(began_at, version=version, **given)


SWAP = Swap(2, load_at=10.0, live_at=10.4)


def test_waits_are_of_whole_streams_by_the_moment_they_were_sent() -> None:
    slow = outcome(10.2, events_at=[10.7, 10.8])
    others = [outcome(10.2, streamed=False), outcome(10.2, whole=False), outcome(9.0)]
    during, other = waits([slow, *others], [SWAP])
    assert during == [pytest.approx(0.5)] and other == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("began_at", "felt"),
    [(10 - 2 * BEFORE_S, False), (10 - BEFORE_S / 2, True), (10.4 + AFTER_S / 2, True), (10.5 + AFTER_S, False)],
)
def test_a_swaps_window_is_from_just_before_its_load_until_after_the_switch(began_at: float, felt: bool) -> None:
    during, other = waits([outcome(began_at)], [SWAP])
    assert (len(during), len(other)) == (felt, not felt)


def test_a_stall_that_overlaps_a_swap_is_the_swaps() -> None:
    across = outcome(5.0, events_at=[5.1, 9.8, 11.5])
    assert stalls([across, outcome(20.0, events_at=[20.1, 20.4])], [SWAP]) == (pytest.approx(1.7), pytest.approx(4.7))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (50.0, 99.0, 3.0)
    assert math.isnan(percentile([], 0.5))


def test_an_older_version_after_a_newer_one_had_answered_is_a_fault() -> None:
    assert stepped_back([outcome(1, 1), outcome(2, 2), outcome(3, 2)]) == []
    assert stepped_back([outcome(1, 1), outcome(2, 2), outcome(3, 1)]) == [(1, 2)]


def test_an_older_version_for_an_earlier_request_or_a_later_turn_is_no_fault() -> None:
    assert stepped_back([outcome(1.0, 2), outcome(1.02, 1)]) == []
    assert stepped_back([outcome(1.0, 2), outcome(3.0, 1, new=False), outcome(4.0, None, whole=False)]) == []


def test_an_older_version_after_an_acknowledged_switch_is_late() -> None:
    assert late([outcome(10.3, 1), outcome(10.5, 2), outcome(10.5, 3), outcome(10.5, 1, new=False)], [SWAP]) == 0
    assert late([outcome(10.5, 1), outcome(11.0, 1)], [SWAP]) == 2


def test_a_killed_process_is_gone_only_once_its_sockets_are_closed() -> None:
    script = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        before = time.monotonic()
        assert before < kill(process.pid) <= time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_records_are_read_with_whole_prompts(seed: Seed, engine: Engine) -> None:
    settings = settings_of(Path("unused"), 0)
    seed.trajectory("t", turns=2)
    first, second = recorded(engine, settings)
    assert (first.prompt_ids, first.token_ids, first.version) == ((1, 2), (3, 4), 0)
    assert (second.prompt_ids, second.token_ids, second.logprobs) == ((1, 2, 3, 4, 11, 12), (13, 14), (-0.5, -0.25))


def test_a_prompt_that_is_not_whole_is_no_ground_to_compute_from(seed: Seed, engine: Engine) -> None:
    seed.trajectory("t", turns=0)
    seed.completion("t", 0, prompt_tokens=5)
    with pytest.raises(ValueError, match="has 2 tokens in SQL and 5 in vLLM"):
        recorded(engine, settings_of(Path("unused"), 0))


def test_a_version_is_written_as_a_step_leaves_it(sets: Sets, seed: Seed, engine: Engine, database_kind: str) -> None:
    version = {"sqlite": 3, "postgresql": 5}[database_kind]  # adapters are never overwritten; the first set's both
    sets.add_version(engine, version, parent=0)
    row = seed.one(schema.policy_versions, f"starter@v{version}")
    assert (row.state, row.parent, row.served) == ("candidate", 0, True)
    with engine.connect() as connection:
        assert len(connection.execute(select(schema.policy_versions)).all()) == 2
    folder = Path(row.adapter_path)
    assert verify(folder) == row.manifest_sha256
    assert (folder / "adapter_model.safetensors").read_bytes() == sets.weights[0].content["adapter_model.safetensors"]
