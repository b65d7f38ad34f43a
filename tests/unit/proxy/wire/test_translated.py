"""What becomes a chat is weighed as that chat: the same reasons and constraints in every dialect."""

import json
from typing import Any

import pytest

from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body
from proxy.wire.translated import TranslatedRequest

PARAMETERS = {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "aa"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}],
    "/v1/messages": [{"name": "f", "input_schema": PARAMETERS, "strict": True}],
    "/v1/responses": [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}],
}


def ask(path: str, **values: Any) -> Any:
    body = read_body(json.dumps({"model": "starter"} | BODIES[path] | values).encode())
    request = DIALECTS[path](body, Server(max_model_len=512))
    assert (path == "/v1/chat/completions") != isinstance(request, TranslatedRequest)
    return request


@pytest.mark.parametrize("path", BODIES)
def test_a_dialect_has_the_classes_of_chat(path: str) -> None:
    plain, bent, greedy = ask(path), ask(path, top_p=0.9), ask(path, temperature=0)
    assert (plain.why_not_trained(), plain.constraints()) == (None, None)
    assert (bent.why_not_trained(), bent.constraints()) == (None, {"top_p": 0.9})
    assert (greedy.why_not_trained(), greedy.constraints()) == ("greedy", None)


@pytest.mark.parametrize("path", BODIES)
def test_strict_tools_are_a_grammar_in_every_dialect(path: str) -> None:
    request = ask(path, tools=TOOLS[path])
    assert (request.why_not_trained(), request.constraints()) == (None, {"grammar": "tools"})


def test_media_of_messages_are_media() -> None:
    image = {"type": "image", "source": IMAGE}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]):
        request = ask("/v1/messages", messages=[{"role": "user", "content": content}])
        assert request.why_not_trained() == "media"
