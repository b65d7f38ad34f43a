"""What pages are made of beside conversations: differences, colours of tokens, the funnel, the search's fields."""

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from proxy.dashboard import vocabulary
from proxy.dashboard.pages.trajectories import around, read_criteria
from proxy.dashboard.queries.newest import Place, read_place
from proxy.dashboard.views import funnel
from proxy.dashboard.views.funnel import STAGES, DropOut
from proxy.dashboard.views.text_diff import MOST_PIECES, Comparer, Run
from proxy.dashboard.views.turn_view import MOST_ALONE, level, look_of, tinted
from tests.unit.proxy.ui_scene import ids_of
from whetstone.config.settings import STARTER
from whetstone.domain.why_not_trained import WhyNotTrained

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_words_that_differ_stand_beside_each_other() -> None:
    compared = Comparer("It arrives at 12:15 sharp.")("It arrives at 12:05 sharp.")
    assert compared is not None and compared.by == "words" and not compared.alike
    assert compared.runs == (
        Run("same", "It arrives at"),
        Run("missing", " 12:15"),
        Run("own", " 12:05"),
        Run("same", " sharp."),
    )


@pytest.mark.parametrize(
    ("best", "other"), [("a b", "b c"), ("", "x"), ("x", ""), ("one\ntwo", "one\n\ntwo "), ("é 漢", "漢")]
)
def test_what_is_shown_is_all_of_both(best: str, other: str) -> None:
    compared = Comparer(best)(other)
    assert compared is not None
    assert "".join(run.text for run in compared.runs if run.kind != "missing") == other
    assert "".join(run.text for run in compared.runs if run.kind != "own") == best or best.split() == other.split()


def test_equal_answers_are_alike() -> None:
    compared = Comparer("x y")("x y")
    assert compared is not None and compared.alike


def test_long_texts_are_compared_by_lines_and_very_long_ones_not_at_all() -> None:
    lines = [f"line {number} " + "word " * 20 for number in range(100)]
    compared = Comparer("\n".join(lines))("\n".join([*lines[:50], "another", *lines[50:]]))
    assert compared is not None and compared.by == "lines"
    assert [run.text for run in compared.runs if run.kind == "own"] == ["another\n"]
    assert Comparer("x\n" * (MOST_PIECES + 1))("y\n" * (MOST_PIECES + 1)) is None


def test_what_takes_too_long_is_left() -> None:
    compare = Comparer("a b c", most_s=0.0)
    assert compare("a b d") is None
    assert compare("a b c") is not None, "equal texts cost nothing"


@pytest.mark.parametrize(
    ("logprob", "expected"), [(0.0, 0), (-0.1, 0), (-0.6, 1), (-1.5, 2), (-2.9, 3), (-3.1, 4), (-100.0, 4), (0.01, 0)]
)
def test_surprising_tokens_are_louder(logprob: float, expected: int) -> None:
    assert level(logprob) == expected


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(None, ""), (0.0, ""), (0.01, ""), (0.1, "up1"), (0.7, "up2"), (3.0, "up3"), (-0.1, "down1"), (-2.0, "down3")],
)
def test_an_advantage_has_a_side_and_a_strength(advantage: float | None, expected: str) -> None:
    assert look_of(advantage) == expected


def test_tokens_have_their_text_colour_and_figure() -> None:
    tokens = tinted(["a", "b"], [1, 2], [-0.01, -4.0], "logprob")
    assert [(one.text, one.look) for one in tokens] == [("a", ""), ("b", "lp4")]
    assert "token 2" in tokens[1].tip and "−" not in tokens[1].tip and "-4.000" in tokens[1].tip
    assert {one.look for one in tinted(["a", "b"], [1, 2], None, "advantage", 1.2)} == {"up3"}
    assert [one.look for one in tinted(["a", "b"], [1, 2], None, "logprob")] == ["", ""]
    assert [one.text for one in tinted(None, [1, 2], [-1.0, -1.0], "logprob")] == ["", ""]


def test_of_very_long_answers_neighbours_of_one_colour_are_put_together() -> None:
    count = MOST_ALONE + 100
    texts = [str(place % 10) for place in range(count)]
    tokens = tinted(texts, range(count), [-4.0 if place % 100 == 0 else -0.01 for place in range(count)], "logprob")
    assert len(tokens) < 40
    assert "".join(one.text for one in tokens) == "".join(texts)


TEXT = "It arrives at 12:15, é 漢 😀\n"
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def made_of_words(folder: Path, decoder: object) -> Tokenizer:
    """A tokenizer as SentencePiece's models have it: pieces with ▁ for a space, bytes for what has none."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁It",
        "▁arrives",
        "▁at",
        "▁",
        "1",
        "2",
        ":",
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={one: place for place, one in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoder  # type: ignore[assignment]
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_the_models_own_vocabulary_spells_ids() -> None:
    ids = ids_of(TEXT)
    texts = vocabulary.texts(str(STARTER), ids)
    assert texts is not None and len(texts) == len(ids)
    assert "".join(texts) == TEXT


def test_every_id_of_the_starter_is_spelled_as_its_tokenizer_does() -> None:
    tokenizer = Tokenizer.from_file(str(STARTER / "tokenizer.json"))
    drawn = random.Random(1)
    assert vocabulary.texts(str(STARTER), range(tokenizer.get_vocab_size())) is not None
    for _ in range(200):
        ids = [drawn.randrange(tokenizer.get_vocab_size()) for _ in range(30)]
        texts = vocabulary.texts(str(STARTER), ids)
        # Bytes that are no letter yet at its end are told by the library at once.
        assert texts is not None
        assert tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd") == "".join(texts).rstrip("\ufffd")


@pytest.mark.parametrize("decoder", [SENTENCEPIECE, decoders.Metaspace()], ids=["bytes", "metaspace"])
def test_pieces_of_sentencepiece_are_spelled_too(tmp_path: Path, decoder: object) -> None:
    tokenizer = made_of_words(tmp_path, decoder)
    names = ["▁It", "▁arrives", "▁at", "▁", "1", "2", ":", "<0xE6>", "<0xBC>", "<0xA2>", "</s>"]
    ids = [tokenizer.token_to_id(name) for name in names]
    texts = vocabulary.texts(str(tmp_path), ids)
    assert texts == [" It", " arrives", " at", " ", "1", "2", ":", "", "", "漢", "</s>"]


def test_a_vocabulary_with_scores_is_a_list(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁It", -1.0), ("s", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary.texts(str(tmp_path), [1, 2]) == [" It", "s"]


@pytest.mark.parametrize("path", ["/no/such/model", "no-such-org/no-such-model", ""])
def test_without_a_vocabulary_nothing_is_guessed(path: str) -> None:
    assert vocabulary.texts(path, [1, 2]) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}']
)
def test_a_file_that_cannot_be_read_leaves_all_unspelled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert vocabulary.texts(str(tmp_path), [0]) is None


def test_an_id_that_the_vocabulary_does_not_know_leaves_all_unspelled() -> None:
    assert vocabulary.texts(str(STARTER), [5, 999_999]) is None


def test_each_reason_has_a_stage_and_a_remedy() -> None:
    names = [stage for stage, _ in STAGES]
    for reason in WhyNotTrained:
        (stage,) = [one for one in funnel.funnel([("rewarded", reason.value, 3)]) if one.drop_outs]
        assert stage.stage in names[1:]
        assert stage.drop_outs[0].meaning == reason.meaning
        assert stage.drop_outs[0].remedy == funnel.remedy_of(reason.value) != ""
        assert [one.trajectories for one in stage.drop_outs] == [3]


def test_a_trajectory_falls_out_once_at_the_first_thing_it_lacks() -> None:
    stages = {
        one.stage: one
        for one in funnel.funnel(
            [
                ("trained", None, 5),
                ("claimed", None, 2),
                ("rewarded", "waiting_step", 3),
                ("excluded", "group_uniform", 4),
                ("rewarded", "group_open", 6),
                ("ended", "no_reward", 7),
                ("open", "no_reward", 1),
                ("open", None, 1),
                ("open", "greedy", 8),
                ("rewarded", "greedy", 1),
                ("excluded", "sampling_bent", 2),
                ("excluded", "of_tomorrow", 1),
            ]
        )
    }
    assert [stages[name].trajectories for name, _ in STAGES] == [41, 29, 27, 20, 14, 10, 5]
    assert [(one.reason, one.trajectories) for one in stages["usable"].drop_outs] == [
        ("greedy", 9),
        ("sampling_bent", 2),
        ("of_tomorrow", 1),
    ]
    assert [(one.reason, one.waits) for one in stages["trained"].drop_outs] == [
        ("waiting_step", True),
        ("claimed", True),
    ]
    assert stages["ended"].drop_outs == (
        DropOut(
            "open", "It has not ended yet.", "It ends by feedback, by an explicit end, or after it is idle.", True, 2
        ),
    )


def test_nothing_recorded_is_an_empty_funnel() -> None:
    assert {one.trajectories for one in funnel.funnel([])} == {0}


@pytest.mark.parametrize("place", [Place(NOON, "t-1"), Place(NOON.replace(microsecond=123_456), "a~b"), Place(NOON)])
def test_a_place_goes_through_a_url(place: Place) -> None:
    assert read_place(str(place)) == place


@pytest.mark.parametrize("text", [None, "", "x", "~", "99999999999999999999~a", "-1e9~a", "1.5~a"])
def test_a_place_that_is_none_is_none(text: str | None) -> None:
    assert read_place(text) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "x"),
        ("version", "-1"),
        ("version", str(2**31)),
        ("metadata", "customer"),
        ("metadata", '"=1'),
        ("metadata", "=1"),
        ("from", "much"),
        ("to", "nan"),
        ("since", "yesterday"),
        ("until", "31.1.2026"),
        ("text", "ab"),
    ],
)
def test_a_field_that_cannot_be_read_says_what_would_be_right(field: str, value: str) -> None:
    _, wrong = read_criteria({field: value})
    assert list(wrong) == [field] and wrong[field]


def test_fields_are_read_as_people_write_them() -> None:
    wanted, wrong = read_criteria(
        {"version": "v3", "metadata": " customer = 42 ", "from": "0,5", "since": "2026-01-31"}
        | {"until": "2026-01-31T12:00+01:00"}
    )
    assert not wrong
    assert (wanted["version"], wanted["metadata"], wanted["from"]) == (3, ("customer", "42"), 0.5)
    assert wanted["since"] == datetime(2026, 1, 31, tzinfo=UTC)
    assert wanted["until"].utcoffset() is not None


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("It arrives at 12:15.", "ARRIVES", ("It ", "arrives", " at 12:15.")),
        ("x" * 200 + " found it " + "y" * 200, "found", ("…" + "x" * 89 + " ", "found", " it " + "y" * 86 + "…")),
        ("no", "words", ("no", "", "")),
        ("found", "found", ("", "found", "")),
    ],
)
def test_what_was_found_is_shown_with_what_stands_around_it(
    text: str, words: str, expected: tuple[str, str, str]
) -> None:
    assert around(text, words) == expected
