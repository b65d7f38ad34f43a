"""Groups in a database, judges on real sockets that answer by a script, and a clock of the test's."""

import asyncio
import json
import random
from datetime import timedelta

import pytest
from sqlalchemy import select, text

from benchmarks.fakes.json_server import chat_answer
from benchmarks.fakes.judge import ScriptedJudge, attempts, worth
from judge.ruler.ranker import rank_due
from judge.settlement.sweep import sweep
from migrations import schema
from tests.unit.judge.ruler.speaker import judged
from whetstone.config.settings import Settings
from whetstone.domain.why_not_trained import WhyNotTrained

HOUR_S = 3600.0
LONG_S = 2 * HOUR_S
"""Longer than any judge is left alone for."""


class Court:
    """What the judging worker does, at the test's pace."""

    def __init__(self, engine, seed, server, **ruler):
        self.engine, self.seed, self.server = engine, seed, server
        self.after_s = 1.0
        self.judges = {"local": {"model": "openai/scripted", "url": server.url, "timeout_s": 20}}
        self.ruler = {"judges": ["local"], **ruler}
        self.learning = {}
        self.more = {}
        """More settings."""

    def named(self, name, url, **values):
        """One more judge, or another of that name."""
        self.judges[name] = {"model": "openai/scripted", "url": url, "timeout_s": 20} | values

    @property
    def settings(self):
        learning = {"starter": {"ruler": self.ruler, **self.learning}}
        return Settings(
            policy="starter", judges=self.judges, learning=learning, groups={"target_size": 100}, **self.more
        )

    @property
    def now(self):
        return self.seed.now + timedelta(seconds=self.after_s)

    def sweep(self):
        return sweep(self.engine, self.settings.groups, self.now, self.settings.learning, self.settings.judges)

    def rank(self):
        return asyncio.run(rank_due(self.engine, self.settings, lambda: self.now))

    def run(self):
        """All that is due now."""
        self.sweep()
        looked = self.rank()
        self.sweep()
        return looked

    def attempt(self, name, said, group="g", status="complete", **values):
        """A trajectory that has ended with these words; its last call, with this status."""
        row = {"state": "ended", "ended_at": self.seed.now} | values
        self.seed.trajectory(name, group, turns=0, completions=1, tail_completion_id=f"{name}-0", **row)
        response = {"role": "assistant", "content": said}
        self.seed.completion(name, 0, new_messages=PROMPT, response=response, status=status)

    def goes_on(self, name, said):
        """One more turn of an attempt of one."""
        response = {"role": "assistant", "content": said}
        self.seed.completion(name, 1, response=response)
        self.change(schema.trajectories, name, completions=2, tail_completion_id=f"{name}-1")

    def retried(self, name, by, said, **values):
        """A retry of the attempt takes its place."""
        self.change(
            schema.trajectories, name, state="excluded", why_not_trained=WhyNotTrained.SUPERSEDED.value, placed_at=None
        )
        self.attempt(by, said, placed_at=None, **values)

    def change(self, table, row_id, **values):
        """Write into a row of ours as somebody else would."""
        with self.engine.begin() as connection:
            connection.execute(table.update().where(table.c.id == row_id).values(**values))

    def group(self, *worth, group="g", **values):
        """A group whose attempts are worth this; they are called g0, g1, …"""
        self.seed.group(group, **values)
        for place, each in enumerate(worth):
            self.attempt(f"{group}{place}", f"try {place} is worth {each}", group)

    def groups(self, count, members=4, **values):
        """Groups that ask to be ranked, and what their attempts are worth."""
        rng = random.Random(count)
        known = {}
        for number in range(count):
            group = f"m{number}-"
            scores = [one / 1000 for one in rng.sample(range(1, 1000), members)]
            self.group(*scores, group=group)
            self.ask(group, **values)
            known[group] = {f"{group}{place}": score for place, score in enumerate(scores)}
        return known

    def ask(self, group="g", **values):
        row = {"source": "judge", "judge": {"kind": "ruler"}, "final": True, "created_at": self.now} | values
        return self.seed.feedback(group, kind="group", **row)

    def feedback(self, feedback_id):
        return self.seed.one(schema.feedback, feedback_id)

    def trajectory(self, name):
        return self.seed.one(schema.trajectories, name)

    def rewards(self, group="g"):
        t = schema.trajectories.c
        query = select(t.id, t.reward).where(t.group_id == group).order_by(t.id)
        with self.engine.connect() as connection:
            return dict(connection.execute(query).all())

    def state(self, group="g"):
        return self.seed.one(schema.groups, group)

    def judgements(self, group="g"):
        j = schema.judgements.c
        with self.engine.connect() as connection:
            return connection.execute(select(schema.judgements).where(j.group_id == group).order_by(j.place)).all()

    def withdraw(self, feedback_id):
        self.change(schema.feedback, feedback_id, withdrawn_at=self.now)

    def texts(self):
        """Group to the rubric that its judges were told."""
        j, r = schema.judgements.c, schema.rubrics.c
        query = select(j.group_id, r.text).join_from(schema.judgements, schema.rubrics, r.id == j.rubric_hash)
        with self.engine.connect() as connection:
            return dict(connection.execute(query).all())

    def view(self, name):
        with self.engine.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {name}"))]


PROMPT = [{"role": "system", "content": "Sort the mail."}, {"role": "user", "content": "12 mails"}]


def always(fault):
    """A scripted judge's fault at every call."""
    return lambda _number, _rng: fault


def right(handler):
    """The right scores, in the parts that are asked for if there are any: worth, and half of it."""
    body = handler.server.asked[-1][2]
    item = body["response_format"]["json_schema"]["schema"]["properties"]["scores"]["items"]["properties"]
    named = item["parts"]["properties"] if "parts" in item else None
    items = []
    for name, lines in attempts(body["messages"][-1]["content"]).items():
        score = worth(lines[-1])
        parts = {part: score / (2**place) for place, part in enumerate(named or ())}
        items.append({"id": name, "explanation": "so", **({"parts": parts} if named else {"score": score})})
    handler.server.items = items
    say(handler, items)


def say(handler, items):
    handler.whole(200, chat_answer(json.dumps({"scores": items}), "m"))


@pytest.fixture
def server():
    with ScriptedJudge() as running:
        yield running


@pytest.fixture
def spare():
    """A second judge."""
    with ScriptedJudge(seed=1) as running:
        yield running


@pytest.fixture
def speaker():
    """A judge that says what a test tells it to."""
    with judged() as running:
        yield running


@pytest.fixture
def court(engine, seed, server):
    return Court(engine, seed, server)
