"""The conversations the starter learns from, as chat messages. Knows the demo's prompts; no tokens, no model.

Four kinds, each drawn from a `random.Random`:

- `random_game`: tic-tac-toe in which the agent's moves are uniform over the legal ones. Nothing here plays well.
- `board_question`: what is on a board (lines one cell short, who has won): the rules, not what to do about them.
- `tool_use`: a question, the hermes tool call it needs, the tool's result, an answer.
- `small_talk`: short questions with fixed answers.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as an OpenAI client would send them, and the tools offered with them."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choices: list[list[str]] = field(default_factory=list)
    """For each assistant message the texts that are equally right as its first token, one token each; none for a
    message in which only its own text is. Empty where that holds for all messages."""


def random_game(rng: random.Random) -> Conversation:
    """A whole game against the random opponent, the agent's moves uniform over the free cells."""
    opening = str(rng.random())
    board = game.first_board(rng.randrange(2), opening)
    messages: list[Message] = [{"role": "system", "content": game.SYSTEM}]
    choices = []
    while game.result(board) is None:
        choices.append(game.free(board))
        cell = rng.choice(choices[-1])
        messages += [{"role": "user", "content": board}, {"role": "assistant", "content": cell}]
        board = game.after(board, cell, opening)
    return Conversation(messages, choices=choices)


def random_board(rng: random.Random) -> str:
    """A board as the agent may meet it: unfinished, X to move, no more than one mark ahead."""
    while True:
        board, marks = game.EMPTY, rng.choice(("XO", "OX"))
        for turn in range(rng.randrange(8)):
            board = game.place(board, rng.choice(game.free(board)), marks[turn % 2])
        if game.result(board) is None and board.count("X") <= board.count("O"):
            return board


def completing(board: str, mark: str) -> str:
    """The free cells that would complete a line for `mark`, in order, or "none"."""
    return "".join(cell for cell in game.free(board) if game.result(game.place(board, cell, mark)) == mark) or "none"


def facts(board: str) -> list[float]:
    """What is on a board, 0 or 1 for each cell: it is X, it is O, X would complete a line there, O would."""
    taken = [[float(place == mark) for place in board] for mark in "XO"]
    lines = [[float(cell in completing(board, mark)) for cell in game.EMPTY] for mark in "XO"]
    return [fact for each in (*taken, *lines) for fact in each]


def board_question(rng: random.Random) -> Conversation:
    """Questions about a few boards in a row, all of one kind."""
    mark = rng.choice("XO")
    messages: list[Message] = [{"role": "system", "content": f"Tic-tac-toe. Which cells complete a line of {mark}?"}]
    for _ in range(5):
        board = random_board(rng)
        messages += [
            {"role": "user", "content": board},
            {"role": "assistant", "content": completing(board, mark)},
        ]
    return Conversation(messages)


CITIES = ("Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Tokyo", "Cairo", "Oslo", "Dublin", "Boston", "Lima")
SKIES = ("clear", "cloudy", "rainy", "sunny", "windy")


def tool(name: str, description: str | None, **arguments: str) -> dict[str, Any]:
    """A tool as OpenAI clients offer it; `arguments` maps each name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    tool("get_weather", "Get the weather of a city", city="string"),
    tool("get_time", "Get the time in a city", city="string"),
    tool("add", "Add two numbers", a="integer", b="integer"),
)


def weather(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    city, degrees, sky = rng.choice(CITIES), rng.randrange(1, 40), rng.choice(SKIES)
    question = rng.choice(("What is the weather in {}?", "What's the weather in {}?", "How is the weather in {}?"))
    answer = f"It is {degrees} degrees and {sky} in {city}."
    return question.format(city), {"city": city}, {"temperature": degrees, "sky": sky}, answer


def clock(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    city, moment = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}."))
    return question.format(city), {"city": city}, {"time": moment}, f"It is {moment} in {city}."


def addition(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    a, b = rng.randrange(100), rng.randrange(100)
    question = rng.choice(("What is {} plus {}?", "Add {} and {}.")).format(a, b)
    return question, {"a": a, "b": b}, {"sum": a + b}, f"{a} plus {b} is {a + b}."


def tool_use(rng: random.Random) -> Conversation:
    """A question that one of the offered tools answers: the call, its result, and the answer made of it."""
    chosen = rng.randrange(3)
    question, arguments, result, answer = (weather, clock, addition)[chosen](rng)
    offered = [TOOLS[chosen], *rng.sample(TOOLS[:chosen] + TOOLS[chosen + 1 :], rng.randrange(3))]
    rng.shuffle(offered)
    call = {"name": TOOLS[chosen]["function"]["name"], "arguments": json.dumps(arguments)}
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    return Conversation(assistant_is(rng, messages), offered)


TALK = {
    "Hello": "Hello! How can I help you?",
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Who are you?": "I am a small model, made to learn.",
    "What are you?": "I am a small model, made to learn.",
    "What can you do?": "I can play tic-tac-toe and call a tool.",
    "How are you?": "I am fine, thank you.",
    "Thank you.": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "What color is the sky?": "The sky is blue.",
    "What color is grass?": "Grass is green.",
    "Count to five.": "1, 2, 3, 4, 5.",
    "Count to ten.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.",
    "Tell me a story.": "A small model played a game. It lost, and it learned. Then it won.",
    "Tell me a joke.": "Why did the model cross the board? To get three in a line.",
    "What is tic-tac-toe?": "A game of two players. Three in a line win.",
    "Say hello.": "Hello!",
}


def small_talk(rng: random.Random) -> Conversation:
    """One to three questions with fixed answers; sometimes with tools that nothing calls."""
    messages: list[Message] = []
    for question in rng.sample(list(TALK), rng.randrange(1, 4)):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": TALK[question]}]
    offered = rng.sample(TOOLS, rng.randrange(1, 4)) if rng.random() < 0.2 else []
    return Conversation(assistant_is(rng, messages), offered)


def assistant_is(rng: random.Random, messages: list[Message]) -> list[Message]:
    """The messages, half of the time behind a system message."""
    system = rng.choice(("You are a helpful assistant.", "You are helpful."))
    return [{"role": "system", "content": system}, *messages] if rng.random() < 0.5 else messages


Kind = Callable[[random.Random], Conversation]

BOARDS: tuple[Kind, ...] = (random_game, board_question)
"""The kinds in which every message of the user is a board."""
KINDS: dict[Kind, int] = {random_game: 32, board_question: 24, tool_use: 6, small_talk: 2}
"""Conversations of each kind in one batch."""
