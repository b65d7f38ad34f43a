"""Supervised steps on the whole stack, taken by launched jobs: real vLLM, proxy and workers, a scripted teacher."""

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.fakes.json_server import Handler, Server
from tests.e2e.test_stack import until, up
from whetstone.cli.tables.sql_query import asking
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.vllm.client import Vllm

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

END = "<|im_end|>"
CONFIG = """
[upstreams.far]
url = "{url}/v1"
models = {{ teacher = "large" }}
[trainer]
groups_per_step = 1
min_fresh_share = 0.0
[launcher]
command = ["{python}", "-m", "trainer.job"]
idle_s = 10
usd_per_hour = 3.6
"""
TOOLS = [{"type": "function", "function": {"name": "roll", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "roll", "arguments": '{"sides": 6}'}}


class Teacher(Server):
    """Another OpenAI-compatible server: it calls the tool it is offered, else repeats the question twice."""

    def __init__(self) -> None:
        super().__init__(TeacherHandler)


class TeacherHandler(Handler):
    def respond(self, body: dict[str, Any]) -> None:
        question = body["messages"][-1]["content"]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": f"{question} {question}",
            "refusal": None,
            "annotations": [],
        }
        if body.get("tools"):
            message |= {"content": None, "tool_calls": [CALL]}
        why = "tool_calls" if body.get("tools") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": why, "logprobs": None}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        answer = {"id": "chatcmpl-far", "object": "chat.completion", "created": 1, "model": body["model"]}
        self.whole(200, answer | {"choices": [choice], "usage": usage})


class App:
    """An app, and an admin who asks for steps."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.database = addresses["database"]
        self.http = httpx.Client(base_url=addresses["proxy"], timeout=60)
        self.vllm = Vllm(addresses["vllm"])
        self.store = Store(connect(self.database))

    def chat(self, text: str, trajectory: str, model: str = "starter", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        request = {"model": model, "messages": messages, "max_tokens": 16} | body
        response = self.http.post("/v1/chat/completions", json=request, headers={"X-Trajectory-Id": trajectory})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def says(self, text: str) -> str:
        """Return the policy's likeliest answer; no step trains on it."""
        body = {"messages": [{"role": "user", "content": text}], "model": "starter", "max_tokens": 16, "temperature": 0}
        response = self.http.post("/v1/chat/completions", json=body, headers={"X-No-Train": "true"})
        return str(response.json()["choices"][0]["message"]["content"])

    def feedback(self, **fields: Any) -> None:
        """Post feedback, and wait until it is applied."""
        feedback_id = self.http.post("/v1/feedback", json=fields).json()["id"]
        until(lambda: self.http.get(f"/v1/feedback/{feedback_id}").json()["state"] == "applied")

    def step(self, **fields: Any) -> dict[str, Any]:
        """Request a step and return it once it has ended."""
        before = len(self.store.steps("default", "starter"))
        response = self.http.post("/admin/policies/starter/step", json=fields)
        assert response.status_code == 202, response.text
        return self.ended(before)

    def ended(self, before: int) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            steps = self.store.steps("default", "starter")
            return steps[before] if len(steps) > before and steps[before]["ended_at"] else None

        step: dict[str, Any] = until(over, 120)
        return step

    def rows(self, sql: str) -> list[dict[str, Any]]:
        with asking(self.database, sql) as (columns, rows):
            return [dict(zip(columns, row, strict=True)) for row in rows]

    def text_of(self, token_ids: str) -> str:
        """What vLLM reads in stored ids."""
        body = {"model": "starter@v0", "tokens": [int(token_id) for token_id in token_ids.strip("[]").split(",")]}
        return str(self.vllm.answer("POST", "/detokenize", body, 10)["prompt"])


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with Teacher() as teacher:
        folder = tmp_path_factory.mktemp("stack")
        (folder / "whetstone.toml").write_text(CONFIG.format(url=teacher.url, python=sys.executable))
        with up(folder / "data", "--config", str(folder / "whetstone.toml")) as (_, addresses):
            app = App(addresses)
            yield app
            app.http.close()
            app.vllm.close()


def test_demonstrations_are_learned_until_the_policy_says_them(app: App) -> None:
    """Text and tool call over chat, and a text over Anthropic's messages: each from its own logged prompt."""
    answer = app.chat("what is it?", "asked")
    app.feedback(completion_id=answer["id"], demonstration="Nothing at all!")
    app.chat("roll", "rolled", tools=TOOLS)
    app.feedback(
        trajectory_id="rolled", demonstration={"role": "assistant", "content": None, "tool_calls": [CALL]}, final=False
    )
    body = {"model": "starter", "max_tokens": 8, "messages": [{"role": "user", "content": "anthropic"}]}
    response = app.http.post("/v1/messages", json=body, headers={"X-Trajectory-Id": "messages"})
    assert response.status_code == 200, response.text
    app.feedback(trajectory_id="messages", demonstration="By messages.", final=False)

    steps = [app.step(kind="sft", **{"from": "demonstrations"}) for _ in range(4)]
    assert [(step["state"], step["kind"], step["completions"], step["error"]) for step in steps] == [
        ("promoted", "sft", 3, None)
    ] * 4
    losses = [step["loss"] for step in steps]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0], losses
    taken = app.rows("SELECT * FROM admin_examples WHERE source = 'demonstrations'")
    assert {row["trajectory_id"]: app.text_of(row["token_ids"]) for row in taken} == {
        "asked": f"Nothing at all!{END}",
        "rolled": f'<tool_call>\n{{"name": "roll", "arguments": {{"sides": 6}}}}\n</tool_call>{END}',
        "messages": f"By messages.{END}",
    }
    assert {(row["prompt_token_ids"], row["left_out"], row["step"]) for row in taken} == {(None, None, 4)}
    feedback = app.rows("SELECT DISTINCT state, step FROM admin_feedback WHERE source = 'demonstration'")
    assert feedback == [{"state": "used", "step": 1}]
    assert app.says("what is it?") != "Nothing at all!"
    for _ in range(26):
        app.step(kind="sft", **{"from": "demonstrations"})
        if app.says("what is it?") == "Nothing at all!":
            return
    pytest.fail(f"after 30 steps it says {app.says('what is it?')!r}")


def test_another_servers_answers_are_rendered_as_our_vllm_reads_such_a_chat(app: App) -> None:
    for number in range(6):
        app.chat(f"word{number}", f"taught-{number}", "teacher")
        app.feedback(trajectory_id=f"taught-{number}", reward=number % 2)
    first = [{"role": "system", "content": "Repeat."}, {"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "one one"}, {"role": "user", "content": "two"}]
    app.chat("", "turns", "teacher", messages=first)
    app.chat("", "turns", "teacher", messages=second)
    app.feedback(trajectory_id="turns", reward=1)
    app.chat("roll", "called", "teacher", tools=TOOLS)
    app.feedback(trajectory_id="called", reward=1)

    step = app.step(kind="sft", min_reward=0.5, **{"from": "teacher"})
    # 3 of the words, both turns of one conversation merged into one row, the call.
    assert (step["state"], step["completions"], step["rows"], step["trajectories"]) == ("promoted", 6, 5, 5)
    taken = app.rows(
        "SELECT e.*, c.response_text, c.turn FROM admin_examples AS e JOIN admin_completions AS c"
        " USING (project, completion_id) WHERE source = 'teacher' ORDER BY e.trajectory_id, c.turn"
    )
    assert {row["trajectory_id"] for row in taken} == {"called", "taught-1", "taught-3", "taught-5", "turns"}
    for row in taken:
        if row["trajectory_id"] != "called":
            assert app.text_of(row["token_ids"]) == row["response_text"] + END
    # The same chats, sent to our own policy: vLLM returns the ids that it reads.
    app.chat("roll", "same-called", tools=TOOLS, max_tokens=1)
    app.chat("", "same-turns", messages=second, max_tokens=1)
    app.chat("word1", "same-taught-1", max_tokens=1)
    query = "SELECT trajectory_id, prompt_token_ids FROM admin_completions WHERE trajectory_id LIKE 'same-%'"
    until(lambda: len(app.rows(query)) == 3)  # recorded soon after they were answered
    read = {row["trajectory_id"]: row["prompt_token_ids"] for row in app.rows(query)}
    rendered = {f"same-{row['trajectory_id']}": row["prompt_token_ids"] for row in taken}  # of a trajectory the last
    assert read == {name: rendered[name] for name in read}


def test_a_warm_up_is_continued_by_policy_gradient_and_imitation_of_the_best_on_one_line(app: App) -> None:
    warm = app.rows("SELECT max(version) AS live FROM admin_versions")[0]["live"]
    assert warm > 0
    app.store.set_policy_state("default", "starter", "training")
    for number, group in enumerate(("g", "h")):
        before = len(app.store.steps("default", "starter"))
        for member, reward in enumerate((0.0, 1.0)):
            headers = {"X-Trajectory-Id": f"{group}{member}", "X-Group-Id": group, "X-Group-Size": "2"}
            body = {"model": "starter", "messages": [{"role": "user", "content": f"move {number}"}], "max_tokens": 6}
            assert app.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
            app.http.post("/v1/feedback", json={"trajectory_id": f"{group}{member}", "reward": reward})
        step = app.ended(before)
        assert (step["kind"], step["state"]) == ("grpo", "promoted"), step["error"]
    app.store.set_policy_state("default", "starter", "recording")
    best = app.step(kind="sft", **{"from": "best"})
    assert (best["state"], best["completions"]) == ("promoted", 2)
    versions = app.rows("SELECT version, parent, state FROM admin_versions WHERE policy = 'starter' ORDER BY version")
    assert [row["parent"] for row in versions[1:]] == [row["version"] for row in versions[:-1]]
    assert versions[-1]["state"] == "live" and versions[-1]["version"] == warm + 3
    # What was imitated stands in no policy-gradient step but by its own sampled ids.
    weighed = app.rows("SELECT trajectory_id FROM admin_trajectories WHERE trained_in_step IS NOT NULL")
    assert {row["trajectory_id"] for row in weighed} == {"g0", "g1", "h0", "h1"}


def test_jobs_took_all_steps_one_at_a_time_and_each_says_what_it_cost(app: App) -> None:
    def over() -> list[dict[str, Any]] | None:
        rows = app.rows("SELECT * FROM admin_launches ORDER BY launch")
        return rows if rows and rows[-1]["ended_at"] else None

    launches = until(over, 60)
    steps = app.store.steps("default", "starter")
    assert sum(row["steps"] for row in launches) == len(steps)
    assert all(row["steps"] for row in launches)
    assert {(row["exit_code"], row["error"]) for row in launches} == {(0, None)}
    assert all(row["reason"].startswith("starter: a step") and row["cost_usd"] > 0.009 for row in launches)
    for step in steps:
        assert sum(row["created_at"] <= str(step["created_at"])[:26] <= row["ended_at"] for row in launches) == 1
