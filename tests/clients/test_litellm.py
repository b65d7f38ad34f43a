"""The `litellm` package as an app's client: `openai/<model>` with an `api_base`."""

import asyncio
from typing import Any

import litellm
import pytest
from litellm.exceptions import BadRequestError, NotFoundError

from tests.clients.conftest import KEY, MODEL, Served

pytestmark = [pytest.mark.stack, pytest.mark.long(part="clients")]

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Take a cell",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"cell": {"type": "integer", "enum": list(range(9))}},
                "required": ["cell"],
            },
        },
    }
]


def call_of(served: Served, **values: Any) -> dict[str, Any]:
    defaults = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": 16}
    return defaults | {"api_base": served.base_url, "api_key": KEY} | values


def test_a_chat_is_recorded_as_it_was_seen(served: Served) -> None:
    completion = litellm.completion(**call_of(served))
    row = served.one()
    assert completion.choices[0].message.content == row.response_text == served.decoded(row)
    assert (completion.id, completion.usage.completion_tokens) == (row.upstream_id, row.completion_tokens)
    assert row.why_not_trained is None


def test_calls_side_by_side_are_a_record_each(served: Served) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**call_of(served, max_tokens=tokens)) for tokens in (3, 4)))

    completions = asyncio.run(ask())
    assert {row.upstream_id: row.response_text for row in served.calls(2)} == {
        completion.id: completion.choices[0].message.content for completion in completions
    }


def test_a_stream_is_recorded_as_it_was_seen(served: Served) -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**call_of(served, stream=True)))
    row = served.one()
    assert (row.response_text, row.streamed) == (text, True)


def test_a_tool_is_called_and_its_result_read(served: Served) -> None:
    first = litellm.completion(
        **call_of(
            served, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=64, extra_headers=served.headers
        )
    )
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "X.. .O. ..."}
    messages = [*MESSAGES, first.choices[0].message.model_dump(), result]
    answered = litellm.completion(**call_of(served, messages=messages, tools=TOOLS, extra_headers=served.headers))
    rows = served.conversation(2)
    assert rows[0].response["tool_calls"][0]["function"]["arguments"] == call.function.arguments
    assert rows[1].new_messages[-1] == result
    assert rows[1].response_text == answered.choices[0].message.content


def test_messages_of_another_vendors_kind(served: Served) -> None:
    values = call_of(served, model=f"anthropic/{MODEL}", api_base=served.host)
    completion = litellm.completion(**values)
    row = served.one()
    assert (row.endpoint, row.response_text) == ("messages", completion.choices[0].message.content)


def test_an_unknown_model_is_its_own_error(served: Served) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        litellm.completion(**call_of(served, model="openai/no-such-model"))
    served.calls(0)
    with pytest.raises(BadRequestError, match="temperature"):
        litellm.completion(**call_of(served, temperature=-1))
    served.refused()
