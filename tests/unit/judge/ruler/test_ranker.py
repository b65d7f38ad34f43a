"""Groups are ranked by judges: asked once for each judgement, scored by id, beside what apps and rules say."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from judge.decisions.feedback import NO_JUDGE
from judge.ruler.lease import NOTHING_TO_RANK, own_id
from tests.unit.judge.ruler.conftest import HOUR_S


def test_an_asked_group_gets_the_scores_of_its_judge(court):
    court.group(0.2, 0.9, 0.5)
    asked = court.ask()
    assert court.run() == 1
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "g2": 0.5}
    assert {court.trajectory(name).reward_source for name in court.rewards()} == {"judge"}
    assert (court.state().state, court.state().compared_with) == ("scored", "group")
    assert (court.feedback(asked).state, court.feedback(asked).reason) == ("applied", None)
    assert court.server.calls == 3


def test_nothing_is_asked_twice(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.after_s = 2.0
    again = court.ask()
    court.run()
    assert court.feedback(again).state == "applied"
    assert court.server.calls == 3
    assert court.state().state == "scored"


def test_attempts_of_another_group_that_are_the_same_cost_no_call(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.group(group="h")
    for place, each in enumerate((0.2, 0.9)):
        court.attempt(f"other{1 - place}", f"try {place} is worth {each}", "h")
    court.ask("h")
    court.run()
    assert court.rewards("h") == {"other1": 0.2, "other0": 0.9}
    assert court.server.calls == 3
    assert {one.cached_from for one in court.judgements("h")} == {one.id for one in court.judgements()}
    assert all(one.calls == 0 and one.cost_usd is None for one in court.judgements("h"))


@pytest.mark.parametrize("change", [{"rubric": "Long answers are better."}, {"parts": {"tone": 1.0}}])
def test_another_question_is_asked_anew(court, change, tmp_path):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.after_s = 2.0
    if "parts" in change:
        court.ruler |= change
    court.ask(judge={"kind": "ruler", "rubric": change.get("rubric")})
    court.run()
    assert court.server.calls > 3


def test_a_judge_whose_model_is_another_now_is_asked_anew(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.judges["local"]["model"] = "openai/other"
    court.after_s = 2.0
    court.ask()
    court.run()
    assert court.server.calls == 6
    assert court.state().state == "scored"


def test_a_group_that_is_read_in_other_parts_now_is_asked_about_anew(court):
    court.ruler |= {"attempts_per_call": 4, "judgements": 1}
    worth = {f"g{place}": place / 20 for place in range(6)}
    court.group(*worth.values())
    court.ask()
    court.run()
    assert court.server.calls == 3
    court.ruler["attempts_per_call"] = 8
    court.after_s = 5.0
    again = court.ask()
    court.run()
    assert (court.feedback(again).state, court.rewards()) == ("applied", worth)
    assert court.server.calls == 4


def test_attempts_that_are_alike_are_shown_once_and_get_the_same(court):
    court.group(0.2, 0.9)
    court.attempt("twin", "try 0 is worth 0.2")
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "twin": 0.2}
    assert all(prompt.count("<attempt ") == 2 for prompt in court.server.prompts)


def test_attempts_that_are_all_alike_are_read_as_one(court):
    court.seed.group("g")
    for place in range(8):
        court.attempt(f"g{place}", "worth 0.5")
    court.ask()
    court.run()
    assert set(court.rewards().values()) == {0.5}
    assert all(prompt.count("<attempt ") == 1 for prompt in court.server.prompts)
    assert (court.state().state, court.state().reason) == ("discarded", "judge_noise")


def test_each_judgement_shows_the_attempts_under_other_ids_and_in_its_own_order(court):
    court.ruler["judgements"] = 9
    court.group(0.1, 0.2, 0.3, 0.4)
    court.ask()
    court.run()
    orders = [tuple(sorted(one.scores, key=lambda name: one.scores[name]["position"])) for one in court.judgements()]
    assert len(set(orders)) > 1
    assert len(set(court.server.prompts)) == 9


def test_what_the_settings_have_ranked_needs_no_request(court):
    court.ruler["rank"] = "all"
    court.group(0.2, 0.9, close_asked_at=court.seed.now)
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert court.feedback(own_id("g")).source == "judge"


@pytest.mark.parametrize(("rank", "formed_by", "calls"), [
    ("shadow", "shadow", 3), ("shadow", "choices", 0), ("asked", "shadow", 0), ("all", "choices", 3),
])  # fmt: skip
def test_which_groups_are_ranked_unasked(court, rank, formed_by, calls):
    court.ruler["rank"] = rank
    court.group(0.2, 0.9, formed_by=formed_by)
    court.run()
    assert court.server.calls == calls


@pytest.mark.parametrize(("rank", "rewards"), [("shadow", {"g0": 0.2, "g1": 0.9}), ("asked", {"g0": None, "g1": None})])
def test_both_answers_to_a_held_out_prompt_are_ranked_and_no_step_takes_them(court, rank, rewards):
    court.ruler["rank"] = rank
    court.seed.group("g", formed_by="evaluation", target_size=2)
    for place, worth in enumerate((0.2, 0.9)):
        court.attempt(f"g{place}", f"try {place} is worth {worth}", split="eval")
    court.run()
    assert court.rewards() == rewards
    assert (court.state().state, court.state().reason) == ("discarded", "split_eval")
    assert {court.trajectory(name).why_not_trained for name in rewards} == {"split_eval"}


def test_what_the_app_said_outranks_the_judge(court):
    court.group(0.2, 0.9)
    court.seed.feedback("g0", 0.7)
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.7, "g1": 0.9}
    court.seed.feedback("g1", 0.1)
    court.sweep()
    assert court.rewards() == {"g0": 0.7, "g1": 0.1}


def test_a_weight_adds_the_score_to_what_the_app_said(court):
    court.ruler["weight"] = 0.5
    court.group(0.2, 0.9)
    court.seed.feedback("g0", 1.0)
    court.ask()
    court.run()
    assert court.rewards() == pytest.approx({"g0": 1.1, "g1": 0.9})


def test_a_group_that_the_app_rewarded_whole_costs_no_call_unasked(court):
    court.ruler["rank"] = "all"
    court.group(0.2, 0.9, close_asked_at=court.seed.now)
    court.seed.feedback("g0", 1.0)
    court.seed.feedback("g1", 0.0)
    court.run()
    assert court.server.calls == 0
    assert court.state().state == "scored"


def test_a_withdrawn_request_is_not_answered(court):
    court.group(0.2, 0.9)
    asked = court.ask()
    court.sweep()
    court.withdraw(asked)
    court.run()
    assert court.server.calls == 0
    assert court.rewards() == {"g0": None, "g1": None}
    assert court.feedback(asked).state == "withdrawn"
    assert court.state().judge_due_at is None


def test_withdrawn_scores_are_taken_back(court):
    court.group(0.2, 0.9)
    asked = court.ask()
    court.run()
    court.withdraw(asked)
    court.after_s = 3.0
    court.run()
    assert court.rewards() == {"g0": None, "g1": None}
    assert (court.state().state, court.server.calls) == ("closed", 3)


def test_a_late_member_has_all_of_them_ranked_anew(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.attempt("late", "try 2 is worth 0.6", placed_at=None)
    court.after_s = 5.0
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "late": 0.6}
    assert court.server.calls == 6
    assert court.state().state == "scored"


def test_a_late_twin_of_a_ranked_attempt_gets_its_score_whatever_it_is_called(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    court.attempt("a-late", "try 0 is worth 0.2", placed_at=None)
    court.after_s = 5.0
    court.run()
    assert court.rewards() == {"a-late": 0.2, "g0": 0.2, "g1": 0.9}
    assert (court.state().state, court.server.calls) == ("scored", 3)


def test_an_open_group_is_closed_by_the_request(court):
    court.seed.group("g")
    court.attempt("a", "worth 0.3")
    court.attempt("b", "worth 0.6", state="open", ended_at=None)
    court.ask()
    court.run()
    assert court.rewards() == {"a": 0.3, "b": 0.6}


def test_an_attempt_alone_is_scored_too(court):
    court.group(0.7)
    court.ask()
    court.run()
    # The request alone closes no group of one: another may begin.
    assert (court.state().state, court.server.calls) == ("open", 0)
    court.after_s = 25 * HOUR_S
    court.run()
    assert court.rewards() == {"g0": 0.7}
    assert (court.state().state, court.state().compared_with, court.state().judge_noise) == ("scored", "baseline", None)


def test_a_request_that_is_not_final_waits_for_the_group_to_close(court):
    court.seed.group("g")
    court.attempt("a", "worth 0.3")
    court.attempt("b", "worth 0.6")
    asked = court.ask(final=False)
    court.run()
    assert court.server.calls == 0
    assert (court.feedback(asked).state, court.feedback(asked).reason) == ("waiting", "waits for its judges")


def test_without_a_judge_the_request_fails_and_says_what_to_do(court):
    court.ruler["judges"] = []
    court.group(0.2, 0.9)
    asked = court.ask()
    court.sweep()
    assert (court.feedback(asked).state, court.feedback(asked).reason) == ("failed", NO_JUDGE)


def test_a_judge_may_be_asked_for_by_name(court):
    court.ruler["judges"] = []
    court.group(0.2, 0.9)
    court.ask(judge={"kind": "ruler", "model": "local"})
    unknown = court.ask(judge={"kind": "ruler", "model": "nobody"})
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert court.feedback(unknown).reason == "no judge is named 'nobody'; there are: local"


def test_a_group_that_is_over_is_not_ranked(court):
    court.group(0.2, 0.9, state="trained", step=4)
    court.group(0.2, 0.9, group="h", state="discarded", reason="too_few")
    trained, discarded = court.ask(), court.ask("h")
    court.run()
    assert (court.feedback(trained).state, court.feedback(trained).reason) == ("unused", "trained in step 4")
    assert court.feedback(discarded).reason == "the group was discarded (too_few)"
    assert court.server.calls == 0


def test_a_group_without_any_answer_says_so(court):
    court.seed.group("g")
    court.seed.trajectory("a", "g", turns=0, state="ended")
    court.seed.trajectory("b", "g", turns=0, state="ended")
    asked = court.ask()
    court.run()
    assert (court.feedback(asked).state, court.feedback(asked).reason) == ("unused", NOTHING_TO_RANK)
    assert court.server.calls == 0


def test_what_a_rule_has_decided_is_not_shown(court):
    veto = {"name": "banned", "run": "functions:banned", "kind": "veto"}
    court.learning = {"rewards": [veto], "failure_reward": -1.0}
    court.group(0.2, 0.9)
    court.attempt("vetoed", "try 2 is worth 1.0", code_parts={"banned": 1.0}, reward=-1.0, reward_source="code")
    court.attempt("broken", "try 3 is worth 1.0", status="aborted", reward=-1.0, reward_source="failure")
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "vetoed": -1.0, "broken": -1.0}
    assert all(prompt.count("<attempt ") == 2 for prompt in court.server.prompts)


def test_an_attempt_of_which_merely_nobody_told_is_shown_and_scored(court):
    court.learning = {"failure_reward": -1.0}
    court.group(0.2, 0.9, 0.5, close_asked_at=court.seed.now)
    court.seed.feedback("g0", 1.0)
    court.run()
    court.after_s = 25 * HOUR_S
    court.run()
    assert court.rewards() == {"g0": 1.0, "g1": -1.0, "g2": -1.0}
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 1.0, "g1": 0.9, "g2": 0.5}
    assert all(prompt.count("<attempt ") == 3 for prompt in court.server.prompts)


def test_a_rubric_comes_from_the_request_the_task_or_the_policy(court, tmp_path):
    for name in ("policy", "task"):
        (tmp_path / name).write_text(f"By the rubric of the {name}.")
    court.ruler |= {"rubric": tmp_path / "policy", "rubrics": {"mail": tmp_path / "task"}}
    for group, task, said in (("g", None, None), ("h", "mail", None), ("i", "mail", "By this one.")):
        court.seed.group(group)
        for worth in (0.2, 0.9):
            court.attempt(f"{group}{worth}", f"worth {worth}", group, task=task)
        court.ask(group, judge={"kind": "ruler", "rubric": said})
    court.run()
    texts = court.texts()
    assert texts == {"g": "By the rubric of the policy.", "h": "By the rubric of the task.", "i": "By this one."}


def test_a_rubric_with_a_nul_is_read_without_it(court, tmp_path):
    court.ruler["rubric"] = tmp_path / "rubric"
    court.ruler["rubric"].write_bytes(b"Short\x00 is better.\n")
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.texts() == {"g": "Short\ufffd is better."}
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def test_a_large_group_is_read_in_parts_that_are_laid_over_one_another(court):
    court.ruler |= {"attempts_per_call": 4, "judgements": 1}
    worth = [place / 20 for place in range(14)]
    court.group(*worth)
    court.ask()
    court.run()
    assert court.rewards() == pytest.approx({f"g{place}": each for place, each in enumerate(worth)}, abs=1e-6)
    assert max(prompt.count("<attempt ") for prompt in court.server.prompts) == 4
    assert court.server.calls == 7


def test_a_stronger_judge_looks_at_a_sample_and_rewards_nothing(court):
    court.judges["strong"] = court.judges["local"]
    court.ruler |= {"strong": "strong", "strong_share": 1.0, "judgements": 1}
    court.group(0.2, 0.9)
    court.server.noise = lambda number, said: 0.0 if number == 0 else 0.7 if "try 0" in said else -0.7
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    (drift,) = court.view("admin_judge_drift")
    assert (drift["groups"], drift["pairs"], float(drift["agreement"])) == (1, 1, 0.0)
    assert float(drift["difference"]) == pytest.approx((0.2 - 0.9 + 0.9 - 0.2) / 2)
    assert [one.purpose for one in court.judgements()] == ["reward", "drift"]


def test_attempts_are_drawn_for_people_until_they_have_told(court):
    court.ruler["review_share"] = 1.0
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert {row["trajectory_id"] for row in court.view("admin_reviews")} == {"g0", "g1"}
    court.after_s = 5.0
    court.seed.feedback("g0", 1.0, created_at=court.now)
    court.sweep()
    assert {row["trajectory_id"] for row in court.view("admin_reviews")} == {"g1"}


def test_cost_and_tokens_are_kept_for_each_judgement_and_each_day(court):
    court.judges["local"] |= {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 2.0}
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    judgements = court.judgements()
    assert all(one.cost_usd > 0 and one.prompt_tokens > 0 and one.calls == 1 for one in judgements)
    assert {one.model for one in judgements} == {"scripted-2026-01-01"}
    (day,) = court.view("admin_judge_days")
    assert (day["judge"], day["calls"], day["refused"], day["failed"]) == ("local", 3, 0, 0)
    assert day["cost_usd"] == pytest.approx(sum(one.cost_usd for one in judgements))
    shares = [row["cost_usd"] for row in court.view("admin_judgements")]
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(day["cost_usd"])


def test_many_at_once_ask_once_for_each_judgement(court):
    groups = [f"many{number}-" for number in range(12)]
    for number, group in enumerate(groups):
        court.group(number / 20, 0.5 + number / 40, group=group)
        court.ask(group)
    court.sweep()

    with ThreadPoolExecutor(4) as workers:
        assert sum(workers.map(lambda _: court.rank(), range(4))) == len(groups)
    court.sweep()
    assert court.server.calls == 3 * len(groups)
    for number, group in enumerate(groups):
        assert court.rewards(group) == {f"{group}0": number / 20, f"{group}1": 0.5 + number / 40}
