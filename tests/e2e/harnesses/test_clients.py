"""Clients that people use, run unchanged; docs/clients.md; and that a run which does not hold is reported."""

import json
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.bodies import clean
from benchmarks.clients.environments import APPS
from benchmarks.clients.page import lines_of, page
from benchmarks.clients.report import Row
from benchmarks.clients.table import BY_NAME, CLIENTS, QUESTIONS, RESULT, TEXTS
from benchmarks.fakes.tool_vllm import ToolCall, prompt_ids, tools_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(1800)
@pytest.mark.long(part="clients")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_client_is_served_recorded_threaded_and_trainable(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.clients", "--only", name]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "it holds" in run.stdout


@pytest.mark.parametrize("client", CLIENTS, ids=BY_NAME)
def test_a_client_has_an_app_and_its_versions_are_pinned(client: Any) -> None:
    text = (APPS / ("node" if client.in_node else "python") / client.program).read_text(encoding="utf-8")
    assert all(question in text for question in QUESTIONS)
    pinned = r".+@\d[\d.]*" if client.in_node else r".+==\d[\d.]*"
    assert all(re.fullmatch(pinned, package) for package in client.packages)


def row(**values: Any) -> Row:
    """A row of which everything holds, of a client without exceptions."""
    given: dict[str, Any] = {
        "client": BY_NAME["anthropic"],
        "calls": 4,
        "refused": (),
        "recorded": 4,
        "trajectories": 1,
        "sampled": 40,
        "trainable": 40,
        "decided": None,
        "endpoints": Counter({"chat.completions": 4}),
        "reasons": Counter(),
        "constraints": Counter(),
        "threaded_by": Counter({"new": 1, "content": 3}),
        "answered": True,
        "answer_id": "chatcmpl-1",
    }
    return Row(**given | values)


def test_a_run_of_which_everything_holds_has_no_fault() -> None:
    assert row().faults == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("works", {"answered": False}),
        ("works", {"refused": ("400 /v1/responses: no",)}),
        ("recorded", {"recorded": 3}),
        ("recorded", {"recorded": 0, "calls": 0}),
        ("trajectory", {"trajectories": 2}),
        ("trainable", {"trainable": 37}),
        ("trainable", {"trainable": 0, "sampled": 0}),
        ("id", {"answer_id": None}),
    ],
)
def test_what_does_not_hold_is_a_fault_unless_the_client_excepts_it(name: str, values: dict[str, Any]) -> None:
    lacking = row(**values)
    assert len(lacking.faults) == 1 and lacking.faults[0].startswith("anthropic: ")
    assert replace(lacking, client=replace(lacking.client, exceptions=(name,))).faults == []


def test_a_page_has_the_rows_of_the_last_runs_in_order() -> None:
    last = page([replace(row(), client=client) for client in reversed(CLIENTS[1:])])
    assert list(lines_of(last)) == [client.label for client in CLIENTS[1:]]
    lines = lines_of(page([replace(row(recorded=3), client=CLIENTS[0])], last))
    assert list(lines) == [client.label for client in CLIENTS]
    assert "| 3 of 4 |" in lines[CLIENTS[0].label] and "| 4 of 4 |" in lines[CLIENTS[1].label]


def body(*messages: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    return {"messages": list(messages), "tools": [tool]}


def test_a_tool_is_called_once_where_it_is_offered() -> None:
    rules = BY_NAME["anthropic"].rules

    def answer(request: dict[str, Any]) -> Any:
        text = json.dumps(request)
        return next(rule.answer for rule in rules if rule.fits(text, tools_of(request)))

    question = {"role": "user", "content": QUESTIONS[0]}
    assert answer(body(question)) == ToolCall("weather", {"city": "Bern"})
    assert answer(body(question) | {"tool_choice": "none"}) == TEXTS[0]
    result = {"role": "tool", "content": RESULT}
    assert answer(body(question, result)) == TEXTS[0]
    assert answer(body(question, result, {"role": "user", "content": QUESTIONS[2]})) == TEXTS[2]


def test_a_prompt_begins_with_the_prompt_and_the_answer_before_it() -> None:
    arguments = '{ "city" : "Bern" }'
    function = {"name": "weather", "arguments": arguments}
    question, called = {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"function": function}]}
    first = prompt_ids(body(question))
    sampled = prompt_ids({"messages": [{"role": "x", "content": ToolCall("weather", {"city": "Bern"}).text}]})[1:-1]
    second = prompt_ids(body(question, called, {"role": "tool", "content": "sunny"}))
    assert second[: len(first) + len(sampled)] == first + sampled


def test_what_belongs_to_one_machine_or_moment_is_taken_out() -> None:
    first, second = "019a0b1c2d3e4f50", "0d9c1b2a-0000-4000-8000-00000000abcd"
    request = {"id": f"chatcmpl-{first}", "session": second, "again": [first], "most": 9007199254740991}
    private = {"cwd": "/tmp/x/work", "day": "2026-11-26", "command": f"at {socket.gethostname()}, 10:11:12"}
    assert clean(request | private, {"/tmp/x": "/home/user"}, {}) == {
        "id": "chatcmpl-0000000000000001",
        "session": "00000000-0000-0000-0000-000000000002",
        "again": ["0000000000000001"],
        "most": 9007199254740991,
        "cwd": "/home/user/work",
        "day": "2026-01-01",
        "command": "at host, 12:00:00",
    }
