"""Which groups trajectories come into, and when groups close: on both databases."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.settings import GroupSettings
from whetstone.domain.ids import ID


def test_the_same_first_prompt_inside_the_window_forms_a_group(judge):
    judge.prompt("a")
    judge.sweep()
    judge.prompt("b", after_s=59)
    judge.sweep(after_s=59)
    assert judge.groups("prompt") == ["ab"]
    row = judge.group_of("a")
    assert (row.state, row.prompt_hash, row.policy, row.created_at) == ("open", "a" * 32, "starter", judge.seed.now)
    assert ID.fullmatch(row.id)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"prompt_hash": "b" * 32}, "another prompt"),
        ({"after_s": 60.0}, "the window has ended"),
        ({"after_s": -60.0}, "it began a window earlier, and was told late"),
        ({"policy": "other"}, "another policy"),
    ],
)
def test_what_shares_less_than_prompt_policy_and_window_has_a_group_of_its_own(judge, values, why):
    judge.seed.insert(
        schema.policies, project="default", id="other", base_model="starter@v0", model_path="/models/starter",
        live_version=0, next_version=1, next_step=1, state="training", created_at=judge.seed.now,
    )  # fmt: skip
    judge.prompt("a")
    judge.sweep()
    judge.prompt("b", **values)
    judge.sweep()
    assert judge.groups() == ["a", "b"], why


@pytest.mark.parametrize(
    "values", [{"split": "eval"}, {"no_train": True}, {"turns": 0}, {"prompt_hash": None}, {"group_id": "mine"}]
)
def test_what_does_not_count_or_belongs_elsewhere_is_not_grouped_by_its_prompt(judge, values):
    judge.seed.group("mine")
    judge.prompt("a", **values)
    judge.sweep()
    assert judge.groups("prompt") == []


def test_another_projects_equal_prompt_is_no_sibling(judge):
    judge.seed.project("other")
    judge.prompt("a")
    judge.prompt("b", project="other")
    judge.sweep()
    assert judge.groups() == ["a", "b"]


def test_a_full_group_is_followed_by_another_one(judge):
    judge.prompt(*"abcdefg")
    judge.sweep()
    assert judge.groups("prompt") == ["abc", "def", "g"]
    judge.prompt("h", after_s=1)
    judge.sweep()
    assert judge.groups("prompt") == ["abc", "def", "gh"]


def test_a_superseded_attempt_takes_no_place(judge):
    judge.prompt("a", state="excluded", why_not_trained="superseded")
    judge.prompt(*"bcd")
    judge.sweep()
    assert judge.groups() == ["bcd"]
    assert judge.trajectory("a").group_id is None


def test_a_member_that_is_superseded_later_makes_room(judge):
    judge.prompt(*"abc")
    judge.sweep()
    is_a = schema.trajectories.c.id == "a"
    with judge.engine.begin() as connection:
        gone = {"state": "excluded", "why_not_trained": "superseded", "placed_at": None}
        connection.execute(schema.trajectories.update().where(is_a).values(**gone))
    judge.prompt("d", after_s=1)
    judge.sweep()
    assert judge.groups("prompt") == ["abcd"]
    judge.reward(*"bcd")
    judge.sweep()
    assert (judge.group_of("b").state, judge.group_of("b").size) == ("scored", 3)


def test_a_group_that_a_step_has_claimed_takes_nobody(judge):
    judge.prompt("a")
    judge.sweep()
    with judge.engine.begin() as connection:
        connection.execute(schema.groups.update().values(state="claimed"))
    judge.prompt("b", after_s=1)
    judge.sweep()
    assert judge.groups("prompt") == ["a", "b"]


def test_what_goes_on_from_a_trajectory_that_was_over_is_grouped_by_its_own_first_prompt(judge):
    judge.prompt("a")
    judge.prompt("b", continues="x-0")
    judge.sweep()
    assert judge.groups("prompt") == ["ab"]


def test_a_window_of_zero_forms_no_prompt_groups(judge):
    judge.rules(prompt_window_s=0)
    judge.prompt(*"ab")
    judge.sweep()
    assert judge.groups() == []
    assert judge.trajectory("a").why_not_trained == "no_reward"


def test_a_full_prompt_group_is_scored_when_all_are_rewarded_inside_its_window(judge):
    judge.prompt(*"abc")
    judge.reward("a", "b", "c", value=0.5)
    judge.sweep()
    row = judge.group_of("a")
    assert (row.state, row.size, row.reward_mean, row.compared_with) == ("scored", 3, 0.5, "group")


def test_a_partial_prompt_group_closes_when_its_window_ends(judge):
    judge.prompt(*"ab")
    judge.reward(*"ab")
    judge.sweep(after_s=59)
    assert (judge.group_of("a").state, judge.trajectory("a").why_not_trained) == ("open", "group_open")
    judge.sweep(after_s=60)
    row = judge.group_of("a")
    assert (row.state, row.formed_by, row.compared_with, row.size) == ("scored", "prompt", "group", 2)


def test_a_prompt_group_waits_for_members_that_still_run_but_takes_no_new_ones(judge):
    judge.prompt(*"ab")
    judge.reward("a")
    judge.sweep(after_s=61)
    assert judge.group_of("a").state == "open"
    judge.prompt("c", after_s=62)
    judge.sweep(after_s=62)
    assert judge.groups("prompt") == ["ab", "c"]
    judge.reward("b", after_s=100)
    judge.sweep(after_s=100)
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("scored", 2)


def test_a_prompt_groups_deadline_ends_who_still_runs(judge):
    judge.prompt("a")
    judge.prompt("b", last_seen_at=judge.seed.now + timedelta(hours=2))
    judge.reward("a")
    judge.sweep(after_s=3599)
    assert judge.group_of("a").state == "open"
    judge.sweep(after_s=3600)
    assert (judge.group_of("a").state, judge.trajectory("b").state) == ("closed", "ended")


def test_one_that_began_inside_the_window_but_was_recorded_after_it_reopens_the_group(judge):
    judge.prompt("a")
    judge.reward("a")
    judge.sweep(after_s=61)
    assert (judge.group_of("a").formed_by, judge.group_of("a").compared_with) == ("single", "baseline")
    judge.prompt("b", after_s=59)
    judge.reward("b", value=0.0, after_s=62)
    judge.sweep(after_s=62)
    row = judge.group_of("a")
    assert (row.formed_by, row.compared_with, row.size, row.reward_mean) == ("prompt", "group", 2, 0.5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_header_groups_own_size_counts_more_than_the_setting(judge, size):
    judge.seed.group(target_size=size)
    for name in "abcd"[:size]:
        assert size == 1 or name == "a" or judge.group_of("a").state == "open"
        judge.seed.trajectory(name, "g")
        judge.reward(name)
        judge.sweep()
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("scored", size)


def test_a_close_call_closes_at_or_above_the_minimum_and_ends_who_still_runs(judge):
    judge.seed.group(close_asked_at=judge.seed.now)
    judge.seed.trajectory("a", "g")
    judge.reward("a")
    judge.sweep()
    assert judge.group_of("a").state == "open"
    judge.seed.trajectory("b", "g")
    judge.sweep(after_s=2)
    assert (judge.group_of("a").state, judge.trajectory("b").state) == ("closed", "ended")
    judge.reward("b", value=0.0)
    judge.sweep(after_s=3)
    assert (judge.group_of("a").state, judge.group_of("a").reward_mean) == ("scored", 0.5)


CLOSINGS = {"close": {"source": "close"}, "judge": {"source": "judge", "judge": {"kind": "ruler"}, "final": True}}


@pytest.fixture(params=sorted(CLOSINGS))
def close(judge, request):
    """Asks to close the group `g`: by a close call, or by a judge request, which closes it too."""
    judge.policy(ruler={"judges": ["strict"]})

    def ask(asked_s):
        asked_at = judge.seed.now + timedelta(seconds=asked_s)
        judge.seed.feedback("g", kind="group", created_at=asked_at, **CLOSINGS[request.param])

    return ask


def join(judge, *names, began_s):
    """Members of the group `g` that still run."""
    began = judge.seed.now + timedelta(seconds=began_s)
    for name in names:
        judge.seed.trajectory(name, "g", created_at=began, last_seen_at=began)


def test_members_that_began_before_the_close_call_are_not_late_though_the_sweep_began_before_them(judge, close):
    """The sweep of second 1 reads what came meanwhile: four choices of a call, and the request to close."""
    judge.seed.group(target_size=8)
    join(judge, *"abcd", began_s=1.2)
    close(asked_s=1.3)
    judge.sweep(after_s=1)
    judge.sweep(after_s=2)
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("closed", 4)
    assert {judge.trajectory(name).state for name in "abcd"} == {"ended"}


def test_a_second_close_call_ends_members_that_came_after_the_first(judge, close):
    judge.seed.group(target_size=8)
    join(judge, *"ab", began_s=1)
    close(asked_s=2)
    judge.sweep(after_s=3)
    assert judge.group_of("a").state == "closed"
    join(judge, "c", began_s=4)
    judge.sweep(after_s=5)
    assert (judge.group_of("c").state, judge.trajectory("c").state) == ("open", "open")
    close(asked_s=6)
    judge.sweep(after_s=7)
    assert (judge.group_of("c").state, judge.group_of("c").size) == ("closed", 3)


def test_a_member_that_begins_after_the_close_call_reopens_the_group_and_may_run(judge):
    judge.seed.group(close_asked_at=judge.seed.now)
    for name in "ab":
        judge.seed.trajectory(name, "g")
        judge.reward(name)
    judge.sweep()
    assert judge.group_of("a").state == "scored"
    began = judge.seed.now + timedelta(seconds=10)
    judge.seed.trajectory("c", "g", created_at=began, last_seen_at=began)
    judge.sweep(after_s=11)
    assert (judge.group_of("a").state, judge.trajectory("c").state) == ("open", "open")
    judge.reward("c", after_s=12)
    judge.sweep(after_s=12)
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("scored", 3)


def test_the_choices_of_a_call_wait_for_nobody_else(judge):
    judge.seed.group("a.choices", formed_by="choices")
    for name in ("a", "a.1"):
        judge.seed.trajectory(name, "a.choices")
    judge.reward("a")
    judge.sweep()
    assert judge.group_of("a").state == "open"
    judge.reward("a.1", value=0.0)
    judge.sweep(after_s=2)
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("scored", 2)


def test_choices_of_which_nobody_told_end_by_idleness_and_wait_for_rewards(judge):
    judge.seed.group("a.choices", formed_by="choices")
    for name in ("a", "a.1", "a.2", "a.3"):
        judge.seed.trajectory(name, "a.choices")
    judge.reward("a")
    judge.sweep(after_s=600)
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("closed", 4)


def shadow(judge, of, siblings=2, **values):
    judge.seed.group(f"{of}.shadow", formed_by="shadow", target_size=siblings)
    for number in range(siblings):
        judge.seed.trajectory(f"{of}.s{number}", f"{of}.shadow", **values)


def test_a_shadow_groups_siblings_end_at_once_and_their_original_joins_them(judge):
    judge.prompt("a")
    judge.reward("a")
    judge.sweep()
    left = judge.trajectory("a").group_id
    shadow(judge, "a")
    judge.sweep(after_s=2)
    assert judge.groups() == ["aa.s0a.s1"]
    assert {judge.trajectory(name).state for name in ("a.s0", "a.s1")} == {"ended"}
    assert (judge.group_of("a").state, judge.group_of("a").size) == ("closed", 3)
    assert judge.trajectory("a").left_group_id == left
    with judge.engine.connect() as connection:
        assert connection.execute(select(schema.groups).where(schema.groups.c.id == left)).first() is None
    judge.reward("a.s0", "a.s1", value=0.0)
    judge.sweep(after_s=3)
    row = judge.group_of("a")
    assert (row.state, row.formed_by, row.rewarded, row.compared_with) == ("scored", "shadow", 3, "group")


def test_an_original_that_is_placed_in_the_same_sweep_joins_as_well(judge):
    judge.prompt("a", "b")
    shadow(judge, "a")
    judge.sweep()
    assert judge.groups() == ["aa.s0a.s1", "b"]
    assert judge.trajectory("a").state == "open"


def test_a_shadow_group_of_which_half_is_there_waits_for_the_rest(judge):
    judge.seed.trajectory("a", no_train=True)
    judge.seed.group("a.shadow", formed_by="shadow", target_size=2)
    judge.seed.trajectory("a.s0", "a.shadow")
    judge.sweep()
    assert judge.group_of("a.s0").state == "open"
    judge.seed.trajectory("a.s1", "a.shadow")
    judge.sweep()
    assert (judge.group_of("a.s0").state, judge.group_of("a.s0").size) == ("closed", 2)


@pytest.mark.parametrize(
    "values",
    [
        {"turns": 2},
        {"split": "eval"},
        {"no_train": True},
        {"state": "claimed"},
        {"state": "excluded", "why_not_trained": "stale"},
        {"policy": "another"},
    ],
)
def test_an_original_that_cannot_be_compared_with_its_siblings_stays_where_it_is(judge, values):
    judge.seed.trajectory("a", placed_at=judge.seed.now, **values)
    shadow(judge, "a")
    judge.sweep()
    assert judge.groups() == ["a.s0a.s1"]
    assert judge.trajectory("a").group_id is None


@pytest.mark.parametrize("elsewhere", ["with others", "in a group of the app's", "in a claimed group"])
def test_an_original_that_is_compared_elsewhere_stays_there(judge, elsewhere):
    if elsewhere == "in a group of the app's":
        judge.seed.group()
        judge.seed.trajectory("a", "g")
    else:
        judge.prompt(*("ab" if elsewhere == "with others" else "a"))
    judge.sweep()
    if elsewhere == "in a claimed group":
        with judge.engine.begin() as connection:
            connection.execute(schema.groups.update().values(state="claimed"))
    before = judge.trajectory("a").group_id
    shadow(judge, "a")
    judge.sweep()
    assert judge.trajectory("a").group_id == before
    assert "a.s0a.s1" in judge.groups("shadow")


def test_a_shadow_group_of_an_unknown_trajectory_is_a_group_all_the_same(judge):
    shadow(judge, "nobody")
    judge.sweep()
    assert (judge.group_of("nobody.s0").state, judge.group_of("nobody.s0").size) == ("closed", 2)


def test_the_answers_to_a_held_out_prompt_end_at_once_and_their_group_is_over_when_both_are_there(judge):
    judge.seed.group("e", formed_by="evaluation", target_size=2)
    judge.seed.trajectory("a", "e", split="eval")
    judge.sweep()
    assert (judge.trajectory("a").state, judge.group_of("a").state) == ("ended", "open")
    judge.seed.trajectory("b", "e", split="eval")
    judge.sweep()
    assert (judge.trajectory("b").state, judge.group_of("b").state) == ("ended", "discarded")
    assert judge.group_of("a").reason == judge.trajectory("a").why_not_trained == "split_eval"


def test_the_admin_view_shows_how_a_group_came_about_and_what_it_is_compared_with(judge):
    judge.prompt("a")
    judge.reward("a")
    judge.sweep(after_s=60)
    with judge.engine.connect() as connection:
        shown = connection.exec_driver_sql("SELECT formed_by, compared_with, state FROM admin_groups").all()
    assert [tuple(row) for row in shown] == [("single", "baseline", "scored")]


def test_many_workers_at_once_split_no_prompt_and_lose_nobody(engine, seed):
    """600 trajectories of five prompts come in while four workers sweep: full groups, but for one of each prompt."""
    rules = GroupSettings(target_size=8, prompt_window_s=600)
    failures = []
    all_there = threading.Event()

    def work():
        try:
            while not all_there.is_set():
                sweep(engine, rules, seed.now + timedelta(seconds=60))
            sweep(engine, rules, seed.now + timedelta(seconds=60))
        except Exception as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for start in range(0, 600, 20):
        rows = [trajectory_row(number, seed.now) for number in range(start, start + 20)]
        with engine.begin() as connection:
            connection.execute(schema.trajectories.insert(), rows)
            connection.execute(schema.feedback.insert(), [feedback_row(row["id"], seed.now) for row in rows])
    all_there.set()
    for worker in workers:
        worker.join()
    sweep(engine, rules, seed.now + timedelta(seconds=60))
    assert failures == []
    t, g = schema.trajectories.c, schema.groups.c
    query = select(g.prompt_hash, g.state, func.count()).join(schema.trajectories, t.group_id == g.id)
    with engine.connect() as connection:
        sizes = sorted(tuple(row) for row in connection.execute(query.group_by(g.id, g.prompt_hash, g.state)))
        states = connection.execute(select(schema.feedback.c.state).distinct()).scalars().all()
    assert sizes == sorted([(str(prompt) * 32, "scored", 8) for prompt in range(5) for _ in range(15)])
    assert states == ["applied"]


def trajectory_row(number, now):
    at = now + timedelta(milliseconds=number)
    return {
        "project": "default", "id": f"t{number:03d}", "policy": "starter", "split": "train", "no_train": False,
        "state": "open", "completions": 1, "sampled_tokens": 1, "created_at": at, "last_seen_at": at,
        "prompt_hash": str(number % 5) * 32,
    }  # fmt: skip


def feedback_row(trajectory_id, now):
    return {
        "project": "default", "id": f"f-{trajectory_id}", "target_kind": "trajectory", "target_id": trajectory_id,
        "choice": 0, "reward": 1.0, "source": "reward", "final": True, "state": "waiting", "created_at": now,
    }  # fmt: skip
