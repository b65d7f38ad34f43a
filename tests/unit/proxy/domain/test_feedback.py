import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.domain.feedback import _MEANT, _SYNONYMS, MAX_BATCH, Feedback, read_feedback
from proxy.domain.feedback_rows import row_of
from proxy.errors import BadRequest, NotJson, ProxyError

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(**body: Any) -> dict[str, Any]:
    (feedback,), _ = read_feedback(json.dumps(body).encode())
    return row_of(feedback, "default", NOW)


def test_a_reward_for_a_trajectory_ends_it() -> None:
    stored = row(trajectory_id="t", reward=0)
    assert (stored["target_kind"], stored["target_id"]) == ("trajectory", "t")
    assert (stored["reward"], stored["source"], stored["final"]) == (0.0, "reward", True)


def test_a_reward_for_a_completion_does_not_end_its_trajectory() -> None:
    stored = row(completion_id="chatcmpl-1", choice=2, reward=-1.5)
    assert (stored["target_kind"], stored["choice"], stored["final"]) == ("completion", 2, False)
    assert (stored["credit"], row(completion_id="c", reward=1, credit="step")["credit"]) == (None, "step")


def test_final_says_otherwise() -> None:
    assert row(completion_id="c", reward=1, final=True)["final"] is True
    assert row(trajectory_id="t", reward=1, final=False)["final"] is False


@pytest.mark.parametrize(("thumbs", "reward"), [("up", 1.0), ("down", 0.0)])
def test_thumbs_are_rewards(thumbs: str, reward: float) -> None:
    stored = row(trajectory_id="t", thumbs=thumbs)
    assert (stored["reward"], stored["source"]) == (reward, "thumbs")


def test_a_group_takes_a_reward_for_each_trajectory() -> None:
    stored = row(group_id="g", rewards={"a": 1, "b": 0.5})
    assert (stored["target_kind"], stored["rewards"], stored["reward"]) == ("group", {"a": 1.0, "b": 0.5}, None)


def test_an_array_is_a_batch() -> None:
    body = [{"trajectory_id": "a", "reward": 1}, {"trajectory_id": "b", "reward": 2}]
    feedback, batch = read_feedback(json.dumps(body).encode())
    assert batch
    assert [one.trajectory_id for one in feedback] == ["a", "b"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_reward_that_is_no_finite_number_is_refused(number: str) -> None:
    with pytest.raises(NotJson, match=number if number != "1e999" else "range"):
        read_feedback(b'{"trajectory_id": "t", "reward": %s}' % number.encode())


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": "\xff"}', b"[" * 5000, b'{"a": "\\ud800"}', b"reward=1"])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(NotJson):
        read_feedback(body)


@pytest.mark.parametrize(
    "body",
    [
        None,
        1,
        "reward",
        [],
        [1],
        {},
        {"reward": 1},
        {"trajectory_id": "t"},
        {"trajectory_id": "t", "reward": None},
        {"trajectory_id": "t", "reward": "1"},
        {"trajectory_id": "t", "reward": True},
        {"trajectory_id": "t", "reward": 1, "thumbs": "up"},
        {"trajectory_id": "t", "completion_id": "c", "reward": 1},
        {"trajectory_id": "", "reward": 1},
        {"trajectory_id": "a b", "reward": 1},
        {"trajectory_id": "t" * 129, "reward": 1},
        {"trajectory_id": "t", "thumbs": "sideways"},
        {"trajectory_id": "t", "rewards": {"t": 1}},
        {"group_id": "g", "reward": 1},
        {"group_id": "g", "comment": "x"},
        {"trajectory_id": "t", "comment": ""},
        {"trajectory_id": "t", "comment": "x", "credit": "step"},
        {"group_id": "g", "thumbs": "up"},
        {"group_id": "g", "rewards": {}},
        {"group_id": "g", "rewards": {"a b": 1}},
        {"group_id": "g", "rewards": {"a": None}},
        {"completion_id": "c", "reward": 1, "choice": -1},
        {"completion_id": "c", "reward": 1, "choice": 2**31},
        {"trajectory_id": "t", "reward": 1, "comment": "x" * 20_001},
        {"trajectory_id": "t", "reward": 1, "idempotency_key": "a b"},
        {"trajectory_id": "t", "reward": 1, "metadata": []},
        {"trajectory_id": "t", "reward": 1, "final": 1},
    ],
)
def test_what_contradicts_itself_is_refused(body: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read_feedback(json.dumps(body).encode())
    assert caught.value.status == 400


LONG = "x" * 20_001
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"trajectory_id": "t", "completion_id": "c", "reward": 1}, "completion_id"),
    ({"trajectory_id": "t", "reward": 1, "parts": {"a": 1}}, "parts"),
    ({"trajectory_id": "t", "reward": 1, "credit": "step"}, "credit"),
    ({"completion_id": "c", "demonstration": "better", "credit": "step"}, "credit"),
    ({"completion_id": "c", "reward": 1, "credit": "turn"}, "credit"),
    ({"group_id": "g", "rewards": {"t": 1}, "judge": {"kind": "ruler"}}, "judge"),
    ({"trajectory_id": "t", "reward": "1"}, "reward"),
    ({"trajectory_id": "t", "reward": 1e10}, "reward"),
    ({"trajectory_id": "t", "parts": {}}, "parts"),
    ({"trajectory_id": "t", "parts": {"a b": 1}}, "parts"),
    ({"trajectory_id": "t", "parts": {"a" * 65: 1}}, "parts"),
    ({"trajectory_id": "t", "parts": {"a": None}}, "parts[...]"),
    ({"trajectory_id": "t", "parts": {"a": -1e10}}, "parts.a"),
    ({"trajectory_id": "t", "parts": {f"a{number}": 1 for number in range(65)}}, "parts"),
    ({"group_id": "g", "parts": {"a": 1}}, "parts"),
    ({"group_id": "g", "demonstration": "better"}, "demonstration"),
    ({"group_id": "g", "rewards": {"t": 1}, "demonstration": "better"}, "demonstration"),
    ({"group_id": "g", "rewards": {"t": 1e10}}, "rewards.t"),
    ({"group_id": "g", "rewards": {f"t{number}": 1 for number in range(10_001)}}, "rewards"),
    ({"group_id": "g", "judge": {}}, "judge"),
    ({"group_id": "g", "judge": {"kind": "oracle"}}, "judge.kind"),
    ({"group_id": "g", "judge": {"kind": "ruler", "modle": "m"}}, "judge"),
    ({"group_id": "g", "judge": {"kind": "ruler", "rubric": LONG}}, "judge.rubric"),
    ({"group_id": "g", "judge": {"kind": "ruler", "model": LONG}}, "judge.model"),
    ({"trajectory_id": "t", "judge": {"kind": "ruler"}}, "judge"),
    ({"trajectory_id": "t", "demonstration": 1}, "demonstration"),
    ({"trajectory_id": "t", "demonstration": {"role": "user", "content": "x"}}, "demonstration.role"),
    ({"trajectory_id": "t", "demonstration": {"role": "assistant"}}, "demonstration"),
    ({"trajectory_id": "t", "demonstration": {"role": "assistant", "content": 1}}, "demonstration"),
    ({"trajectory_id": "t", "demonstration": "x" * 200_000}, "demonstration"),
    ({"trajectory_id": "t", "reward": 1, "metadata": {"x": "x" * 200_000}}, "metadata"),
    ({"trajectory_id": "t", "reward": 1, "comment": LONG}, "comment"),
    ({"trajectory_id": "t", "thumbs": LONG}, "thumbs"),
    ({"trajectory_id": LONG, "reward": 1}, "trajectory_id"),
    ({"trajectory_id": "t", "reward": 1, "idempotency_key": LONG}, "idempotency_key"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_what_is_refused_is_named_and_the_error_is_short(body: Any, param: str) -> None:
    for sent in (body, [{"trajectory_id": "t", "reward": 1}, body]):
        with pytest.raises(BadRequest) as caught:
            read_feedback(json.dumps(sent).encode())
        assert caught.value.param == param
        assert len(caught.value.message) < 500
        assert ("item 1 of the batch" in caught.value.message) == (sent is not body)


def test_a_body_nested_too_deep_is_refused() -> None:
    body = b'{"trajectory_id": "t", "reward": 1, "metadata": {"x": ' + b"[" * 300 + b"]" * 300 + b"}}"
    with pytest.raises(NotJson, match="nested deeper than 200"):
        read_feedback(body)


def test_parts_are_stored_as_they_came_and_weighed_later() -> None:
    stored = row(trajectory_id="t", parts={"accuracy": 1, "tone": 0.5})
    assert (stored["parts"], stored["reward"], stored["source"]) == ({"accuracy": 1.0, "tone": 0.5}, None, "parts")
    assert stored["final"] is True


def test_a_demonstration_alone_is_no_reward_and_ends_nothing_unless_it_says_so() -> None:
    stored = row(trajectory_id="t", demonstration="Paris")
    assert stored["demonstration"] == {"role": "assistant", "content": "Paris"}
    assert (stored["reward"], stored["source"], stored["final"]) == (None, "demonstration", False)
    assert row(trajectory_id="t", demonstration="Paris", final=True)["final"] is True


def test_a_demonstration_may_stand_beside_what_the_answer_was_worth() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}
    stored = row(completion_id="c", thumbs="down", demonstration=message)
    assert (stored["demonstration"], stored["reward"], stored["source"]) == (message, 0.0, "thumbs")


def test_a_comment_alone_is_no_reward_and_ends_nothing_unless_it_says_so() -> None:
    stored = row(completion_id="c", comment="It should have gone to billing.")
    assert (stored["comment"], stored["reward"]) == ("It should have gone to billing.", None)
    assert (stored["source"], stored["final"]) == ("comment", False)
    assert row(trajectory_id="t", comment="no", final=True)["final"] is True


def test_every_body_on_the_page_is_taken() -> None:
    page = Path(__file__).parents[4] / "docs" / "feedback.md"
    bodies = re.findall(r"/feedback -d '([^']+)'", page.read_text(encoding="utf-8"))
    assert len(bodies) == 10
    for body in bodies:
        feedback, _ = read_feedback(body.encode())
        assert all(row_of(one, "default", NOW)["source"] for one in feedback)


def test_a_judge_is_asked_for_a_group() -> None:
    stored = row(group_id="g", judge={"kind": "ruler", "rubric": "short is good"})
    assert stored["judge"] == {"kind": "ruler", "model": None, "rubric": "short is good"}
    assert (stored["source"], stored["final"]) == ("judge", True)


def test_only_a_judge_of_the_settings_is_asked_by_name() -> None:
    body = json.dumps({"group_id": "g", "judge": {"kind": "ruler", "model": "strong"}}).encode()
    assert read_feedback(body, ["strong"])[0][0].judge.model == "strong"
    with pytest.raises(BadRequest, match="no judge is named 'strong'; there are: cheap, local"):
        read_feedback(body, ["local", "cheap"])
    with pytest.raises(BadRequest, match="judges.<name>"):
        read_feedback(body)


def test_a_misspelt_field_is_answered_with_the_nearest_right_one() -> None:
    with pytest.raises(BadRequest, match="did you mean 'trajectory_id'"):
        row(trajectory="t", reward=1)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("score", "'reward'"), ("value", "'reward'"), ("rating", "'reward'"), ("label", "'reward' or 'thumbs'"),
        ("id", "'trajectory_id' or 'completion_id'"), ("run_id", "'trajectory_id' or 'completion_id'"),
        ("trace_id", "'trajectory_id'"), ("traceId", "'trajectory_id'"), ("session_id", "'trajectory_id'"),
        ("observationId", "'completion_id'"), ("thumbs_up", "'thumbs'"), ("like", "'thumbs'"), ("key", "'parts'"),
        ("name", "'parts'"), ("reason", "'comment'"), ("text", "'comment'"), ("correction", "'demonstration'"),
        ("groupId", "'group_id'"), ("Reward", "'reward'"), ("idempotency-key", "'idempotency_key'"),
    ],
)  # fmt: skip
def test_a_field_of_another_tool_is_answered_with_ours(field: str, meant: str) -> None:
    with pytest.raises(BadRequest) as refused:
        row(**{"completion_id": "c", "thumbs": "up", field: "x"})
    assert refused.value.message == f"feedback has no field {field!r}; did you mean {meant}?"
    assert refused.value.param == field


def test_a_field_that_resembles_none_is_answered_with_all_of_them() -> None:
    with pytest.raises(BadRequest, match="it takes trajectory_id, completion_id, group_id, choice, reward, rewards"):
        row(completion_id="c", reward=1, zzz=1)


def test_a_synonym_is_no_field_and_leads_to_fields() -> None:
    fields = set(Feedback.__struct_fields__)
    assert not fields & _MEANT.keys()
    assert {name for meant in _MEANT.values() for name in meant} <= fields
    assert len(_MEANT) == sum(len(words.split()) for words in _SYNONYMS.values()), "a word stands twice"


def test_one_bad_feedback_refuses_the_whole_batch() -> None:
    body = [{"trajectory_id": "a", "reward": 1}, {"trajectory_id": "b"}]
    with pytest.raises(BadRequest):
        read_feedback(json.dumps(body).encode())


def test_a_batch_has_an_end() -> None:
    body = [{"trajectory_id": "a", "reward": 1}] * (MAX_BATCH + 1)
    with pytest.raises(BadRequest, match="1001"):
        read_feedback(json.dumps(body).encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(
        st.sampled_from(["trajectory_id", "group_id", "reward", "rewards", "parts", "judge", "demonstration"]), JSON
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_feedback_or_a_clear_error(body: bytes) -> None:
    try:
        feedback, _ = read_feedback(body)
    except ProxyError as error:
        assert error.status == 400
        assert error.message
    else:
        assert all(row_of(one, "default", NOW)["target_id"] for one in feedback)


def test_a_reward_too_large_to_be_squared_and_summed_is_refused() -> None:
    with pytest.raises(BadRequest, match="within ±1e\\+09"):
        read_feedback(b'{"trajectory_id": "t", "reward": 1e200}')
