"""Which answers a step learns from words about, and which words: a judge's, a tool's, the user's."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, select, update

from migrations import schema
from trainer.domain.claims import Claim
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings

RULES = TrainerSettings(groups_per_step=1, min_fresh_share=0, hindsight_in_a_row=100)
SOURCES = ["judge", "tools", "replies"]
TOOL_ERROR = {"role": "tool", "tool_call_id": "c", "content": "Error: no such file"}
REPLY = {"role": "user", "content": "No, the other one."}


class Words:
    """A log in which words follow answers, and a worker that takes steps on them."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.store = Store(engine, "default")

    def write(self, table: Any, where: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(where).values(**values))

    def has(self, table: Any, row_id: str) -> bool:
        with self.engine.begin() as connection:
            return connection.execute(select(table.c.id).where(table.c.id == row_id)).first() is not None

    def turn(self, completion_id: str, **values: Any) -> None:
        self.write(schema.completions, schema.completions.c.id == completion_id, **values)

    def request(self, source: str, limit: int = 64) -> None:
        request = {"kind": "hindsight", "from": source, "min_reward": None, "limit": limit}
        of_policy = (schema.policies.c.project == "default") & (schema.policies.c.id == "starter")
        self.write(schema.policies, of_policy, step_asked=request, step_asked_at=datetime.now(UTC))

    def claim(self, rules: TrainerSettings = RULES) -> Claim:
        claim = self.store.claim("starter", rules)
        assert claim is not None and claim.wanted is not None
        self.store.take_corrections(claim, claim.wanted, rules.max_staleness)
        return claim

    def taken(self, source: str, limit: int = 64, rules: TrainerSettings = RULES) -> dict[str, str]:
        """Corrections by example that a step of this source takes; the step is over at once."""
        self.request(source, limit)
        claim = self.claim(rules)
        corrections = {one.source_id: one.correction for one in self.store.corrections(claim)}
        self.store.end_without_version(claim, "noop", "", {})
        return corrections

    def ranked(self, group: str, explanations: dict[str, str | None], judgement: str = "j", **values: Any) -> None:
        """A judgement of a group, with the request that led to it."""
        scores = {
            name: {"score": 0.5, "explanation": text, "parts": None, "position": place, "attempt": name}
            for place, (name, text) in enumerate(explanations.items())
        }
        row = {
            "group_id": group, "policy": "starter", "attempts_hash": "a", "place": 0, "section": 0, "purpose": "reward",
            "state": "accepted", "judge": "strong", "rubric_hash": "r", "calls": 1, "refusals": 0, "left_out": 0,
            "prompt_tokens": 1, "completion_tokens": 1, "created_at": self.seed.now + timedelta(minutes=1),
            "accepted_at": self.seed.now + timedelta(minutes=2),
        }  # fmt: skip
        if not self.has(schema.rubrics, "r"):
            self.seed.insert(schema.rubrics, project="default", id="r", text="better is better")
        if not self.has(schema.feedback, f"of-{group}"):
            self.seed.feedback(group, kind="group", id=f"of-{group}", source="judge", state="applied")
        self.seed.insert(schema.judgements, project="default", id=judgement, scores=scores, **(row | values))

    def worded(self, name: str, source: str, **values: Any) -> None:
        """A trajectory whose first answer has words of the source; for the judge's it is the only one."""
        if source == "judge":
            self.seed.group(f"g-{name}", state="scored")
            self.seed.trajectory(name, f"g-{name}", **values)
            self.ranked(f"g-{name}", {name: "Too long."}, f"j-{name}")
        else:
            self.seed.trajectory(name, turns=2, **values)
            self.turn(f"{name}-1", new_messages=[TOOL_ERROR if source == "tools" else REPLY])


@pytest.fixture
def words(engine: Engine, seed: Any) -> Words:
    return Words(engine, seed)


WORDS = {
    "judge": {"t-0/hindsight/judge/j-t": "Too long."},
    "tools": {"t-0/hindsight/tools": "Error: no such file"},
    "replies": {"t-0/hindsight/replies": "No, the other one."},
}

# --- every source


@pytest.mark.parametrize("source", SOURCES)
def test_the_words_and_the_answer_that_they_are_about_are_taken_as_logged(words: Words, source: str) -> None:
    words.worded("t", source)
    words.seed.trajectory("silent")
    words.request(source)
    claim = words.claim()
    (one,) = words.store.corrections(claim)
    assert {one.source_id: one.correction} == WORDS[source]
    assert (one.trajectory_id, one.prompt_ids, one.token_ids, one.teacher_ids) == ("t", (1, 2), (3, 4), None)
    assert one.messages == [{"role": "user", "content": "question 0"}]
    assert one.left_out is None


@pytest.mark.parametrize("source", SOURCES)
def test_no_other_source_takes_them(words: Words, source: str) -> None:
    words.worded("t", source)
    for other in {"comments", "demonstrations", *SOURCES} - {source}:
        assert words.taken(other) == {}


@pytest.mark.parametrize("values", [{"split": "eval"}, {"no_train": True}], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_what_the_app_keeps_from_training_teaches_nothing(words: Words, source: str, values: dict[str, Any]) -> None:
    words.worded("t", source, **values)
    assert words.taken(source) == {}


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "other"}, {"policy_version": 1}, {"status": "aborted"}, {"token_ids": None},
        {"why_not_trained": "redacted"}, {"why_not_trained": "greedy"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("source", SOURCES)
def test_only_complete_answers_of_recent_versions_of_this_policy_count(
    words: Words, source: str, values: dict[str, Any]
) -> None:
    words.worded("t", source)
    words.turn("t-0", **values)
    assert words.taken(source) == {}


@pytest.mark.parametrize("source", SOURCES)
def test_words_of_another_project_are_not_ours(words: Words, source: str) -> None:
    words.worded("t", source)
    words.seed.project("foreign")
    words.seed.trajectory("t", project="foreign", turns=2)
    assert words.taken(source) == WORDS[source]
    with words.engine.begin() as connection:
        connection.execute(delete(schema.examples))
        connection.execute(delete(schema.completions).where(schema.completions.c.project == "default"))
    assert words.taken(source) == {}


@pytest.mark.parametrize("source", SOURCES)
def test_what_no_step_has_learned_from_comes_first_and_then_the_longest_ago(words: Words, source: str) -> None:
    for place, name in enumerate("tuv"):
        words.worded(name, source)
        words.turn(f"{name}-0", created_at=words.seed.now + timedelta(seconds=place))
        later = words.seed.now + timedelta(minutes=2, seconds=place)
        words.write(schema.judgements, schema.judgements.c.id == f"j-{name}", accepted_at=later)
    order = [next(iter(words.taken(source, limit=1))).partition("-")[0] for _ in range(5)]
    assert order == ["v", "u", "t", "v", "u"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_that_is_taken_over_has_the_same_words(words: Words, source: str) -> None:
    words.worded("t", source)
    words.request(source)
    words.claim()
    words.worded("later", source)
    words.write(schema.steps, schema.steps.c.lease_until.is_not(None), lease_until=datetime.now(UTC))
    again = words.claim()
    assert again.attempt == 2
    assert {one.source_id: one.correction for one in words.store.corrections(again)} == WORDS[source]


# --- a judge's explanations


def test_an_explanation_corrects_the_last_answer_of_this_policy_in_its_own_attempt(words: Words) -> None:
    words.seed.group("g", state="scored")
    for name in "tu":
        words.seed.trajectory(name, "g", turns=3)
    words.turn("u-2", policy="other")
    words.ranked("g", {"t": "It guessed.", "u": "It looked first.", "gone": "Deleted."})
    assert words.taken("judge") == {
        "t-2/hindsight/judge/j": "It guessed.",
        "u-1/hindsight/judge/j": "It looked first.",
    }


def test_an_attempt_whose_last_answer_broke_off_has_no_words(words: Words) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g", turns=2)
    words.turn("t-1", status="aborted")
    words.ranked("g", {"t": "It broke off."})
    assert words.taken("judge") == {}
    words.turn("t-1", why_not_trained="superseded")  # a retry took its place
    assert words.taken("judge") == {"t-0/hindsight/judge/j": "It broke off."}


@pytest.mark.parametrize("text", ["", "  ", None])
def test_an_empty_explanation_gives_none(words: Words, text: str | None) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g")
    words.ranked("g", {"t": text})
    assert words.taken("judge") == {}


@pytest.mark.parametrize("values", [{"state": "waiting"}, {"purpose": "drift"}], ids=str)
def test_only_an_accepted_judgement_that_made_rewards_counts(words: Words, values: dict[str, Any]) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g")
    words.ranked("g", {"t": "Too long."}, **values)
    assert words.taken("judge") == {}


@pytest.mark.parametrize("values", [{"state": "superseded"}, {"withdrawn_at": datetime.now(UTC)}], ids=["old", "back"])
def test_a_ranking_that_does_not_stand_teaches_nothing(words: Words, values: dict[str, Any]) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g")
    words.ranked("g", {"t": "Too long."})
    words.write(schema.feedback, schema.feedback.c.id == "of-g", **values)
    assert words.taken("judge") == {}


def test_the_newest_explanation_with_words_counts_and_comes_as_a_new_example(words: Words) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g")
    words.ranked("g", {"t": "Old."}, "j1")
    assert words.taken("judge") == {"t-0/hindsight/judge/j1": "Old."}
    words.ranked("g", {"t": "New."}, "j2", accepted_at=words.seed.now + timedelta(minutes=3))
    words.ranked("g", {"t": ""}, "j3", accepted_at=words.seed.now + timedelta(minutes=4))
    words.ranked("g", {"u": "Of another section."}, "j4", accepted_at=words.seed.now + timedelta(minutes=5))
    assert words.taken("judge") == {"t-0/hindsight/judge/j2": "New."}


def test_an_answer_after_the_judgement_is_not_what_it_was_about(words: Words) -> None:
    words.seed.group("g", state="scored")
    words.seed.trajectory("t", "g", turns=2)
    words.ranked("g", {"t": "Too long."})
    words.turn("t-1", created_at=words.seed.now + timedelta(hours=1))
    assert words.taken("judge") == {}


def test_an_explanation_that_is_deleted_meanwhile_leaves_the_step(words: Words) -> None:
    words.worded("t", "judge")
    words.request("judge")
    claim = words.claim()
    scores = {"t": {"score": 0.5, "explanation": None}}
    words.write(schema.judgements, schema.judgements.c.id == "j-t", scores=scores)
    assert words.store.corrections(claim) == []


# --- what followed the answer


def test_each_turn_of_an_agent_has_the_error_of_its_own_tools(words: Words) -> None:
    words.seed.trajectory("t", turns=4)
    words.turn("t-1", new_messages=[{"role": "tool", "tool_call_id": "a", "content": "Error: a"}])
    words.turn("t-2", new_messages=[{"role": "tool", "tool_call_id": "b", "content": "42"}])
    words.turn("t-3", new_messages=[{"role": "tool", "tool_call_id": "c", "content": '{"error": "c"}'}])
    assert words.taken("tools") == {"t-0/hindsight/tools": "Error: a", "t-2/hindsight/tools": '{"error": "c"}'}
    assert words.taken("replies") == {}


def test_each_answer_of_a_chat_has_the_reply_to_it(words: Words) -> None:
    words.seed.trajectory("t", turns=3)
    assert words.taken("replies") == {
        "t-0/hindsight/replies": "question 1",
        "t-1/hindsight/replies": "question 2",
    }
    assert words.taken("tools") == {}


def test_a_reply_to_another_policys_answer_is_none_to_ours(words: Words) -> None:
    words.seed.trajectory("t", turns=3)
    words.turn("t-1", policy="other")
    assert words.taken("replies") == {"t-0/hindsight/replies": "question 1"}


def whole(turn: int, answer: str = "answer 0", *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a request whose ids do not extend those of the turn before."""
    first = [{"role": "user", "content": "question 0"}]
    return [*first, {"role": "assistant", "content": answer}, *more] if turn else first


@pytest.mark.parametrize(("source", "message"), [("tools", TOOL_ERROR), ("replies", REPLY)])
def test_a_turn_whose_ids_do_not_extend_the_answer_is_read_from_where_the_answer_stands(
    words: Words, source: str, message: dict[str, Any]
) -> None:
    words.seed.trajectory("t", turns=2)
    words.turn("t-0", continued_by="t-1")
    words.turn("t-1", follows=None, new_messages=whole(1, "answer 0", message))
    assert words.taken(source) == WORDS[source]
    words.turn("t-1", new_messages=whole(1, "another answer", message))
    assert words.taken(source) == {}


def test_a_request_that_is_sent_again_is_no_reply(words: Words) -> None:
    words.seed.trajectory("t", turns=2)
    words.turn("t-1", follows=None, new_messages=whole(0))
    assert words.taken("replies") == {}
    words.turn("t-0", continued_by="t-1")
    assert words.taken("replies") == {}


def test_an_edited_question_is_no_reply_and_the_turn_that_goes_on_from_the_answer_has_it(words: Words) -> None:
    words.seed.trajectory("t", turns=3)
    words.turn("t-1", follows=None, new_messages=[{"role": "user", "content": "question 0, edited"}])
    words.turn("t-2", follows="t-0", new_messages=[REPLY])
    assert words.taken("replies") == WORDS["replies"]


def test_the_first_turn_that_goes_on_from_the_answer_follows_it(words: Words) -> None:
    words.seed.trajectory("t", turns=3)
    words.turn("t-1", new_messages=[REPLY], status="aborted")
    words.turn("t-2", follows="t-0", new_messages=[{"role": "user", "content": "later"}])
    assert words.taken("replies") == WORDS["replies"]


@pytest.mark.parametrize("source", ["tools", "replies"])
def test_words_in_another_trajectory_or_with_something_taken_out_are_none(words: Words, source: str) -> None:
    words.worded("t", source)
    words.turn("t-1", redactions=0)
    assert words.taken(source) == WORDS[source]
    words.turn("t-1", redactions=1)
    assert words.taken(source) == {}
    words.worded("u", source)
    words.seed.trajectory("elsewhere", continues="u-0")
    words.turn("u-1", trajectory_id="elsewhere", turn=1)
    assert words.taken(source) == {}


@pytest.mark.parametrize("source", ["tools", "replies"])
def test_answers_without_words_do_not_count_towards_the_limit(
    words: Words, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.store.examples.followups.READ_AT_ONCE", 2)
    words.worded("t", source)
    for place in range(5):
        words.seed.trajectory(f"silent{place}", turns=2)
        words.turn(f"silent{place}-0", created_at=words.seed.now + timedelta(hours=1))
        words.turn(f"silent{place}-1", new_messages=[{"role": "tool", "content": "42"}])
    assert words.taken(source, limit=1) == WORDS[source]


def test_an_error_of_anthropics_tools_corrects_an_answer_in_their_dialect(words: Words) -> None:
    words.seed.trajectory("t", turns=2)
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": "not there", "is_error": True}]
    words.turn("t-0", endpoint="messages")
    words.turn("t-1", endpoint="messages", new_messages=[{"role": "user", "content": blocks}])
    assert words.taken("replies") == {}
    words.request("tools")
    claim = words.claim()
    (one,) = words.store.corrections(claim)
    assert (one.source_id, one.correction, one.endpoint) == ("t-0/hindsight/tools", "not there", "messages")
