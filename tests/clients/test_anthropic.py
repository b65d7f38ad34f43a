"""The `anthropic` package: Messages whole and streamed, tools, counting, and its own errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.clients.conftest import KEY, MODEL, Served

pytestmark = [pytest.mark.stack, pytest.mark.long(part="clients")]

GREEDY = {"temperature": 0}
"""The grammar holds the model to a tool; sampled, it may still fill the room with blanks."""
MESSAGES: list[MessageParam] = [{"role": "user", "content": "hi"}]
TOOLS: list[ToolParam] = [
    {
        "name": "move",
        "description": "Take a cell",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {"cell": {"type": "integer", "enum": list(range(9))}},
            "required": ["cell"],
        },
    }
]


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.host, api_key=KEY) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_recorded_as_it_was_seen(client: anthropic.Anthropic, served: Served) -> None:
    message = client.messages.create(model=MODEL, messages=MESSAGES, system="Be brief.", max_tokens=16)
    row = served.one()
    assert (message.model, message.role, message.id) == (MODEL, "assistant", row.upstream_id)
    assert text_of(message) == row.response_text == served.decoded(row)
    assert (row.endpoint, row.streamed, row.why_not_trained) == ("messages", False, None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (row.prompt_tokens, row.completion_tokens)


def test_calls_side_by_side_are_a_record_each(served: Served) -> None:
    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=served.host, api_key=KEY) as client:
            return await asyncio.gather(
                *(client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=tokens) for tokens in (3, 4, 5))
            )

    messages = asyncio.run(ask())
    assert {row.upstream_id: row.response_text for row in served.calls(3)} == {
        message.id: text_of(message) for message in messages
    }


def test_a_stream_is_recorded_as_it_was_seen(client: anthropic.Anthropic, served: Served) -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    row = served.one()
    assert text == text_of(final) == row.response_text == served.decoded(row)
    assert (row.streamed, row.why_not_trained) == (True, None)
    assert (final.usage.input_tokens, final.usage.output_tokens) == (row.prompt_tokens, row.completion_tokens)


def test_the_events_of_a_stream_are_in_order(client: anthropic.Anthropic, served: Served) -> None:
    events = [
        event.type for event in client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=16, stream=True)
    ]
    assert events[:2] == ["message_start", "content_block_start"]
    assert set(events[2:-3]) == {"content_block_delta"}
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert served.one().status == "complete"


def test_the_second_turn_continues_the_first(client: anthropic.Anthropic, served: Served) -> None:
    messages: list[Any] = list(MESSAGES)
    first = client.messages.create(model=MODEL, messages=messages, max_tokens=16, extra_headers=served.headers)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "and now?"}]
    second = client.messages.create(model=MODEL, messages=messages, max_tokens=16, extra_headers=served.headers)
    rows = served.conversation(2)
    assert [row.upstream_id for row in rows] == [first.id, second.id]
    assert [row.follows for row in rows] == [None, rows[0].id]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "move"}])
def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic, served: Served, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "play"}]
    first = client.messages.create(
        model=MODEL,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        extra_body=GREEDY,
        max_tokens=64,
        extra_headers=served.headers,
    )
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, first.stop_reason) == ("move", "tool_use")
    assert call.input in [{"cell": cell} for cell in range(9)]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "X.. .O. ..."}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(
        model=MODEL, messages=messages, tools=TOOLS, max_tokens=16, extra_headers=served.headers
    )
    rows = served.conversation(2)
    assert [row.upstream_id for row in rows] == [first.id, second.id]


def test_a_tool_call_is_streamed(client: anthropic.Anthropic, served: Served) -> None:
    with client.messages.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice={"type": "any"}, extra_body=GREEDY, max_tokens=64
    ) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert partial in served.decoded(served.one())
    assert call.input in [{"cell": cell} for cell in range(9)]


def test_thoughts_are_a_block_of_their_own(thinking: Served) -> None:
    with anthropic.Anthropic(base_url=thinking.host, api_key=KEY) as client:
        message = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
            streamed = stream.get_final_message()
    for row, seen in zip(thinking.calls(2), (message, streamed), strict=True):
        assert "".join(block.thinking for block in seen.content if block.type == "thinking") == thinking.decoded(row)
        assert not row.response_text


def test_tokens_are_counted_without_a_record(client: anthropic.Anthropic, served: Served) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    served.calls(0)
    client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert counted.input_tokens == served.one().prompt_tokens


def test_what_cannot_be_is_the_clients_own_error(client: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=[], max_tokens=8)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    served.refused()


def test_an_unknown_model_is_the_clients_own_error(client: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="no-such-model", messages=MESSAGES, max_tokens=8)
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["type"] == "error"
    assert "no-such-model" in unknown.value.body["error"]["message"]
    served.calls(0)
