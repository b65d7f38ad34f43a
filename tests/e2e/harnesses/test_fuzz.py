"""The fuzz in its short form, and that it can fail: what it says of answers and of tables that must not be."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from benchmarks.fakes.instant_vllm import ON_PURPOSE
from benchmarks.fuzz.asks import wrong_with
from benchmarks.fuzz.records import wrong_with_records
from migrations import schema
from tests.conftest import Seed

ROOT = Path(__file__).resolve().parents[3]

JSON = {"content-type": "application/json"}
ERROR = b'{"error": {"message": "no", "type": "invalid_request_error", "code": null, "param": null}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=[pytest.mark.stack, pytest.mark.long(part="harnesses")])]
)
def test_the_proxy_bears_anything(database: str) -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz", "--cases", "300", "--seed", "2", "--database", database]
    fuzz = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert fuzz.returncode == 0, fuzz.stdout + fuzz.stderr[-2000:]
    assert "it holds" in fuzz.stdout


@pytest.mark.parametrize(
    ("status", "headers", "body", "fault"),
    [
        (200, {}, b"anything", None),
        (400, JSON, ERROR, None),
        (500, JSON, b'{"error": {"message": "%s", "type": "x"}}' % ON_PURPOSE.encode(), None),
        (500, JSON, ERROR, "500"),
        (503, JSON, ERROR, "503"),
        (400, {"content-type": "text/plain"}, ERROR, "content type is not JSON"),
        (404, JSON, b'{"detail": "Not Found"}', "OpenAI's shape"),
        (404, JSON, b'{"error": {"message": "", "type": "x"}}', "without message"),
        (400, JSON, b"no", "OpenAI's shape"),
    ],
)
def test_an_answer_that_must_not_be_is_a_fault(
    status: int, headers: dict[str, str], body: bytes, fault: str | None
) -> None:
    reported = wrong_with(status, headers, body)
    assert (reported is None) if fault is None else (reported is not None and fault in reported)


def test_tables_that_are_whole_are_no_fault(seed: Seed, engine: Engine) -> None:
    seed.trajectory("t", seed.group("g"), turns=2)
    feedback_id = seed.feedback("t", 1.0)
    assert list(wrong_with_records(engine, {"call-t-0", "call-t-1"}, {feedback_id})) == []


def test_half_a_record_is_a_fault(seed: Seed, engine: Engine) -> None:
    seed.trajectory("t", turns=2)
    with engine.begin() as connection:
        connection.execute(update(schema.trajectories).values(completions=3))
        connection.execute(
            update(schema.completions).where(schema.completions.c.id == "t-1").values(follows="nobody", token_ids=None)
        )
    reported = "\n".join(wrong_with_records(engine, {"call-t-0", "lost"}, {"lost too"}))
    for fault in ("count their completions wrongly", "follow what is not there", "not their logprobs"):
        assert fault in reported
    assert "1 calls are not in SQL" in reported
    assert "1 feedbacks are not in SQL" in reported
