"""Judges beside what people, apps and rules said: what is compared, what is left out, and what the program says."""

import json
import random
import sys
from datetime import UTC, datetime, timedelta

import pytest

from judge.audit import report as told
from judge.audit import store
from judge.audit.__main__ import main
from judge.audit.agreement import Pairs
from judge.audit.calibrate import calibrations
from judge.audit.references import NoReferences, from_file
from judge.audit.store import Day, Reference, Scope, ScoredTrajectory, StoredJudgement
from migrations import schema
from whetstone.config.settings import PREFIX

RUBRIC = "r" * 32


class Bench:
    """Judged groups in a database: attempts `<group>0`, `<group>1`, … with these scores."""

    def __init__(self, engine, seed):
        self.engine, self.seed = engine, seed
        seed.insert(schema.rubrics, project="default", id=RUBRIC, text="be right")
        self.calls = 0

    def judged(self, group, *scores, judge="local", parts=None, positions=None, members=True, **values):
        if members:
            self.seed.group(group, state="scored")
            for place in range(len(scores)):
                self.seed.trajectory(f"{group}{place}", group, state="trained")
        said = {
            f"{group}{place}": {
                "score": score, "explanation": "so", "parts": parts[place] if parts else None,
                "position": positions[place] if positions else place, "attempt": f"a{place}",
            }
            for place, score in enumerate(scores)
        }  # fmt: skip
        self.calls += 1
        row = {
            "id": f"j{self.calls:04d}", "group_id": group, "policy": "starter", "attempts_hash": "h",
            "place": self.calls, "section": 0, "purpose": "reward", "state": "accepted", "judge": judge,
            "rubric_hash": RUBRIC, "calls": 1, "refusals": 0, "left_out": 0, "prompt_tokens": 90,
            "completion_tokens": 10, "cost_usd": 0.01, "created_at": self.seed.now,
            "accepted_at": self.seed.now + timedelta(seconds=self.calls),
        }  # fmt: skip
        self.seed.insert(schema.judgements, project="default", scores=said, **(row | values))

    def said(self, **scope):
        with self.engine.connect() as connection:
            return list(store.judgements(connection, Scope("default", **scope)))

    def references(self):
        with self.engine.connect() as connection:
            return store.by_feedback(connection, Scope("default"))

    def rewards(self):
        return {name: one.reward for name, one in sorted(self.references().items())}

    def feedback(self, target, reward=None, after_s=0, **values):
        row = {"state": "applied", "created_at": self.seed.now + timedelta(seconds=after_s)}
        if values.get("kind", "trajectory") == "trajectory":
            row["trajectory_id"] = target
        return self.seed.feedback(target, reward, **(row | values))

    def many(self, groups=30, agree=0.9):
        """Groups of three that the judge mostly ranks as people do."""
        rng = random.Random(0)
        for one in range(groups):
            worth = rng.sample([0.0, 0.5, 1.0], 3)
            scores = worth if rng.random() < agree else [1 - each for each in worth]
            for again in range(2):
                positions = rng.sample(range(3), 3)
                noisy = [min(1.0, max(0.0, score + rng.gauss(0, 0.02))) for score in scores]
                self.judged(f"g{one:02d}", *noisy, positions=positions, members=not again)
            for place, each in enumerate(worth):
                self.feedback(f"g{one:02d}{place}", each)


@pytest.fixture
def bench(engine, seed):
    return Bench(engine, seed)


@pytest.fixture
def run(engine, monkeypatch, capsys, tmp_path):
    """The program on the test's database: exit code, and what it printed."""
    monkeypatch.setenv(PREFIX + "DATABASE", engine.url.render_as_string(hide_password=False))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["judge.ruler", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return run


def by(references):
    return {name: Reference(reward, {}) for name, reward in references.items()}


def said(group, scores, *, judge="j", hashed="h", section=0, at=0, asked=True, parts=None, cost=0.01, now=None):
    scored = {
        f"{group}{name}": ScoredTrajectory(score, (parts or {}).get(name, {}), place, name)
        for place, (name, score) in enumerate(scores.items())
    }
    return StoredJudgement("p", judge, RUBRIC, group, hashed, section, at, asked, 100, cost, scored)


def test_scores_are_compared_within_their_groups():
    judgements = [said("g", {"a": 0.1, "b": 0.9}), said("h", {"a": 0.6, "b": 0.5, "c": 0.4})]
    references = by({"ga": 0, "gb": 1, "ha": 0, "hb": 0.5, "hc": 1})
    (one,) = calibrations(judgements, references, [])
    assert (one.judged, one.groups, len(one.points)) == (2, 2, 5)
    assert one.whole.pairs == Pairs(alike=1, of=4, free=3)
    assert one.whole.taus == (1.0, -1.0)
    # Good from the median on, 0.5: 0.9, 0.5 and 0.4 against 0.1 and 0.6.
    assert (one.threshold, one.good, one.auc) == (0.5, 3, pytest.approx(4 / 6))
    (one,) = calibrations(judgements, references, [], threshold=1.0)
    assert (one.good, one.auc) == (2, pytest.approx((3 + 1) / 6))


def test_an_attempts_score_is_the_median_of_the_judges_judgements():
    judgements = [said("g", {"a": one, "b": 0.5}, at=at) for at, one in enumerate((0.1, 0.8, 0.9))]
    (one,) = calibrations(judgements, by({"ga": 0, "gb": 1}), [])
    assert one.points == ((0, 0.8), (1, 0.5))


def test_overlapping_sections_are_laid_over_one_another():
    judgements = [said("g", {"a": 0.2, "b": 0.4}), said("g", {"b": 0.1, "c": 0.3}, section=1)]
    (one,) = calibrations(judgements, by({"ga": 0, "gb": 1, "gc": 2}), [])
    assert one.whole.taus == (1.0,)


def test_sections_that_nothing_links_are_not_compared():
    judgements = [
        said("g", {"a": 0.2, "b": 0.4, "c": 0.6}),
        said("g", {"x": 0.1, "y": 0.3}, section=2),
        said("g", {"x": 0.1, "y": 0.3}, section=2),
    ]
    (one,) = calibrations(judgements, by({"ga": 0, "gb": 1, "gc": 2, "gx": 3, "gy": 4}), [])
    assert one.points == ((0, 0.2), (1, 0.4), (2, 0.6))


def test_of_a_group_that_was_judged_again_the_last_attempts_count():
    judgements = [said("g", {"a": 1.0, "b": 0.0}, at=1), said("g", {"a": 0.0, "b": 1.0}, hashed="i", at=2)]
    (one,) = calibrations(reversed(judgements), by({"ga": 0, "gb": 1}), [])
    assert one.whole.taus == (1.0,)


def test_groups_with_fewer_than_two_references_are_left_out():
    (one,) = calibrations([said("g", {"a": 0.1, "b": 0.9})], by({"ga": 0, "x": 1}), [])
    assert (one.judged, one.groups, one.points, one.auc) == (1, 0, (), None)


def test_attempts_alike_are_one_for_the_judge_and_two_for_the_reference():
    judgement = said("g", {"a": 0.1, "b": 0.9})
    twin = {"gc": ScoredTrajectory(0.1, {}, 0, "a")}
    judgement = StoredJudgement(
        *(getattr(judgement, name) for name in StoredJudgement.__slots__[:-1]), {**judgement.scores, **twin}
    )
    (one,) = calibrations([judgement], by({"ga": 0, "gb": 1, "gc": 0}), [])
    assert len(one.points) == 3
    assert [place for place, _ in one.placed] == [-0.5, 0.5]


def test_parts_are_compared_with_the_references_parts_or_else_its_reward():
    parts = {"a": {"right": 0.9, "brief": 0.1}, "b": {"right": 0.1, "brief": 0.9}}
    judgements = [said("g", {"a": 0.5, "b": 0.5}, parts=parts)]
    references = {"ga": Reference(0, {"right": 1}), "gb": Reference(1, {"right": 0})}
    (one,) = calibrations(judgements, references, [])
    assert {name: part.taus for name, part in one.parts.items()} == {"right": (1.0,), "brief": (1.0,)}


def test_answers_used_again_cost_nothing_and_are_no_second_opinion():
    judgements = [said("g", {"a": 0.1, "b": 0.9}, cost=0.02), said("h", {"a": 0.1, "b": 0.9}, asked=False)]
    (one,) = calibrations(judgements, by({"ga": 0, "gb": 1, "ha": 0, "hb": 1}), [])
    assert (one.groups, one.tokens_per_group, one.usd_per_group) == (2, 100, 0.02)
    assert len(one.placed) == 2


def test_an_unknown_price_is_not_nothing():
    (one,) = calibrations([said("g", {"a": 0.1, "b": 0.9}, cost=None)], {}, [])
    assert (one.tokens_per_group, one.usd_per_group) == (100, None)


def test_judges_are_told_apart_and_have_the_refusals_of_their_days():
    judgements = [said("g", {"a": 0.1, "b": 0.9}), said("g", {"a": 0.1, "b": 0.9}, judge="k")]
    days = [Day("p", day, "j", 10, 1, 0, 0, 0.0) for day in ("1", "2")] + [Day("q", "1", "k", 5, 5, 0, 0, 0.0)]
    both = calibrations(judgements, {}, days)
    assert [(one.judge, one.calls, one.refused) for one in both] == [("j", 20, 2), ("k", 0, 0)]


def test_the_last_word_of_an_app_counts_whether_it_was_in_time_or_not(bench):
    bench.judged("g", 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    bench.feedback("g0", 0.25, state="used")
    bench.feedback("g0", 0.75, after_s=60, state="unused")
    bench.feedback("g1", 1.0, withdrawn_at=bench.seed.now)
    bench.feedback("g2", 1.0, state="superseded")
    for turn, reward in enumerate((0.0, 1.0)):
        bench.feedback("c", reward, kind="completion", trajectory_id="g3", completion_id=f"g3-{turn}", source="thumbs")
    bench.feedback("g", kind="group", rewards={"g4": 0.5, "stranger": 1.0})
    bench.feedback("g", kind="group", rewards={"g5": 0.9}, source="judge")
    assert bench.rewards() == {"g0": 0.75, "g3": 0.5, "g4": 0.5}


def test_parts_of_feedback_are_kept_beside_its_reward(bench):
    bench.judged("g", 0.1, 0.2)
    bench.feedback("g0", 2.0, source="parts", parts={"right": 1})
    assert bench.references() == {"g0": Reference(2.0, {"right": 1})}


def test_feedback_on_what_nobody_judged_is_not_read(bench):
    bench.seed.group("h")
    bench.seed.trajectory("h0", "h")
    bench.feedback("h0", 1.0)
    bench.judged("g", 0.1, 0.2)
    assert bench.rewards() == {}


def test_judgements_are_read_by_policy_judge_and_time(bench):
    bench.judged("g", 0.1, 0.2)
    bench.judged("g", 0.1, 0.2, members=False, state="waiting", accepted_at=None)
    (one,) = bench.said(judge="local", policy="starter", since=bench.seed.now)
    assert (one.group_id, one.tokens, one.cost_usd, one.was_called) == ("g", 100, 0.01, True)
    assert one.scores["g1"] == ScoredTrajectory(0.2, {}, 1, "a1")
    scopes = ({"judge": "x"}, {"policy": "x"}, {"since": bench.seed.now + timedelta(days=1)})
    assert [bench.said(**scope) for scope in scopes] == [[], [], []]


def test_a_judge_that_agrees_is_trusted(bench, run, tmp_path):
    bench.many()
    code, printed = run("calibrate", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "judge local, policy starter, rubric rrrrrrrr: trust. It orders " in printed
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| Kendall's τ | 0." in report
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {f"starter-local-rrrrrrrr-{name}.png" for name in ("scores", "position", "tau")}
    assert all(name in report for name in pictures)


@pytest.mark.parametrize(("agree", "word"), [(0.5, "within noise"), (0.0, "do not trust it"), (0.8, "trust")])
def test_what_agreement_means_is_said_in_a_word(bench, agree, word):
    bench.many(agree=agree)
    (one,) = calibrations(bench.said(), bench.references(), [])
    assert told.verdicts(one)[0].split(": ")[1].startswith(word)


def test_fewer_than_twenty_pairs_are_no_number(bench, run):
    bench.many(groups=6)
    code, printed = run("calibrate")
    assert code == 0
    assert "too few. 18 pairs of attempts can be compared" in printed
    row = next(line for line in printed.splitlines() if "pairs ordered as" in line)
    assert "too few" in row
    assert "%" not in row


def test_a_judge_that_favours_a_place_or_differs_from_itself_is_said_to(bench):
    rng = random.Random(0)
    for one in range(30):
        for again in range(3):
            positions = rng.sample(range(4), 4)
            bench.judged(
                f"g{one:02d}", *(0.5 + 0.1 * place for place in positions), positions=positions, members=not again
            )
    (one,) = calibrations(bench.said(), {}, [])
    favours, differs = told.verdicts(one)[1:]
    assert favours.startswith("It favours what it is shown last, by 0.30.")
    assert differs.startswith("Two of its judgements differ by 0.1")


def test_calibrations_and_reports_are_json_too(bench, run):
    bench.many(groups=6)
    code, printed = run("calibrate", "--json")
    shown = json.loads(printed)
    assert (code, shown["against"], shown["calibrations"][0]["whole"]["pairs"]["of"]) == (0, "feedback", 18)
    assert len(shown["verdicts"]) >= 1
    code, printed = run("report", "--json")
    assert (code, set(json.loads(printed))) == (0, {"days", "waiting", "ranked", "drift", "alarms"})


def test_without_judgements_the_program_says_how_to_get_them(seed, run):
    code, printed = run("calibrate")
    assert code == 1
    assert "no judgement is stored; name judges in [learning.<policy>.ruler]" in printed
    assert "no judgement by 'x' is stored" in run("calibrate", "--judge", "x")[1]


def test_without_references_the_program_says_how_to_get_them(bench, run):
    bench.judged("g", 0.1, 0.2)
    bench.feedback("g0", 1.0)
    code, printed = run("calibrate")
    assert code == 1
    assert "1 groups were judged, and of none two attempts have a reward from feedback" in printed
    assert run("calibrate", "--policy", "x") == (2, "whetstone: no policy is named 'x'; there are: starter\n")


def test_judges_are_compared_with_reward_functions(bench, run):
    bench.seed.group("g")
    for place, parts in enumerate(({"json": 0.0}, {"json": 1.0, "length.tokens": 9}, None)):
        bench.seed.trajectory(f"g{place}", "g", code_parts=parts)
    bench.judged("g", 0.1, 0.2, 0.3, members=False)
    code, printed = run("calibrate", "--against", "code:json")
    assert (code, "1 pairs" in printed) == (0, True)
    code, printed = run("calibrate", "--against", "code:jsn")
    assert (code, printed) == (1, "whetstone: no reward function gave 'jsn'; there are: json, length.tokens\n")


def test_judges_are_compared_with_a_file(bench, run, tmp_path):
    bench.judged("g", 0.1, 0.2)
    (tmp_path / "people.jsonl").write_text(
        '{"trajectory_id": "g0", "reward": 0}\n{"trajectory_id": "g1", "reward": 1}\n'
    )
    assert run("calibrate", "--against", "people.jsonl")[0] == 0
    code, printed = run("calibrate", "--against", "nobody.jsonl")
    assert (code, "nobody.jsonl cannot be read" in printed) == (1, True)


def test_a_file_is_json_lines_or_csv(tmp_path):
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text(
        '{"trajectory_id": "a", "reward": 1, "parts": {"right": 0.5}}\n\n{"trajectory_id": "b", "reward": 0}\n'
    )
    table.write_text("trajectory_id,reward,parts.right,who\na,1,0.5,me\nb,0,,you\n")
    assert from_file(lines) == from_file(table) == {"a": Reference(1, {"right": 0.5}), "b": Reference(0, {})}


@pytest.mark.parametrize(
    "line",
    ["x", "[]", "{}", '{"trajectory_id": 1, "reward": 1}', '{"trajectory_id": "a", "reward": "b"}',
     '{"trajectory_id": "a", "reward": NaN}', '{"trajectory_id": "a", "reward": 1, "parts": [1]}'],
)  # fmt: skip
def test_a_line_that_is_no_reference_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"trajectory_id": "a", "reward": 1}}\n{line}\n')
    with pytest.raises(NoReferences, match="line 2"):
        from_file(path)


def test_a_report_of_nothing_says_so(seed, run):
    code, printed = run("report", "--fail-on-alarm")
    assert code == 0
    assert "groups that wait for judges: none" in printed
    assert "No alarm." in printed


def test_an_alarm_fails_the_report_where_that_is_asked_for(bench, run, engine):
    rng = random.Random(0)
    for one in range(20):
        for purpose, judge in (("reward", "local"), ("drift", "strong")):
            scores = rng.sample([0.1, 0.5, 0.9], 3)
            bench.judged(f"g{one:02d}", *scores, judge=judge, purpose=purpose, members=judge == "local")
    days = str((datetime.now(UTC) - bench.seed.now).days + 2)
    code, printed = run("report", "--days", days)
    assert (code, "ALARM drift (starter)" in printed) == (0, True)
    assert run("report", "--days", days, "--fail-on-alarm")[0] == 2
