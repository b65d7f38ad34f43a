"""The boards, the words and the app of examples/codenames, the app against scripted players; the novice's turns."""

import random
import sys
from argparse import Namespace
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.examples.conftest import FakeOpenAI, foreign_imports, run
from whetstone.config.settings import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "codenames"
APP = FOLDER / "app.py"
sys.path[:0] = [str(EXAMPLES), str(FOLDER), str(EXAMPLES / "novice")]

import cards  # noqa: E402
import codenames  # noqa: E402
import episodes  # noqa: E402
import prepare  # noqa: E402

SMALL, FULL = cards.FORMS["small"], cards.FORMS["full"]
TASKS = 400
CLIENT = AsyncOpenAI(api_key="none")
CATEGORY = {word: category for category, words in cards.GROUPS.items() for word in words}


def game(task: int = 0, split: str = "train", seed: int = 0, form: cards.Form = SMALL) -> cards.Game:
    """Return a game as the app starts it for the first attempt at a task."""
    args = Namespace(split=split, seed=seed, attempts=1)
    return cards.Game(form, split, episodes.Attempt(args, CLIENT, "run", task).rng)


def board(form: cards.Form = SMALL, **kinds: str) -> cards.Game:
    """Return a game on a board of these words, separated by spaces, in this order."""
    game_ = game(form=form)
    key: dict[str, Any] = {word: kind for kind, words in kinds.items() for word in words.split()}
    game_.key = key
    game_.others = kinds["theirs"].split()
    return game_


def pairs() -> cards.Game:
    return board(theirs="car ship", ours="dog cow", neutral="bed", assassin="desk")


def of(key: cards.Key, kind: str) -> list[str]:
    return [word for word in key if key[word] == kind]


def test_a_small_board_has_three_pairs_of_which_one_is_ours_and_one_theirs() -> None:
    sizes = {"ours": 2, "theirs": 2, "neutral": 1, "assassin": 1}
    for task in range(TASKS):
        key = game(task).key
        assert Counter(key.values()) == sizes
        assert set(Counter(CATEGORY[word] for word in key).values()) == {2}
        for pair in (of(key, "ours"), of(key, "theirs"), of(key, "neutral") + of(key, "assassin")):
            assert len({CATEGORY[word] for word in pair}) == 1


def test_the_order_of_a_board_says_nothing() -> None:
    places = Counter(list(game(task).key.values()).index("assassin") for task in range(1200))
    assert set(places) == set(range(6)) and min(places.values()) > 150


def test_no_six_words_are_in_both_splits_and_each_has_all_pairs() -> None:
    sets = {split: {frozenset(game(task, split).key) for task in range(2000)} for split in ("train", "eval")}
    assert {split: len(each) for split, each in sets.items()} == {"train": 180, "eval": 36}
    assert not sets["train"] & sets["eval"]
    two = {frozenset(pair) for words in cards.GROUPS.values() for pair in combinations(words, 2)}
    for each in sets.values():
        assert all(any(pair <= words for words in each) for pair in two)


def test_the_words_of_the_full_board_are_of_one_split() -> None:
    words = {split: {w for t in range(100) for w in game(t, split, form=FULL).key} for split in ("train", "eval")}
    assert not words["train"] & words["eval"]
    assert words["train"] | words["eval"] == set(cards.RELATIONS) and len(words["eval"]) > 60
    assert Counter(game(form=FULL).key.values()) == {"ours": 9, "theirs": 8, "neutral": 7, "assassin": 1}


def test_a_seed_gives_the_same_boards_and_those_of_eval_are_the_same_for_any() -> None:
    first, again, other = ([game(task, seed=seed).key for task in range(50)] for seed in (0, 0, 1))
    assert first == again != other
    assert list(game(7, "eval").key.items()) == list(game(7, "eval", seed=1).key.items())


def test_what_each_role_sees() -> None:
    game_ = pairs()
    assert SMALL.systems() == ("Give a clue: animal furniture vehicle", "Pick two words for the clue.")
    assert game_.for_spymaster() == "theirs: car ship\nneutral: bed\nassassin: desk\nours: dog cow"
    assert game_.for_operative(cards.Clue("animal", 2)) == "car ship dog cow bed desk\nclue: animal"


@pytest.mark.parametrize(
    ("clue", "picks", "margin", "spymaster", "operative"),
    [
        ("animal", "dog cow", 1.0, 1.0, 1.0),
        ("animal", "cow", 0.5, 0.75, 0.75),
        ("animal", "dog bed", 0.5, 0.75, 0.25),  # one related to the clue, and one not: 0
        ("animal", "dog car", 0.0, 0.5, 0.0),
        ("animal", "bed dog", 0.0, 0.5, 0.0),
        ("animal", "car dog", -0.5, 0.25, -0.25),
        ("animal", "dog desk", -1.0, 0.0, -0.5),
        ("vehicle", "car ship", -0.5, -0.5, 0.25),  # the reader of WordNet picks car: -1, for two words
        ("furniture", "bed desk", 0.0, 0.0, 0.5),  # and here the neutral bed, which ends the turn
        ("furniture", "desk bed", -1.0, -0.5, 0.0),
    ],
)
def test_what_a_small_game_is_worth(clue: str, picks: str, margin: float, spymaster: float, operative: float) -> None:
    game_ = pairs()
    game_.pick(game_.clue(clue), picks)
    assert game_.over and game_.margin == margin
    assert game_.rewards(0) == {"spymaster": margin, "operative": margin}
    assert game_.rewards(0.5) == {"spymaster": spymaster, "operative": operative}
    assert game_.won == (picks == "dog cow")


@pytest.mark.parametrize("answer", ["", "plant", "animal food", "dog"])
def test_an_invalid_clue_costs_the_spymaster_all_and_the_operative_plays_a_printed_one(answer: str) -> None:
    game_, again = pairs(), pairs()
    clue = game_.clue(answer)
    assert clue.word in SMALL.clues and clue == again.clue(answer)
    game_.pick(clue, "dog cow")
    assert game_.rewards(0.5)["spymaster"] == -1.0 and game_.rewards(0)["operative"] == 1.0


@pytest.mark.parametrize(("answer", "covered"), [("", 0), ("horse dog", 0), ("dog dog", 1), ("dog horse", 1)])
def test_an_invalid_pick_costs_the_operative_all(answer: str, covered: int) -> None:
    game_ = pairs()
    game_.pick(game_.clue("animal"), answer)
    assert len(game_.covered) == covered and game_.rewards(0.5)["operative"] == -1.0
    assert game_.rewards(0)["spymaster"] == covered / 2


FOUR = cards.Form(ours=3, theirs=3, neutral=1, turns=9, clues=(), dictionary=0.0, max_tokens=64)


def four() -> cards.Game:
    return board(FOUR, ours="dog cow milk", theirs="car ship gun", neutral="bed", assassin="desk")


def test_after_each_turn_the_other_team_covers_a_word_until_all_of_ours_are() -> None:
    game_ = four()
    clue = game_.clue("Milk comes from it.\nFarm 2")
    assert clue == cards.Clue("farm", 2)
    assert game_.for_operative(clue) == "dog cow milk car ship gun bed desk\nclue: farm 2"
    game_.pick(clue, "I think:\ncow, dog, bed")
    assert game_.covered == ["cow", "dog", "bed", "car"] and not game_.over
    assert game_.for_spymaster().splitlines() == [
        "Picked: cow (ours), dog (ours), bed (neutral). The other team covered car.",
        *("theirs: ship gun", "neutral: ", "assassin: desk", "ours: milk"),
    ]
    game_.pick(game_.clue("drink 1"), "milk")
    assert (game_.won, game_.over, game_.share) == (True, True, 1.0)
    assert game_.margin == pytest.approx(1 - 1 / 3)
    assert game_.rewards(0) == {role: pytest.approx(2 / 3) for role in ("spymaster", "operative")}


def test_the_other_team_wins_when_its_words_are_covered() -> None:
    game_ = four()
    game_.pick(game_.clue("road 1"), "car")
    assert game_.covered == ["car", "ship"]
    game_.pick(game_.clue("pet 1"), "dog")
    assert game_.covered == ["car", "ship", "dog", "gun"]
    assert (game_.won, game_.over, game_.margin) == (False, True, pytest.approx(1 / 3 - 1))


def test_the_assassin_ends_a_full_game() -> None:
    game_ = four()
    game_.pick(game_.clue("office 2"), "desk, dog")
    assert (game_.over, game_.won, game_.margin, game_.covered) == (True, False, -1.0, ["desk"])


def test_the_share_of_invalid_answers_moves_a_reward_towards_minus_one() -> None:
    game_ = four()
    clue = game_.clue("dog 2")
    assert clue == cards.NO_CLUE
    game_.pick(clue, "milk")
    game_.pick(game_.clue("farm 2"), "cow, dog")
    assert game_.won and game_.rewards(0) == {
        "spymaster": pytest.approx(0.5 * (1 - 1 / 3) - 0.5),
        "operative": pytest.approx(1 - 1 / 3),
    }


@pytest.mark.parametrize(
    ("answer", "valid"),
    [("ocean 2", True), ("Ocean: 2.", True), ("ocean", False), ("ocean two", False), ("ocean 0", False), ("", False),
     ("deep ocean 2", False), ("ocean 2\nor so", False), ("doghouse 1", False), ("ca 1", False), ("x 1", False)],
)  # fmt: skip
def test_a_free_clue_is_one_word_and_a_number_and_no_part_of_a_word_on_the_board(answer: str, valid: bool) -> None:
    assert cards.free_clue(answer, ["dog", "car"]) == (cards.Clue("ocean", 2) if valid else None)


def test_random_play_wins_one_small_game_in_fifteen_and_both_who_know_the_words_all() -> None:
    rng, won = random.Random(0), 0
    for task in range(3000):
        game_ = game(task, "eval")
        game_.pick(game_.clue(rng.choice(SMALL.clues)), " ".join(rng.sample(game_.words, 2)))
        won += game_.won
    assert 150 < won < 250
    for task in range(TASKS):
        game_ = game(task, "eval")
        clue = game_.clue(CATEGORY[of(game_.key, "ours")[0]])
        game_.pick(clue, " ".join(word for word in game_.words if cards.is_related(word, clue)))
        assert game_.won and game_.rewards(0.5) == {"spymaster": 1.0, "operative": 1.0}


def test_the_words_are_few_and_come_with_their_licence() -> None:
    assert (FOLDER / "words.json").stat().st_size < 100_000
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in (FOLDER / "LICENSE-wordnet").read_text()
    assert len(cards.RELATIONS) > 300
    assert all(relations[0] in prepare.CATEGORIES for relations in cards.RELATIONS.values())
    for category, words in cards.GROUPS.items():
        assert all(set(cards.RELATIONS[word]) & set(cards.GROUPS) == {category} for word in words)


NOUNS = """  1 a licence
01 03 n 01 entity 0 000 | all
02 05 n 02 animal 0 beast 0 001 @ 01 n 0000 | lives
03 05 n 01 canine 0 001 @ 02 n 0000 | has teeth
04 05 n 02 dog 0 domestic_dog 0 002 @ 03 n 0000 ~ 05 n 0000 | barks
05 05 n 01 puppy 0 001 @ 04 n 0000 | a young dog
06 06 n 01 vehicle 0 001 @ 01 n 0000 | carries
07 06 n 01 car 0 001 @ 06 n 0000 | has wheels
08 18 n 01 Rex 0 001 @i 04 n 0000 | a dog's name
"""
SENSES = """animal%1:05:00:: 02 1 9
dog%1:05:00:: 04 1 42
dog%1:06:00:: 07 2 3
puppy%1:05:00:: 05 1 1
car%1:06:00:: 07 1 5
car%2:38:00:: 00 1 9
rex%1:18:00:: 08 1 7
vehicle%1:06:00:: 06 1 9
"""


def test_the_words_are_common_nouns_with_the_hypernyms_of_their_first_sense(tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(NOUNS)
    (tmp_path / "index.sense").write_text(SENSES)
    categories = {"animal": ("animal", 1), "vehicle": ("vehicle", 1)}
    # A puppy is too rare, a car mostly a verb here, Rex a name; categories are no words.
    assert prepare.words(prepare.read(tmp_path), categories) == {"dog": ["animal", "canine"]}


def test_the_novice_sees_no_board_of_a_game_and_every_legal_answer_as_often() -> None:
    rng, first = random.Random(0), Counter[int]()
    ours_alike, drawn = 0, 6000
    for _ in range(drawn):
        conversation = codenames.conversation(rng)
        (system, user, answer), (choices,) = conversation.messages, conversation.choices
        listed = user["content"].splitlines()
        if system["content"] == SMALL.systems()[1]:
            assert choices == listed[0].split() and len(set(choices)) == 6
            picks = answer["content"].split()
            assert len(set(picks)) == 2 and set(picks) < set(choices)
            first[choices.index(picks[0])] += 1
            words = set(choices)
        else:
            assert choices == system["content"].removeprefix("Give a clue: ").split()
            assert answer["content"] in choices
            words = {word for line in listed for word in line.split()[1:]}
            ours = listed[-1].removeprefix("ours: ").split()
            ours_alike += CATEGORY.get(ours[0], 1) == CATEGORY.get(ours[1], 2)
        assert words <= set(codenames.WORDS)
        assert any(len(words & set(group)) != 2 for group in cards.GROUPS.values())
    assert max(first.values()) < 1.2 * min(first.values())
    assert 0.05 < ours_alike / drawn < 0.2, "ours are sometimes of one category, as chance has it"
    assert len(codenames.WORDS) == len(set(codenames.WORDS)) <= 150


def test_the_settings_for_a_gpu_are_settings() -> None:
    settings = load(FOLDER / "gpu.toml", environment={})
    assert settings.policy == "player"


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 150
    assert foreign_imports(APP) == {"cards", "episodes"}


class Server(FakeOpenAI):
    """Knows the words: gives the category of ours, and picks the words of a category."""

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.roles = getattr(self, "roles", Counter[str]())
        self.roles[body["messages"][0]["content"].split()[0]] += 1
        return super().answer(number, body)

    def say(self, number: int, board: str) -> str:
        if "clue: " not in board:
            return CATEGORY[board.split()[-1]]
        words, clue = board.split("\nclue: ")
        return " ".join(word for word in words.split() if CATEGORY[word] == clue)


class Silent(FakeOpenAI):
    """Answers neither role's question."""

    def say(self, number: int, board: str) -> str:
        return "Hello!"


@pytest.mark.slow
def test_each_role_is_a_trajectory_in_a_group_of_its_own() -> None:
    with Server() as server:
        report = run(APP, server, "--questions", "48", "--attempts", "8")
    assert (report["questions"], report["solved"], report["failed_requests"]) == (48, 48, 0)
    assert server.roles == {"Give": 48, "Pick": 48}
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert len(groups) == 96 and Counter(Counter(groups.values()).values()) == {8: 12}
    assert {headers["x-group-size"] for headers in server.headers_seen} == {"8"}
    for trajectory, group in groups.items():
        assert trajectory.rpartition(".")[2] == group.rpartition(".")[2] in ("spymaster", "operative")
    assert {posted["trajectory_id"]: posted["reward"] for posted in server.feedback} == dict.fromkeys(groups, 1.0)


@pytest.mark.slow
def test_invalid_answers_leave_no_group_incomplete() -> None:
    with Silent() as server:
        report = run(APP, server, "--questions", "16", "--attempts", "8")
    assert (report["solved"], report["reward"], report["failed_requests"]) == (0, -1.0, 0)
    roles = Counter(posted["trajectory_id"].rpartition(".")[2] for posted in server.feedback)
    assert roles == {"spymaster": 16, "operative": 16}


@pytest.mark.slow
def test_held_out_games_are_marked_and_get_no_reward() -> None:
    with Server() as server:
        report = run(APP, server, "--questions", "30", "--split", "eval")
    assert report["each"] == [1] * 30 and report["fields"] == [1] * 30
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert not any("x-group-id" in headers for headers in server.headers_seen) and server.feedback == []


@pytest.mark.slow
def test_a_full_game_without_valid_answers_ends_when_the_other_team_has_won() -> None:
    with Silent() as server:
        report = run(APP, server, "--questions", "2", "--attempts", "2", "--size", "full")
    assert (report["questions"], report["reward"], len(server.headers_seen)) == (2, -1.0, 2 * 2 * 8)
