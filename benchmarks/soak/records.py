"""Compare SQL's records of the requests of `soak` with what the apps saw and what the model server did."""

import contextlib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fakes.vllm import HARMLESS, Arrival, Fate
from benchmarks.kit.harness import first
from benchmarks.soak.apps import ReceivedAnswer


@dataclass(frozen=True)
class Record:
    """A completion in SQL. None: no value."""

    number: int
    completion_id: str
    call_id: str
    upstream_id: str
    status: str
    follows: str | None
    text: str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    logprobs: list[float] | None


def records_of(database: Path) -> list[Record]:
    """Return every completion in SQL, with the number of the request in its last message."""
    query = (
        "SELECT new_messages, completion_id, call_id, upstream_id, status, follows, response_text, "
        "prompt_token_ids, token_ids, inference_logprobs FROM admin_completions"
    )
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(query).fetchall()
    return [Record(_number_of(row[0]), *row[1:7], *(_list(text) for text in row[7:])) for row in rows]


def wrong_with_records(seen: ReceivedAnswer, arrivals: list[Arrival], records: list[Record]) -> str | None:
    """Return how the three ledgers differ for one request; None where they agree."""
    request = seen.ask
    if request.refused or request.leaves == "asking":
        came = f"{len(arrivals)} arrivals and {len(records)} records of what the proxy had to refuse"
        return came if arrivals or records else None
    # After a 404 for a missing adapter, the proxy may send the request again.
    again = request.plan.fate is Fate.STATUS_404
    if (len(arrivals) > 1 and not again) or len(records) > 1:
        return f"{len(arrivals)} arrivals, {len(records)} records"
    if not arrivals and not seen.left:
        return "it never reached the model server"
    if not records:
        return "no record" if arrivals or "x-completion-id" in seen.headers else None
    record = records[0]
    due = {"complete" if request.plan.fate in HARMLESS else "error"} if arrivals else set()
    if seen.left:
        due.add("aborted")
    if record.status not in due:
        return f"{record.status}, not {' or '.join(sorted(due))}"
    return _wrong_id(seen, arrivals, record) or _wrong_words(seen, record)


def _wrong_id(seen: ReceivedAnswer, arrivals: list[Arrival], record: Record) -> str | None:
    call_ids = {arrival.request_id for arrival in arrivals}
    is_other = record.status == "complete" and not all(map(record.upstream_id.endswith, call_ids))
    return first(
        {
            "the app holds another completion id": (
                seen.headers.get("x-completion-id", record.completion_id) != record.completion_id
            ),
            "the model server knows another call id": call_ids - {record.call_id},
            f"its upstream id is {record.upstream_id}": is_other,
        }
    )


def _wrong_words(seen: ReceivedAnswer, record: Record) -> str | None:
    """Check that the app received no more than is recorded, and that no more is recorded than the model sent."""
    plan = seen.ask.plan
    try:
        received = seen.text()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # an answer that cannot be read is a fault already
    text, token_ids, logprobs = record.text or "", record.token_ids or [], record.logprobs or []
    count, due = len(token_ids), len(plan.token_ids)
    is_silent = plan.fate is Fate.NO_CHOICES and not plan.streamed
    is_whole = record.status == "complete" and not is_silent
    return first(
        {
            f"{count} of {due} sampled tokens": is_whole and (text != plan.text or count != due),
            "other prompt ids than the model's": (
                is_whole and record.follows is None and record.prompt_token_ids != plan.prompt_ids
            ),
            f"{text[:80]!r} is not the model's text": not plan.text.startswith(text),
            f"the app received {len(received)} characters, {len(text)} are recorded": not text.startswith(received),
            "other ids or logprobs than the model's": (
                token_ids != plan.token_ids[:count] or logprobs != plan.logprobs[:count]
            ),
        }
    )


def _number_of(new_messages: str) -> int:
    last = json.loads(new_messages)[-1]
    return int(str(last.get("content") or last.get("prompt")).rpartition("#")[2])


def _list(text: str | None) -> list[Any] | None:
    return None if text is None else json.loads(text)
