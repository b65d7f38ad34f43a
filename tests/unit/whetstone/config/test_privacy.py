"""Deletions: nothing that holds a word of it is left, numbers stay, and who had learned from it is told."""

import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, select, text, update

from judge.maintenance.retention import Retention
from migrations import schema
from proxy.recording.store import Store
from tests.conftest import Seed
from tests.unit.proxy.conftest import make_call, wait_for
from whetstone.config.privacy import PrivacySettings, pseudonym
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.privacy.eraser import erasing, run
from whetstone.privacy.store import Target

LATER = timedelta(days=1)
DAYS_30 = {"default": {"privacy": {"keep_days": 30}}}


class Deleting:
    """Somebody who deletes, a day after all was said."""

    def __init__(self, engine: Engine, seed: Seed) -> None:
        self.engine, self.seed = engine, seed
        self.now = seed.now + LATER

    def __call__(self, kind: Any, name: str, project: str = "default") -> dict[str, Any]:
        return run(self.engine, erasing(Target(project, kind, name), self.now))

    def rows(self, table: Any, **where: Any) -> list[Any]:
        query = select(table)
        for column, value in where.items():
            query = query.where(table.c[column] == value)
        with self.engine.connect() as connection:
            return list(connection.execute(query))

    def ids(self, table: Any = schema.trajectories) -> set[str]:
        return {row.id for row in self.rows(table)}

    def write(self, table: Any, where: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(where).values(**values))

    def holds(self, word: str) -> list[str]:
        """The tables in which it stands."""
        return [table.name for table in schema.metadata.sorted_tables if word in repr(self.rows(table))]

    def version(self, version: int, parent: int, step: int | None, policy: str = "starter", **values: Any) -> None:
        self.seed.insert(
            schema.policy_versions, project="default", id=f"{policy}@v{version}", policy=policy, version=version,
            parent=parent, step=step, state="retired", served=False, created_at=self.seed.now, **values,
        )  # fmt: skip

    def step(self, number: int, *trajectories: str, kind: str = "grpo", **values: Any) -> None:
        row = {
            "state": "promoted", "version_in": number - 1, "version_out": number, "groups": 1, "config": {},
            "trajectories": len(trajectories), "attempt": 1, "created_at": self.seed.now, "ended_at": self.seed.now,
            "reward_mean": 0.5,
        }  # fmt: skip
        self.seed.insert(schema.steps, project="default", id=f"starter#{number}", policy="starter", number=number,
                         kind=kind, **(row | values))  # fmt: skip
        for one in trajectories:
            self.seed.insert(
                schema.step_trajectories, project="default", step_id=f"starter#{number}", trajectory_id=one,
                policy="starter", group_id="g", reward=1.0, advantage=0.5, staleness=0,
            )  # fmt: skip

    def example(self, trajectory_id: str, step: int, **values: Any) -> None:
        self.seed.insert(
            schema.examples, project="default", policy="starter", source_id=f"{trajectory_id}-0", source="best",
            trajectory_id=trajectory_id, completion_id=f"{trajectory_id}-0", step=step, created_at=self.seed.now,
            token_ids=[1], **values,
        )  # fmt: skip

    def evaluation(self, trajectory_id: str, source_id: str, **values: Any) -> None:
        row = {"policy": "starter", "candidate": 1, "version": 1, "group_id": f"evaluation.{source_id}"}
        self.seed.insert(
            schema.evaluations, project="default", trajectory_id=trajectory_id, source_id=source_id, **(row | values)
        )

    def judgement(self, judgement_id: str, scores: Any, **values: Any) -> None:
        row = {
            "group_id": "g", "policy": "starter", "attempts_hash": "h", "place": 0, "section": 0, "purpose": "reward",
            "state": "accepted", "judge": "strong", "rubric_hash": "r", "calls": 1, "refusals": 0, "left_out": 0,
            "prompt_tokens": 1, "completion_tokens": 1, "created_at": self.seed.now, "cache_key": "k",
        }  # fmt: skip
        if not self.rows(schema.rubrics):
            self.seed.insert(schema.rubrics, project="default", id="r", text="better is better")
        self.seed.insert(schema.judgements, project="default", id=judgement_id, scores=scores, **(row | values))


@pytest.fixture
def deleting(engine: Engine, seed: Seed) -> Deleting:
    return Deleting(engine, seed)


# What goes.


def test_the_ids_within_its_answers_go_and_feedback_that_waits_under_them(deleting: Deleting, seed: Seed) -> None:
    for name in ("t", "u"):
        seed.trajectory(name)
        seed.insert(schema.answer_ids, project="default", completion_id=f"{name}-0", id=f"call_{name * 9}")
        seed.feedback(f"call_{name * 9}", 1.0, kind="completion", comment=f"a word of {name}")
    deleting("trajectory", "t")
    assert [row.id for row in deleting.rows(schema.answer_ids)] == ["call_uuuuuuuuu"]
    assert [row.comment for row in deleting.rows(schema.feedback)] == ["a word of u"]


def test_nothing_is_left_that_holds_a_word_of_it_and_numbers_stay(
    deleting: Deleting, seed: Seed, tmp_path: Path
) -> None:
    kept = tmp_path / "starter-1.jsonl"
    kept.write_text("rows")
    seed.group(state="trained", size=2, rewarded=2, reward_mean=0.5, prompt_hash="a", judge_waits="secret")
    for name in ("t", "u"):
        seed.trajectory(name, "g", state="trained", reward=1.0, metadata={"of": name})
    said = [{"role": "user", "content": "secret"}]
    deleting.write(schema.trajectories, schema.trajectories.c.id == "t", code_error="secret")
    deleting.write(schema.completions, schema.completions.c.trajectory_id == "t", new_messages=said, reply=b"secret")
    seed.feedback("t", 1.0, state="used", trajectory_id="t", comment="secret")
    seed.feedback("chatcmpl-t-0", kind="completion", state="waiting", metadata={"x": "secret"})
    seed.feedback("g", kind="group", state="used", rewards={"t": 1.0, "u": 0.0}, comment="secret", id="ranked")
    score = {"score": 1.0, "explanation": "secret", "position": 0}
    deleting.judgement("j", {"t": score, "u": score}, error="secret")
    deleting.judgement("waits", None, state="waiting", error="secret", cache_key=None)
    deleting.step(1, "t", "u", kept=str(kept))
    deleting.version(1, 0, 1)
    deleting.example("t", 1, left_out="refused: secret")
    erased = deleting("trajectory", "t")
    assert deleting.holds("secret") == []
    assert not kept.exists()
    assert deleting.ids() == {"u"}
    assert [row.trajectory_id for row in deleting.rows(schema.completions)] == ["u"]
    (feedback,) = deleting.rows(schema.feedback)
    assert (feedback.id, feedback.rewards) == ("ranked", {"u": 0.0})
    (judgement,) = deleting.rows(schema.judgements)
    assert judgement.scores == {"u": {"score": 1.0, "explanation": None, "position": 0}}
    (group,) = deleting.rows(schema.groups)
    assert (group.size, group.reward_mean, group.state) == (2, 0.5, "trained")
    assert {row.trajectory_id for row in deleting.rows(schema.step_trajectories)} == {"t", "u"}
    assert (erased["trajectories"], erased["completions"], erased["versions"]) == (1, 1, {"starter": [1]})
    assert erased["finished_at"] is not None


def test_a_prompt_with_a_judges_words_about_the_group_goes_too_and_no_other_example(
    deleting: Deleting, seed: Seed
) -> None:
    for group, names in (("g", "tu"), ("h", "v")):
        seed.group(group, state="scored")
        for name in names:
            seed.trajectory(name, group)
        scores = {name: {"score": 1.0, "explanation": "better than the secret", "position": 0} for name in names}
        deleting.judgement(f"of-{group}", scores, group_id=group)
    for name, group in (("t", "g"), ("u", "g"), ("v", "h")):
        row = {"project": "default", "policy": "starter", "trajectory_id": name, "completion_id": f"{name}-0"}
        words = {"source_id": f"{name}-0/hindsight/judge/of-{group}", "source": "judge", "prompt_token_ids": [7]}
        seed.insert(schema.examples, **row, **words, step=1, created_at=seed.now)
    deleting.example("u", 1)
    deleting("trajectory", "t")
    left = {row.source_id for row in deleting.rows(schema.examples)}
    assert left == {"u-0", "v-0/hindsight/judge/of-h"}


def test_of_a_stored_response_its_id_remains_until_it_is_as_old_as_what_goes_by_age(
    deleting: Deleting, seed: Seed
) -> None:
    for name in ("t", "u"):
        seed.trajectory(name)
        deleting.write(
            schema.completions, schema.completions.c.trajectory_id == name, stored_response={"of": "secret"},
            upstream_id=f"resp_{name}",
        )  # fmt: skip
    seed.trajectory("not stored")
    deleting("trajectory", "t")
    deleting("trajectory", "not stored")
    assert [(row.project, row.id) for row in deleting.rows(schema.erased_responses)] == [("default", "resp_t")]
    deleting.now += LATER
    deleting("age", deleting.now.isoformat())
    assert [row.id for row in deleting.rows(schema.erased_responses)] == ["resp_u"]
    assert deleting.holds("secret") == []


def test_what_others_said_and_other_projects_stay(deleting: Deleting, seed: Seed) -> None:
    seed.project("other")
    for project in ("default", "other"):
        seed.trajectory("t", project=project, end_user="alice")
        seed.feedback("t", 1.0, project=project, trajectory_id="t", state="applied")
    seed.trajectory("u", end_user="bob")
    deleting("user", "alice")
    assert [(row.project, row.id) for row in deleting.rows(schema.trajectories)] == [("other", "t"), ("default", "u")]
    assert [row.project for row in deleting.rows(schema.feedback)] == ["other"]


def test_what_remains_of_a_conversation_can_be_read(deleting: Deleting, seed: Seed) -> None:
    """Turns are stored as what each adds; no trajectory builds on another's."""
    seed.trajectory("t", turns=3)
    seed.trajectory("fork", continues="t-2")
    seed.completion("fork", 1, new_messages=[{"role": "user", "content": "on"}])
    deleting("trajectory", "fork")
    with deleting.engine.connect() as connection:
        told = connection.exec_driver_sql("SELECT messages FROM admin_conversations ORDER BY turn").scalars().all()
    assert "question 2" in str(told[-1])
    assert "answer 1" in str(told[-1])


def test_what_was_made_of_it_goes_with_it(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("t", turns=2, split="eval")
    seed.trajectory("fork", continues="t-1")
    seed.trajectory("after", continues="fork-0")
    seed.trajectory("choice", turns=0)
    seed.insert(
        schema.completions, project="default", id="t-1.1", upstream_id="chatcmpl-t-1", call_id="t-1", choice=1,
        trajectory_id="choice", turn=0, policy="starter", policy_version=0, endpoint="chat.completions",
        streamed=False, status="complete", threaded_by="header", created_at=seed.now,
    )  # fmt: skip
    seed.trajectory("retry")
    deleting.write(schema.completions, schema.completions.c.id == "retry-0", retry_of="t-0")
    seed.group("t.shadow", formed_by="shadow")
    seed.trajectory("shadow", "t.shadow")
    seed.trajectory("tested", split="eval")
    deleting.evaluation("tested", "t-0", drawn_at=seed.now)
    deleting.evaluation("never", "t-0")
    # Others that only look like it.
    seed.trajectory("same answer id")
    deleting.write(
        schema.completions, schema.completions.c.id == "same answer id-0", upstream_id="chatcmpl-t-1", choice=1
    )
    erased = deleting("trajectory", "t")
    assert deleting.ids() == {"same answer id"}
    assert deleting.rows(schema.evaluations) == []
    assert erased["trajectories"] == 7


def test_what_it_was_made_of_stays(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("t")
    seed.trajectory("fork", continues="t-0")
    deleting("trajectory", "fork")
    assert deleting.ids() == {"t"}


def test_of_a_held_out_answer_alone_its_test_does_not_wait(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("source")
    seed.trajectory("answer", split="eval")
    deleting.evaluation("answer", "source-0", drawn_at=seed.now)
    deleting("trajectory", "answer")
    (row,) = deleting.rows(schema.evaluations)
    assert row.error == "deleted"


def test_a_user_is_found_by_name_by_hash_and_in_any_turn(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("named", end_user="alice")
    seed.trajectory("hashed", end_user=pseudonym("alice"))
    seed.trajectory("turn", end_user="bob")
    deleting.write(schema.completions, schema.completions.c.id == "turn-0", end_user="alice")
    seed.trajectory("bobs", end_user="bob")
    means = {"project": "default", "policy": "starter", "task": "", "mean": 0.5, "count": 1, "updated_at": seed.now}
    for name in ("alice", "bob"):
        seed.insert(schema.baselines, end_user=name, **means)
    erased = deleting("user", "alice")
    assert deleting.ids() == {"bobs"}
    assert [row.end_user for row in deleting.rows(schema.baselines)] == ["bob"]
    assert erased["target"] == pseudonym("alice")
    assert deleting.holds("alice") == []


def test_an_unclaimed_group_is_decided_on_anew(deleting: Deleting, seed: Seed) -> None:
    seed.group(state="closed", size=2, judge_due_at=seed.now + timedelta(hours=1), prompt_hash="a")
    seed.trajectory("t", "g", state="ended")
    deleting("trajectory", "t")
    (group,) = deleting.rows(schema.groups)
    assert (group.due_at, group.judge_due_at, group.prompt_hash) == (deleting.now, deleting.now, None)


def test_sqlites_file_does_not_hold_it_either(sqlite_template: Path, tmp_path: Path) -> None:
    path = tmp_path / "whetstone.db"
    shutil.copyfile(sqlite_template, path)
    engine = connect(f"sqlite:///{path}")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA secure_delete = OFF")  # on where some systems build it; this one is reused
    seed = Seed(engine)
    seed.project("default")
    for name in ("t", "u"):
        seed.trajectory(name)
    deleting = Deleting(engine, seed)
    said = [{"role": "user", "content": "confided " * 5000}]
    deleting.write(schema.completions, schema.completions.c.trajectory_id == "t", new_messages=said)

    def stands_in_it() -> bool:
        with engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return b"confided" in path.read_bytes()

    assert stands_in_it()
    deleting("trajectory", "t")
    assert not stands_in_it()
    engine.dispose()


# What a step has.


def test_what_a_step_has_taken_waits_and_says_so(deleting: Deleting, seed: Seed) -> None:
    seed.group(state="claimed")
    seed.trajectory("t", "g", state="claimed", end_user="alice")
    seed.trajectory("u", end_user="alice")
    seed.trajectory("shown", end_user="alice")
    deleting.step(1, "t", state="claimed", ended_at=None)
    deleting.step(2, kind="sft", state="claimed", ended_at=None)
    deleting.example("shown", 2)
    erased = deleting("user", "alice")
    assert deleting.ids() == {"t", "shown"}
    assert (erased["waits_for"], erased["finished_at"]) == (["shown", "t"], None)
    # The steps end; the judging worker goes on, and needs no name for it.
    for version in (1, 2):
        deleting.version(version, version - 1, version)
    deleting.write(schema.trajectories, schema.trajectories.c.id == "t", state="trained")
    deleting.write(schema.steps, schema.steps.c.policy == "starter", state="promoted", ended_at=deleting.now)
    retention = Retention(deleting.engine, Settings().of_projects())
    assert retention.work(deleting.now) == 0, "whoever asked goes on with it for a while"
    assert retention.work(deleting.now + timedelta(hours=1)) == 1
    assert deleting.ids() == set()
    (row,) = deleting.rows(schema.erasures)
    assert (row.trajectories, row.waits_for, row.versions) == (3, None, {"starter": [1, 2]})
    assert row.finished_at is not None


# Who had learned from it.


def test_every_version_that_descends_from_one_that_learned_is_told(deleting: Deleting, seed: Seed) -> None:
    seed.insert(
        schema.policies, project="default", id="other", base_model="starter@v0", model_path="/", live_version=0,
        next_version=1, next_step=1, state="recording", created_at=seed.now,
    )  # fmt: skip
    seed.trajectory("t", state="trained")
    deleting.step(1)
    deleting.step(2, "t")
    deleting.step(3)
    deleting.version(1, 0, 1)
    deleting.version(2, 1, 2)
    deleting.version(3, 2, 3)
    deleting.version(4, 1, 4)
    deleting.version(5, 1, 2)  # of a lost attempt of the same step
    deleting.version(1, 0, None, policy="other", origin="starter@v3")
    deleting.version(2, 1, None, policy="other")
    assert deleting("trajectory", "t")["versions"] == {"other": [1, 2], "starter": [2, 3, 5]}


def test_a_step_that_left_it_out_has_not_learned_from_it(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("t", state="excluded")
    deleting.step(1, "t")
    deleting.write(schema.step_trajectories, schema.step_trajectories.c.trajectory_id == "t", advantage=None)
    deleting.version(1, 0, 1)
    assert deleting("trajectory", "t")["versions"] == {}


def test_each_supervised_step_that_may_have_imitated_it_is_told(deleting: Deleting, seed: Seed) -> None:
    """An example knows the last step that took it, and since when it is there."""
    seed.trajectory("t")
    before = {"ended_at": seed.now - timedelta(hours=1)}
    for number, values in ((1, before), (2, {}), (3, {}), (4, {})):
        deleting.step(number, kind="sft", **values)
        deleting.version(number, 0, number)
    deleting.example("t", 3)
    assert deleting("trajectory", "t")["versions"] == {"starter": [2, 3]}


# What is not in the tables yet.


@pytest.fixture
def write(deleting: Deleting) -> Callable[..., None]:
    store = Store(deleting.engine)

    def write(**values: Any) -> None:
        with deleting.engine.begin() as connection:
            store.calls.write(connection, [make_call(**values)])

    return write


def test_a_call_that_came_before_and_is_written_after_is_left_out(
    deleting: Deleting, write: Callable[..., None]
) -> None:
    came_at = deleting.now.timestamp() - 1
    deleting("trajectory", "t")
    deleting("user", "alice@example.com")
    write(call_id="c1", trajectory_id="t", created_at_s=came_at)
    write(call_id="c2", trajectory_id="u", end_user="alice@example.com", created_at_s=came_at)
    write(call_id="c3", trajectory_id="v", end_user=pseudonym("alice@example.com"), created_at_s=came_at)
    assert deleting.rows(schema.trajectories) == []
    write(call_id="c4", trajectory_id="w", end_user="bob", created_at_s=came_at)
    write(call_id="c5", trajectory_id="t", created_at_s=came_at + 2)
    assert deleting.ids() == {"w", "t"}


def test_whoever_writes_at_that_moment_is_waited_for(deleting: Deleting) -> None:
    deleted: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: deleted.append(deleting("trajectory", "t")))
    with deleting.engine.begin() as connection:
        Store(deleting.engine).calls.write(connection, [make_call(trajectory_id="t")])
        asking.start()
        if connection.dialect.name == "postgresql":  # on SQLite it cannot even begin
            waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareLock'")
            wait_for(lambda: connection.execute(waits).scalar())
    asking.join()
    assert deleted[0]["trajectories"] == 1
    assert deleting.ids() == set()


def test_a_trajectory_that_began_after_it_was_asked_for_stays(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("t", created_at=deleting.now + timedelta(seconds=1))
    deleting("trajectory", "t")
    assert deleting.ids() == {"t"}


# By age.


def test_what_is_older_than_a_project_keeps_goes_and_what_was_heard_of_since_stays(
    deleting: Deleting, seed: Seed
) -> None:
    month = timedelta(days=30, hours=2)
    for name, values in {
        "old": {},
        "seen": {"last_seen_at": seed.now + month},
        "young": {"created_at": seed.now + month, "last_seen_at": seed.now + month},
    }.items():
        seed.trajectory(name, **values)
    seed.trajectory("fork of it", continues="old-0", created_at=seed.now + month, last_seen_at=seed.now + month)
    seed.feedback("nowhere", 1.0, state="failed", comment="secret")
    seed.feedback("seen", 1.0, state="applied", trajectory_id="seen", comment="said")
    retention = Retention(deleting.engine, Settings(projects=DAYS_30).of_projects())
    assert retention.work(seed.now + timedelta(days=29)) == 0
    assert retention.work(seed.now + month) == 1
    assert deleting.ids() == {"seen", "young", "fork of it"}
    assert [row.comment for row in deleting.rows(schema.feedback)] == ["said"]
    assert retention.work(seed.now + month) == 0
    (row,) = deleting.rows(schema.erasures)
    assert (row.kind, row.target, row.trajectories) == ("age", "2026-01-01T14:00:00+00:00", 1)


def test_projects_keep_what_they_have_as_long_as_each_says(deleting: Deleting, seed: Seed) -> None:
    seed.project("other")
    for project in ("default", "other"):
        seed.trajectory("t", project=project)
    settings = Settings(projects=DAYS_30 | {"other": {"policies": ["second"]}}, vllm={"max_loras": 20})
    Retention(deleting.engine, settings.of_projects()).work(seed.now + timedelta(days=365))
    assert [row.project for row in deleting.rows(schema.trajectories)] == ["other"]


# Broken off.


def test_one_that_was_broken_off_is_gone_on_with(deleting: Deleting, seed: Seed) -> None:
    for number in range(3):
        seed.trajectory(f"t{number}", end_user="alice")
    transactions = erasing(Target("default", "user", "alice"), deleting.now)
    result = None
    for _ in range(5):  # asked, writers awaited, baselines, found, noted: then kill -9
        with deleting.engine.begin() as connection:
            result = transactions.send(result)(connection)
    assert len(deleting.ids()) == 3
    Retention(deleting.engine, Settings().of_projects()).work(deleting.now + timedelta(hours=1))
    assert deleting.ids() == set()
    (row,) = deleting.rows(schema.erasures)
    assert (row.trajectories, row.waits_for) == (3, None)


def test_asked_again_it_goes_on_under_the_same_id(deleting: Deleting, seed: Seed) -> None:
    seed.trajectory("t", end_user="alice", state="claimed")
    first = deleting("user", "alice")
    deleting.write(schema.trajectories, schema.trajectories.c.id == "t", state="trained")
    second = deleting("user", "alice")
    assert (second["id"], second["trajectories"]) == (first["id"], 1)
    assert deleting("user", "alice")["id"] != first["id"]


def test_more_than_one_transaction_takes_are_deleted_all_the_same(deleting: Deleting, seed: Seed) -> None:
    for number in range(205):
        seed.trajectory(f"t{number:03}", turns=1, end_user="alice")
    assert deleting("user", "alice")["completions"] == 205
    assert deleting.ids() == set()


# Settings.


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"redact": ["mail"]}, "'email', 'phone', 'card' or 'key'"),
        ({"redact_patterns": {"a": "("}}, "no regular expression"),
        ({"redact_patterns": {"a": "x*"}}, "matches where nothing stands"),
        ({"redact_patterns": {"A b": "x"}}, "no name of a pattern"),
        ({"redact_functions": ["os"]}, "package.module:function"),
        ({"keep_days": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_used_stops_the_start(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        PrivacySettings(**values)


def test_each_project_has_its_own() -> None:
    settings = Settings(projects=DAYS_30 | {"other": {"policies": ["second"]}}, vllm={"max_loras": 20})
    assert [one.privacy.keep_days for one in settings.of_projects()] == [30, None]
    assert settings.privacy.keep_days == 30
