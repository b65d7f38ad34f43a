"""Whenever workers happen to sweep, the same traffic comes into the same groups, with the same rewards and reasons."""

from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.settings import GroupSettings

RULES = GroupSettings(target_size=3, minimum_size=2, deadline_s=3600, prompt_window_s=60, idle_s=300)
LONG_AFTER = 20_000


@st.composite
def traffic(draw):
    """Calls in the order they came: seconds since the first, prompt, and the reward given at the end of some."""
    calls = draw(
        st.lists(
            st.tuples(
                st.integers(0, 40),
                st.sampled_from("pq"),
                st.one_of(st.none(), st.sampled_from([0.0, 1.0])),
                st.integers(1, 400),
            ),
            min_size=1,
            max_size=12,
        )
    )
    at, found = 0, []
    for number, (gap, prompt, reward, lasts) in enumerate(calls):
        at += gap
        found.append((f"t{number:02d}", at, prompt, reward, at + lasts))
    return found, draw(st.lists(st.integers(0, 1000), max_size=8))


def expected(calls):
    """The plain model: prompt by prompt, a group takes who began within its window until it is full."""
    groups = []
    newest = {}
    for name, at, prompt, reward, _ in calls:
        group = newest.get(prompt)
        if group is None or at - group["at"] >= 60 or len(group["members"]) == 3:
            group = newest[prompt] = {"at": at, "members": {}}
            groups.append(group)
        group["members"][name] = reward
    return sorted(fate(group["members"]) for group in groups)


def fate(members):
    rewards = [reward for reward in members.values() if reward is not None]
    formed_by = "prompt" if len(members) > 1 else "single"
    compared_with = ("group" if len(rewards) > 1 else "baseline") if rewards else None
    state = "scored" if rewards else "discarded"
    mean = sum(rewards) / len(rewards) if rewards else None
    return tuple(sorted(members)), formed_by, state, compared_with, len(rewards), mean


@given(traffic())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_when_workers_sweep_changes_no_group(engine, seed, history):
    calls, moments = history
    empty(engine)
    events = sorted(
        [(at, 0, name, (prompt, None)) for name, at, prompt, _, _ in calls]
        + [(ends, 1, name, (None, reward)) for name, _, _, reward, ends in calls if reward is not None]
        + [(moment, 2, "", None) for moment in moments]
    )
    for at, kind, name, what in events:
        now = seed.now + timedelta(seconds=at)
        if kind == 0:
            seed.trajectory(name, prompt_hash=what[0] * 32, created_at=now, last_seen_at=now)
        elif kind == 1:
            seed.feedback(name, what[1], created_at=now)
        else:
            sweep(engine, RULES, now)
    for later in range(1000, LONG_AFTER, 1000):
        sweep(engine, RULES, seed.now + timedelta(seconds=later))
    assert assembled(engine) == expected(calls)


def empty(engine):
    with engine.begin() as connection:
        for table in ("feedback", "completions", "trajectories", "groups"):
            connection.execute(text(f"DELETE FROM {table}"))


def assembled(engine):
    t, g = schema.trajectories.c, schema.groups.c
    with engine.connect() as connection:
        rows = connection.execute(select(t.group_id, t.id, t.reward)).all()
        groups = connection.execute(select(g.id, g.formed_by, g.state, g.compared_with, g.rewarded, g.reward_mean))
        found = []
        for group_id, formed_by, state, compared_with, rewarded, mean in groups:
            members = tuple(sorted(row.id for row in rows if row.group_id == group_id))
            found.append((members, formed_by, state, compared_with, rewarded, mean))
    return sorted(found)
