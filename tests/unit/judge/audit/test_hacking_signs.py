"""Signs of hacking and drift: planted ones are found, each alone, and honest runs are left in peace."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from judge.audit import report, store
from judge.audit.__main__ import seen
from judge.audit.hacking_signs import DriftDay, RankedGroup, change, drifted, hacked, halves, repetition
from judge.audit.store import Scope
from migrations import schema

START = datetime(2026, 1, 1, tzinfo=UTC)


def run(groups=60, policy="starter", rng=None, **rises):
    """A policy over ten versions: each figure with noise, and by the end higher by what `rises` says."""
    rng = rng or random.Random(0)
    level = {"reward": 0.5, "tokens": 100.0, "repetition": 0.1, "noise": 0.05}
    for place in range(groups):
        share = place / (groups - 1)
        figures = {name: base * (1 + rng.gauss(0, 0.1)) + rises.get(name, 0.0) * share for name, base in level.items()}
        version, at = place * 10 // groups, START + timedelta(hours=place)
        yield RankedGroup(f"g{place}", policy, at, discarded=False, version=version, **figures)


def names(alarms):
    return [alarm.name for alarm in alarms]


def test_an_honest_run_raises_no_alarm():
    assert hacked(list(run(reward=0.4))) == []


@pytest.mark.parametrize(
    ("figure", "rise", "alarm"),
    [("tokens", 100, "length"), ("repetition", 0.2, "repetition"), ("noise", 0.1, "disagreement")],
)  # fmt: skip
def test_a_planted_run_raises_exactly_its_alarm(figure, rise, alarm):
    (found,) = hacked(list(run(reward=0.4, **{figure: rise})))
    assert (found.name, found.policy) == (alarm, "starter")
    assert found.figures.startswith("reward 0.")
    assert figure in found.figures


def test_what_rises_while_the_reward_does_not_is_no_sign():
    assert hacked(list(run(tokens=100))) == []
    assert hacked(list(run(tokens=100, reward=-0.4))) == []


def test_a_rise_by_less_than_a_tenth_is_no_sign_however_certain():
    assert hacked(list(run(groups=5000, reward=0.4, tokens=10))) == []


def test_too_few_groups_raise_nothing():
    assert hacked(list(run(groups=18, reward=0.4, tokens=100))) == []


def test_policies_are_looked_at_one_by_one():
    both = [*run(reward=0.4), *run(policy="other", reward=0.4, tokens=100)]
    assert [(one.name, one.policy) for one in hacked(both)] == [("length", "other")]


def test_the_halves_are_by_version_whenever_it_spoke():
    late, early, none = (
        RankedGroup("g", "p", START + timedelta(hours=hour), None, False, version, None, None)
        for version, hour in ((3, 0), (1, 5), (None, 9))
    )
    assert halves([late, early, none]) == ([none], [early, late])


def test_a_change_of_means_by_hand():
    # Variances 2/3 of three each: half width 1.96 · √(1/3 + 1/3).
    interval = change([0, 1, 2], [3, 4, 5])
    assert interval.mean == 3
    assert interval.high - interval.mean == pytest.approx(1.96 * (2 / 3) ** 0.5, abs=1e-3)
    assert change([1], [1, 2]) is None


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("one two three", None),
        ("one two three four", 0.0),
        ("a b c d a b c d", 0.2),
        ("A b, c d. a B c D", 0.2),
        ("好的好的好的", 1 / 3),
        ("go " * 100, 96 / 97),
    ],
)
def test_repetition_is_the_share_of_runs_of_four_words_that_were_there_before(text, share):
    assert repetition(text) == (None if share is None else pytest.approx(share))


def days(*agreements, pairs=20):
    return [DriftDay("starter", f"2026-01-{10 + n}", pairs, one, 0.0) for n, one in enumerate(agreements)]


@pytest.mark.parametrize(
    ("agreements", "pairs", "found"),
    [
        ((0.9, 0.9, 0.9, 0.9), 20, 0),
        ((0.9, 0.9, 0.6, 0.6), 20, 1),
        ((0.6, 0.6), 20, 1),
        ((0.6, 0.6), 10, 0),
        ((0.95, 0.95, 0.78, 0.78), 20, 1),
        ((0.95, 0.78, 0.78), 20, 0),
        ((0.6, 0.6, 0.9, 0.9), 20, 0),
        ((), 20, 0),
    ],
)
def test_a_judge_that_parts_from_the_strong_one_raises_an_alarm(agreements, pairs, found):
    alarms = drifted(days(*agreements, pairs=pairs))
    assert names(alarms) == ["drift"] * found


def test_an_alarm_is_told_with_its_figures_and_what_to_look_at():
    (sentence,) = report.alarmed(drifted(days(0.9, 0.9, 0.5, 0.5)), ranked=50)
    assert sentence.startswith(
        "ALARM drift (starter): judge and strong judge order alike 50% of 40 pairs since 2026-01-12, 90% of 40 before. "
    )
    assert report.alarmed([], ranked=50) == ["No alarm."]
    assert "fewer than 20" in report.alarmed([], ranked=3)[0]


def ranked_group(seed, name, answers, version=0, **values):
    row = {"state": "scored", "judged_at": seed.now, "judge_noise": 0.1}
    seed.group(name, **(row | values))
    for place, (answer, reward) in enumerate(answers):
        one = seed.trajectory(f"{name}{place}", name, turns=0, completions=1, reward=reward, first_version=version,
                              sampled_tokens=10 * (place + 1))  # fmt: skip
        seed.completion(one, 0, response={"role": "assistant", "content": answer})


def test_what_alarms_look_at_is_read_from_the_tables(engine, seed):
    ranked_group(seed, "g", [("a b c d a b c d", 0.0), ("one two three four", 1.0)], version=3)
    ranked_group(seed, "d", [("x", None)], state="discarded", reason="judge_noise", judge_noise=0.4)
    seed.group("unranked")
    with engine.connect() as connection:
        ranked = store.ranked(connection, Scope("default"))
        d, g = seen(connection, "default", ranked)
    assert [(one.id, one.discarded) for one in ranked] == [("d", True), ("g", False)]
    assert (d.reward, d.tokens, d.repetition, d.noise) == (None, 10.0, None, 0.4)
    assert (g.version, g.reward, g.tokens, g.repetition, g.noise) == (3, 0.5, 15.0, pytest.approx(0.1), 0.1)
    (row,) = report.noise_table(ranked).rows
    assert row == ("starter", "2", "0.25", "1")


def test_a_scope_leaves_out_other_policies_projects_and_times(engine, seed):
    seed.project("other")
    ranked_group(seed, "g", [("a", 1.0)])
    seed.group("theirs", project="other", judged_at=seed.now, judge_due_at=seed.now, state="closed")
    scopes = [Scope("default", policy="x"), Scope("default", since=seed.now + timedelta(days=1))]
    with engine.connect() as connection:
        assert [store.ranked(connection, scope) for scope in scopes] == [[], []]
        assert store.waiting(connection, Scope("default")) == []
        assert store.policies(connection, "default") == ["starter"]


def test_groups_that_wait_are_counted_by_why(engine, seed):
    for place, why in enumerate(("its budget is spent", "its budget is spent", None)):
        seed.group(f"g{place}", state="closed", judge_due_at=seed.now, judge_waits=why,
                   closed_at=seed.now + timedelta(hours=place))  # fmt: skip
    with engine.connect() as connection:
        found = store.waiting(connection, Scope("default"))
    assert [(one.why, one.groups, one.since) for one in found] == [
        ("its budget is spent", 2, seed.now), (None, 1, seed.now + timedelta(hours=2))
    ]  # fmt: skip
    assert report.waiting_table(found).rows[1][3] == "its turn"


def test_days_and_drift_are_read_since_their_first_day(engine, seed):
    for day, calls in (("2025-12-31", 1), ("2026-01-01", 4)):
        seed.insert(schema.judge_days, project="default", policy="starter", day=day, judge="j", calls=calls, refused=1,
                    failed=0, tokens=10, cost_usd=0.5)  # fmt: skip
    with engine.connect() as connection:
        scope = Scope("default", since=seed.now)
        assert [one.calls for one in store.days(connection, scope)] == [4]
        assert [one.calls for one in store.days(connection, Scope("default"))] == [1, 4]
        assert store.days(connection, Scope("default", judge="k")) == []
        assert store.drift(connection, scope) == []
