"""An OpenAI-compatible server whose answers come from a rule, and a rule: tic-tac-toe.

It wins if it can and blocks if it must, on boards in the form of whetstone/demo/tictactoe/game.py.
"""

import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

Calls = list[tuple[str, dict[str, Any]]]
"""Tools and their arguments."""
Rule = Callable[[list[dict[str, Any]]], str | Calls]
"""The answer to a conversation: a text, or calls of tools."""
BY_WORTH = "519372846"
"""Order of cells where there is nothing to win or block: the middle, the corners, the edges."""


def move(board: str) -> str:
    """Return a cell that makes a line, else one that blocks the opponent's line, else the best free one."""
    for mark in "XO":
        for cell in game.free(board):
            if game.result(game.place(board, cell, mark)) == mark:
                return cell
    return next(cell for cell in BY_WORTH if cell in board)


def next_move(messages: list[dict[str, Any]]) -> str:
    """Return the move on the board in the last message."""
    return move(messages[-1]["content"])


class Teacher(Server):
    """Answers by the rule at `url`, until its `with` ends."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        super().__init__(_Handler, base="/v1")


class _Handler(Handler):
    server: Teacher

    def respond(self, body: dict[str, Any]) -> None:
        message = message_of(self.server.rule(body["messages"]))
        fields = chat_answer("", body["model"], usage=_usage(body["messages"], message))
        why = "tool_calls" if "tool_calls" in message else "stop"
        fields["choices"][0] |= {"message": message, "finish_reason": why}
        self.whole(200, fields)


def _usage(messages: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, int]:
    """Return numbers of tokens, four characters each."""
    read, written = sum(len(str(message.get("content"))) for message in messages), len(json.dumps(answer))
    return {"prompt_tokens": read // 4, "completion_tokens": written // 4, "total_tokens": read // 4 + written // 4}


def message_of(answer: str | Calls) -> dict[str, Any]:
    """Return the message of an answer."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    return {"role": "assistant", "content": None, "tool_calls": [_call(name, values) for name, values in answer]}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
