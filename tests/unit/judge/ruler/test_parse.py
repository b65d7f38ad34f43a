"""What a judge may answer, and every way of getting it wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.ruler.parse import EXPLANATION_CHARS, AttemptScore, NotAnswered, read

IDS = ("abc234", "def567", "ghj892")
WEIGHTS = {"correct": 3.0, "brief": 1.0}
GOOD = [{"id": name, "explanation": "so", "score": score} for name, score in zip(IDS, (0.0, 0.25, 1.0), strict=True)]


def said(*items):
    return json.dumps({"scores": items})


def item(name=IDS[0], **fields):
    return {"id": name, "explanation": "so", "score": 0.5} | fields


def raw(score):
    """A good answer with this, as it stands, for the first score."""
    return said(*GOOD).replace("0.0", score, 1)


@pytest.mark.parametrize(
    "text",
    [
        said(*GOOD),
        f"\r\n\t {said(*GOOD)}\n",
        f"```json\n{said(*GOOD)}\n```",
        f" \n```json\r\n{said(*GOOD)}```\n ",
        json.dumps({"scores": GOOD}, indent=2),
        json.dumps({"thoughts": "…", "scores": [one | {"rank": 1} for one in GOOD]}),
    ],
)
def test_an_answer_is_one_object_alone_or_in_a_fence(text):
    assert read(text, IDS, {}) == [AttemptScore(one["score"], "so", None) for one in GOOD]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing else"),
        ("Sure! Here it is", "nothing else"),
        (f"Here it is:\n{said(*GOOD)}", "nothing else"),
        (f"{said(*GOOD)}\nI hope this helps.", "nothing else"),
        (said(*GOOD) * 2, "nothing else"),
        (f"```\n{said(*GOOD)}\n```", "nothing else"),
        (f"```json\n{said(*GOOD)}\n``` as asked", "nothing else"),
        (f"```json\n{said(*GOOD)}", "nothing else"),
        (f"```json\n{said(*GOOD)}\n```\n```json\n{said(*GOOD)}\n```", "nothing else"),
        (f"\ufeff{said(*GOOD)}", "nothing else"),
        (f"\xa0{said(*GOOD)}", "nothing else"),
        (said(*GOOD)[:-1], "nothing else"),
        (said(*GOOD).replace('"', "'"), "nothing else"),
        (raw("9" * 5000), "nothing else"),
        (raw("0.5.5"), "nothing else"),
        (raw(".5"), "nothing else"),
        ("[" * 100_000, "nested"),
        ('{"scores": ' + "[" * 100_000, "nested"),
        ("null", "no object"),
        ("0.5", "no object"),
        (json.dumps(GOOD), "no object"),
        ("{}", "no object"),
        ('{"scores": null}', "no object"),
        (json.dumps({"scores": {one["id"]: one["score"] for one in GOOD}}), "no object"),
        (json.dumps({"Scores": GOOD}), "no object"),
        (f'{{"scores": [], "scores": {json.dumps(GOOD)}}}', "'scores' more than once"),
        (said(*GOOD).replace('"score": 0.0', '"score": 0.0, "score": 1.0'), "'score' more than once"),
        (said(*GOOD).replace('"id": "abc', '"id": "def567", "id": "abc'), "'id' more than once"),
        (said(*GOOD, "end"), "is no object"),
        (said(*GOOD, None), "is no object"),
        (said([IDS[0], 0.5]), "is no object"),
        (said({"explanation": "so", "score": 0.5}), 'no "id"'),
        (said(item(1)), 'no "id"'),
        (said(item(None)), 'no "id"'),
        (said(item("other")), "no attempt 'other'"),
        (said(item("ABC234")), "no attempt 'ABC234'"),
        (said(item(" abc234")), "no attempt ' abc234'"),
        (said(item("x" * 10_000)), "no attempt"),
        (said(item("\ud800\x00")), "no attempt"),
        (said(), "no score for abc234, def567, ghj892"),
        (said(*GOOD[1:]), "no score for abc234"),
        (said(*GOOD, GOOD[0]), "more than one score for abc234"),
        (said(*GOOD[:2], GOOD[1] | {"score": 0.9}), "more than one score for def567"),
        (said({"id": IDS[0], "score": 0.5}), "abc234 has no explanation"),
        (said(item(explanation=None)), "no explanation"),
        (said(item(explanation=["so"])), "no explanation"),
        (said({"id": IDS[0], "explanation": "so"}), "abc234 has no score"),
        (said(item(score=True)), "no number"),
        (said(item(score=None)), "no number"),
        (said(item(score="0.5")), "no number"),
        (said(item(score="high")), "no number"),
        (said(item(score=[0.5])), "no number"),
        (said(item(score={"value": 0.5})), "no number"),
        (raw("NaN"), "NaN is no number"),
        (raw("Infinity"), "Infinity is no number"),
        (raw("-Infinity"), "Infinity is no number"),
        (raw("1e999"), "not from 0 to 1"),
        (raw("1" + "0" * 400), "not from 0 to 1"),
        (raw("1.0000000000000002"), "not from 0 to 1"),
        (raw("-1e-300"), "not from 0 to 1"),
        (raw("7"), "abc234: score is 7, which is not from 0 to 1"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_a_short_reason_that_names_it(text, why):
    with pytest.raises(NotAnswered) as error:
        read(text, IDS, {})
    assert why in str(error.value)
    assert len(str(error.value)) < 200
    str(error.value).encode()


def in_parts(**parts):
    return said(*({"id": name, "explanation": "so", "parts": {"correct": 1.0, "brief": 0.5} | parts} for name in IDS))


def test_parts_are_weighed():
    assert read(in_parts(), IDS, WEIGHTS)[0] == AttemptScore(
        (3 * 1.0 + 1 * 0.5) / 4, "so", {"correct": 1.0, "brief": 0.5}
    )


def test_all_parts_right_are_exactly_one():
    weights = {f"p{n}": 0.1 for n in range(7)}
    answer = said({"id": "a", "explanation": "", "parts": dict.fromkeys(weights, 1)})
    assert read(answer, ["a"], weights)[0].score == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (said(*GOOD), "abc234 has no parts"),
        (said(item(parts=[1.0, 0.5])), "has no parts"),
        (said(item(parts={"correct": 1.0})), "abc234 has no brief"),
        (in_parts(polite=1.0), "a part 'polite', which was not asked for"),
        (in_parts(brief=1.5), "abc234: brief is 1.5"),
        (in_parts(brief=True), "brief is no number"),
        (in_parts(brief=None), "brief is no number"),
        (in_parts().replace('"brief": 0.5', '"brief": 0.5, "brief": 0.6', 1), "'brief' more than once"),
    ],
)
def test_parts_are_all_that_were_asked_for_and_no_other(text, why):
    with pytest.raises(NotAnswered, match=why):
        read(text, IDS, WEIGHTS)


def test_a_score_beside_parts_counts_nothing():
    answer = json.loads(in_parts())
    answer["scores"][0]["score"] = 7
    assert read(json.dumps(answer), IDS, WEIGHTS) == read(in_parts(), IDS, WEIGHTS)


def test_an_explanation_is_what_a_database_can_hold():
    answer = said(item(explanation="a\x00b\ud800" + "c" * 5000))
    kept = read(answer, IDS[:1], {})[0].explanation
    assert kept.startswith("a\ufffdb?c")
    assert len(kept) == EXPLANATION_CHARS


scores = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(scores, st.randoms(use_true_random=False))
def test_scores_land_on_their_ids_in_whatever_order_they_come(scores, random):
    ids = [f"id{n}" for n in range(len(scores))]
    items = [item(name, score=score) for name, score in zip(ids, scores, strict=True)]
    random.shuffle(items)
    assert [one.score for one in read(said(*items), ids, {})] == scores


def _drop(items, at, _):
    del items[at]


def _twice(items, at, other):
    items.insert(other, dict(items[at]))


def _renamed(items, at, _):
    items[at]["id"] += "x"


def _of_another(items, at, other):
    items[at]["id"] = items[other - 1 if other == at else other]["id"] if len(items) > 1 else "x"


def _too_much(items, at, other):
    items[at]["score"] = 1.5 + other


def _too_little(items, at, _):
    items[at]["score"] = -0.5


def _as_text(items, at, _):
    items[at]["score"] = str(items[at]["score"])


@given(
    scores,
    st.sampled_from([_drop, _twice, _renamed, _of_another, _too_much, _too_little, _as_text]),
    st.data(),
)
def test_no_change_to_a_right_answer_goes_unnoticed(scores, change, data):
    ids = [f"id{n}" for n in range(len(scores))]
    items = [item(name, score=score) for name, score in zip(ids, scores, strict=True)]
    places = st.integers(0, len(items) - 1)
    change(items, data.draw(places), data.draw(places))
    with pytest.raises(NotAnswered):
        read(said(*items), ids, {})
