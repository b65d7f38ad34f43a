"""A model server that plays examples/mail by rule: equal messages get equal answers, whichever agent sends them."""

import json
from typing import Any

from tests.examples.conftest import FakeOpenAI

Message = dict[str, Any]


class MailPlayer(FakeOpenAI):
    """Plays the small form by commands and the full form by tools, and records the requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: dict[str, str] = {}
        """Answers of the full form by question; "Rome" to any other."""
        self.wrong_every = 0
        """Each answer of this number is no valid call; 0: none."""
        super().__init__()

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        fields = super().answer(number, body)
        if "tools" in body:
            fields["choices"][0] |= {"message": self.call(number, body["messages"]), "finish_reason": "tool_calls"}
        return fields

    def is_wrong(self, number: int) -> bool:
        return self.wrong_every > 0 and number % self.wrong_every == 0

    def say(self, number: int, board: str) -> str:
        """Search for the project, read the first mail that is listed, answer with what it says after "now"."""
        if self.is_wrong(number):
            return "well"
        if board.startswith("mails"):
            return f"read {board.split(' , ')[0].removeprefix('mails : ')}"
        if board.startswith("from"):
            return f"answer {board.split(' now ')[1].split()[0]}"
        return f"search {board.split()[-2]}" if board.startswith("for") else "search now"

    def call(self, number: int, messages: list[Message]) -> Message:
        """Search for the project, read the first two mails that are listed, answer and cite the first."""
        question = messages[1]["content"]
        results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
        listed = [entry["id"] for result in results if isinstance(result, list) for entry in result][:2]
        opened = [result["id"] for result in results if isinstance(result, dict) and "body" in result]
        tool, arguments = "search_inbox", dict[str, Any]({"query": " ".join(question.rstrip("?").split()[-2:])})
        if len(opened) < len(listed):
            tool, arguments = "read_email", {"id": listed[len(opened)]}
        elif opened:
            tool, arguments = (
                "return_final_answer",
                {"answer": self.answers.get(question, "Rome"), "sources": opened[:1]},
            )
        text = "{" if self.is_wrong(number) else json.dumps(arguments)
        call = {"id": f"call_{number}", "type": "function", "function": {"name": tool, "arguments": text}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
