"""How a call ends: when others may go on from it, and what is left where not all of it could be recorded."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from proxy.domain.address import Address
from proxy.domain.call import Call, digest_of
from proxy.inference.completion import CallFinisher
from proxy.inference.context import CallResult
from proxy.recording import recorder
from proxy.trajectories.conversation_hash import ConversationHasher
from proxy.trajectories.resolver import TrajectoryResolver
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, make_call, settings_for
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

QUESTION = ("/v1/completions", b"body", None)
USER = {"role": "user", "content": "hi"}


class Journal:
    """A recorder that takes some calls and not the others."""

    def __init__(self, *takes: str) -> None:
        self._takes = takes

    def record_or_drop(self, call: Call) -> bool:
        return call.id in self._takes


class NoTables:
    """Never asked here."""


def test_of_prompts_that_were_recorded_in_part_the_call_may_be_asked_again() -> None:
    threads: Any = TrajectoryResolver(NoTables(), SimpleNamespace(alone=True), 1800)  # type: ignore[arg-type]
    asked = ConversationHasher().conversation([msgspec.Raw(json.dumps(USER).encode())], None)
    place = threads.resolve_in_memory("a", Address(), asked, QUESTION)
    digest, broken = digest_of(QUESTION), {"status": "aborted", "created_at_s": time.time(), "address": Address()}
    calls = [
        make_call("a", place.trajectory_id, request_digest=digest, **broken),
        make_call("b", "t2", first_id="a", **broken),
    ]
    turn: Any = SimpleNamespace(
        id="a", place=place, question=QUESTION, principal=None, address=Address(), redactor=None, dropped=False,
        calls=lambda _ended: calls,
    )  # fmt: skip
    finisher = CallFinisher(Journal("a"), threads, SimpleNamespace(), lambda *_: None)  # type: ignore[arg-type]
    finisher.on_recorded(turn, finisher.record_now(turn, CallResult("aborted", (), None)))
    assert turn.dropped
    assert list(threads._unanswered.of(digest, None, time.time())) == ["a"]
    assert not threads._running.of(QUESTION, None, time.time())


@pytest.mark.parametrize("durability", ["journal", "fsync"])
def test_who_has_heard_the_last_word_of_a_stream_may_go_on_from_it_though_its_end_is_still_to_come(
    durability: str,
    sqlite_url: str,
    fake_vllm: FakeVllm,
    tmp_path: Path,
    start: Callable[[Settings], RunningProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(descriptors: list[int]) -> None:
        time.sleep(0.3)
        sync(descriptors)

    sync = recorder.sync
    monkeypatch.setattr(recorder, "sync", slow)
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"durability": durability}))
    asked = {"model": "starter", "messages": [USER], "stream": True}
    # While another writes to it, SQL does not have the call and cannot tell.
    with _writing(sqlite_url), proxy.client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        lines = answer.iter_lines()  # which hangs up when nobody holds it any more
        said = _until_it_is_finished(lines)
        more = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        with httpx.Client(base_url=proxy.url, trust_env=False, verify=False, timeout=60) as other:
            told = other.post("/v1/chat/completions", json={"model": "starter", "messages": more}).headers
    assert told["x-threaded-by"] == "content"
    assert told["x-trajectory-id"] == answer.headers["x-trajectory-id"]


@contextmanager
def _writing(url: str) -> Iterator[None]:
    engine = connect(url)
    with engine.begin():
        yield
    engine.dispose()


def _until_it_is_finished(lines: Iterator[str]) -> str:
    said = ""
    for line in lines:
        if line.startswith("data: {") and (choices := json.loads(line.removeprefix("data: "))["choices"]):
            said += choices[0]["delta"].get("content") or ""
            if choices[0]["finish_reason"]:
                return said
    raise AssertionError("the stream has no end")
