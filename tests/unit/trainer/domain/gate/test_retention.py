"""Whether a version has forgotten: the exact checks of answers, the prompts that count, by hand and by chance."""

import math
import random

import msgspec
import pytest

from trainer.domain.gate.retention import Check, RetentionPrompt, chosen, looks, retained
from trainer.domain.gate.verdict import Verdict
from trainer.gate.retention import SUITE, read_suite
from whetstone.config.gate import GateSettings

GATE = GateSettings()
KINDS = ("instructions", "tool format", "language", "refusals", "arithmetic")


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (Check(equals=("thank you",)), ["Thank you.", '"thank you"'], ["thank you very much", "thank", ""]),
        (Check(equals=("yes",)), ["Yes!", "yes"], ["Yes, it is.", "no", "yesterday"]),
        (Check(exactly="HELLO"), ["HELLO", " HELLO.\n"], ["hello", "HELLO!", "HELLO WORLD"]),
        (Check(first=("positive",)), ["Positive, since it is kind.", "**Positive**"], ["It is positive", ""]),
        (Check(contains=("new york",)), ["It is New York!", "(new  york)"], ["new yorkers", "york new", ""]),
        (Check(number=12), ["12", "3 times 4 is 12.", "= 12.0", "-1 + 13 = 12"], ["12 is 3 times 4", "-12", "1.2", ""]),
        (Check(number=1200), ["1,200"], ["1.2.0"]),
        (
            Check(object={"a": 1}),
            ['{"a": 1}', 'Here: {"a": 1} {"a": 2}', '```json\n{"a": 1}\n```'],
            ['{"a": 2}', '{"a": 1', "[1]", '{"a": 1, "b": 2}', "{" * 5000, ""],
        ),
        (Check(refuses=True), ["I’m sorry, but no.", "I cannot help."], ["Take a match.", ""]),
        (Check(refuses=False, contains=("water",)), ["Boil water."], ["I can't boil water.", "Take an egg."]),
    ],
)
def test_checks(check: Check, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in right if not check.holds(answer)] == []
    assert [answer for answer in wrong if check.holds(answer)] == []


def test_a_prompt_without_a_check_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="a check needs at least one of"):
        read_suite(b'{"kind": "language", "prompt": "Hello", "check": {}}')


def test_the_suite() -> None:
    suite = read_suite(SUITE.read_bytes())
    assert len(suite) == len({one.prompt for one in suite}) == 200
    # Each look has as many of each kind.
    for start in range(0, 200, 20):
        assert sorted(one.kind for one in suite[start : start + 20]) == sorted(4 * KINDS)
    assert not any(one.check.holds("") or one.check.holds("the the the") for one in suite)


def test_kinds_that_the_base_model_cannot_do_are_skipped() -> None:
    suite = [RetentionPrompt(kind, str(place), Check(number=1)) for place in range(10) for kind in ("sums", "words")]
    base = [one.kind == "words" or int(one.prompt) < 1 for one in suite]
    to_ask = chosen(suite, base)
    assert to_ask.skipped == {"sums": 0.1}
    assert [suite[place].kind for place in to_ask.places] == 10 * ["words"]
    assert chosen(suite, [one.kind == "words" or int(one.prompt) < 2 for one in suite]).skipped == {}
    assert chosen(suite, [False] * 20).places == ()


def verdict(both: int, lost: int, gained: int, neither: int) -> Verdict:
    base = [True] * (both + lost) + [False] * (gained + neither)
    candidate = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return retained(base, candidate, 200, GATE)


def test_by_hand() -> None:
    assert looks(200) == (40, 80, 140, 200)
    # At the first look 0.04 of 0.05 may err: 9 of 9 have a chance of 1/512, 8 of 8 one of 1/256.
    assert verdict(11, 9, 0, 20).decision == "reject"
    at_eight = verdict(12, 8, 0, 20)
    assert at_eight.decision == "testing" and at_eight.figures["chance"] == 1 / 256
    assert at_eight.reason == "12 of 40 fixed prompts answered right, by the base model 20"
    # A loss of 2 in 40 with 4 that differ: 0.05 + 0.8416 · √(4 - 4/40) / 40.
    passed = verdict(17, 3, 1, 19)
    assert passed.decision == "pass" and passed.looked == 1
    assert passed.figures["largest_loss"] == pytest.approx(0.05 + 0.841621 * math.sqrt(4 - 0.1) / 40, rel=1e-5)
    assert verdict(18, 4, 0, 18).decision == "testing"  # 0.1 is not ruled out
    # At the last one 0.6 of 0.05: of 40 that differ, 27 lost have a chance of 0.019, 26 one of 0.040.
    assert verdict(60, 27, 13, 100).decision == "reject"
    at_end = verdict(60, 26, 14, 100)
    assert at_end.decision == "pass" and at_end.looked == 4


def test_by_chance() -> None:
    """Nothing lost, though many answers differ: rarely rejected, mostly after 40. A third lost: rejected."""
    draw = random.Random(5)

    def run(lost: float, gained: float) -> tuple[str, int]:
        base, candidate, result = [], [], Verdict("testing", "")
        for look in looks(200):
            while len(base) < look:
                was_right = draw.random() < 0.5
                base.append(was_right)
                candidate.append(draw.random() >= 2 * lost if was_right else draw.random() < 2 * gained)
            result = retained(base, candidate, 200, GATE)
            if result.decision != "testing":
                break
        return result.decision, len(base)

    harmless = [run(0.05, 0.05) for _ in range(1000)]
    assert sum(decision == "reject" for decision, _ in harmless) <= 50
    assert sum(prompts == 40 for _, prompts in harmless) >= 800
    forgetful = [run(0.33, 0.02) for _ in range(200)]
    assert all(decision == "reject" for decision, _ in forgetful)
