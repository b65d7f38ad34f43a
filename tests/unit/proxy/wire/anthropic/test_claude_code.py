"""Claude Code 2.1 is captured whole, and each of its conversations is one.

The bodies are what the program sent, its long texts cut: a conversation with two tool calls, its helper's, and one that
was compacted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.domain.call import Choice
from proxy.domain.chat_rules import ChatRules
from proxy.trajectories.conversation_hash import ConversationHasher
from proxy.wire.interfaces import DialectRequest, Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body
from proxy.wire.translated import TranslatedRequest
from whetstone.domain.why_not_trained import WhyNotTrained

BODIES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).with_name("bodies") / "claude_code.json").read_text()
)
ANSWERS: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "I will look.",
        "reasoning": "I list the files first.",
        "tool_calls": [
            {
                "id": "chatcmpl-tool-8c1f0e2d3b4a59687766554433221100",
                "type": "function",
                "function": {"name": "Bash", "arguments": '{"command": "ls", "description": "List files"}'},
            }
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "chatcmpl-tool-0a1b2c3d4e5f60718293a4b5c6d7e8f9",
                "type": "function",
                "function": {"name": "Read", "arguments": '{"file_path":"/home/user/project/notes.txt"}'},
            }
        ],
    },
    {"role": "assistant", "content": "The notes say hello."},
]
"""What it was answered in the conversation, as vLLM's chat says it."""


def parsed(body: dict[str, Any], rules: ChatRules) -> DialectRequest:
    return DIALECTS["/v1/messages"](read_body(json.dumps(body).encode()), Server(chat_rules=rules))


@pytest.mark.parametrize("merges_system", [False, True])
@pytest.mark.parametrize("part", BODIES)
def test_every_call_is_captured(part: str, merges_system: bool) -> None:
    for body in BODIES[part]:
        request = parsed(body, ChatRules(merges_system, "low", True))
        assert isinstance(request, TranslatedRequest)
        assert request.why_not_trained() != WhyNotTrained.NO_TOKEN_IDS
        sent = json.loads(request.to_upstream_body("starter@v0", "salt"))
        assert (sent["return_token_ids"], sent["logprobs"], sent["stream"]) == (True, True, True)
        assert [tool["function"]["name"] for tool in sent["tools"]] == [tool["name"] for tool in body["tools"]]
        roles = [message["role"] for message in sent["messages"]]
        assert roles.count("system") == 1 + (not merges_system) * sum(
            one["role"] == "system" for one in body["messages"]
        )


@pytest.mark.parametrize("merges_system", [False, True])
def test_a_conversation_goes_on_from_its_own_answers(merges_system: bool) -> None:
    hasher = ConversationHasher()
    turns = [parsed(body, ChatRules(merges_system, "low", True)) for body in BODIES["conversation"]]
    conversations = [hasher.conversation(turn.conversation, turn.end_user) for turn in turns]
    assert conversations[0].answers == ()
    for before, after, answer in zip(conversations, conversations[1:], ANSWERS, strict=False):
        history = hasher.history(before, Choice(index=0, message=answer))
        assert after.answers[0] == history.conversation
        assert after.tool_calls == history.tool_calls


def test_what_differs_in_every_call_is_not_in_the_conversation() -> None:
    for body in BODIES["conversation"]:
        texts = b"".join(map(bytes, parsed(body, ChatRules(False)).conversation))
        assert b"cache_control" not in texts
        assert b"billing" not in texts
