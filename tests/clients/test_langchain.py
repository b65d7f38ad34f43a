"""LangChain's ChatOpenAI: invoked, streamed, with tools, and with structured answers."""

import asyncio
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.clients.conftest import KEY, MODEL, TERSE, Served

pytestmark = [pytest.mark.stack, pytest.mark.long(part="clients")]


class Move(BaseModel):
    """Take a cell."""

    cell: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8]


@tool(args_schema=Move)
def move(cell: int) -> str:
    """Take a cell."""
    return f"you took {cell}"


@pytest.fixture
def chat(served: Served) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=served.base_url, api_key=SecretStr(KEY), max_completion_tokens=32)


def test_a_chat_is_recorded_as_it_was_seen(chat: ChatOpenAI, served: Served) -> None:
    message = chat.invoke("hi")
    row = served.one()
    assert message.content == row.response_text == served.decoded(row)
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == row.completion_tokens
    assert (message.response_metadata["id"], row.why_not_trained) == (row.upstream_id, None)


def test_a_stream_is_recorded_as_it_was_seen(chat: ChatOpenAI, served: Served) -> None:
    text = "".join(str(chunk.content) for chunk in chat.stream("hi"))
    row = served.one()
    assert (row.response_text, row.streamed) == (text, True)


def test_an_asynchronous_stream(chat: ChatOpenAI, served: Served) -> None:
    async def ask() -> str:
        return "".join([str(chunk.content) async for chunk in chat.astream("hi")])

    text = asyncio.run(ask())
    assert text == served.one().response_text


def test_a_batch_is_a_record_each(chat: ChatOpenAI, served: Served) -> None:
    messages = chat.batch(["one", "two", "three"])
    texts = {row.new_messages[0]["content"]: row.response_text for row in served.calls(3)}
    assert texts == {prompt: message.content for prompt, message in zip(("one", "two", "three"), messages, strict=True)}


def test_a_tool_is_called_and_its_result_read(chat: ChatOpenAI, served: Served) -> None:
    chat.temperature = 0
    messages: list[BaseMessage] = [HumanMessage("play")]
    request = chat.bind_tools([move], strict=True, tool_choice="any", extra_headers=served.headers).invoke(messages)
    assert isinstance(request, AIMessage)
    (call,) = request.tool_calls
    result: ToolMessage = move.invoke(call)
    assert result.content == f"you took {call['args']['cell']}"
    answered = chat.bind_tools([move], strict=True, extra_headers=served.headers).invoke([*messages, request, result])
    rows = served.conversation(2)
    assert rows[0].response["tool_calls"][0]["id"] == call["id"]
    assert (rows[1].new_messages[-1]["content"], rows[1].response_text) == (result.content, answered.content)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_structured(chat: ChatOpenAI, served: Served, method: Any) -> None:
    answer = chat.model_copy(update=TERSE).with_structured_output(Move, method=method, strict=True).invoke("play")
    assert isinstance(answer, Move)
    assert str(answer.cell) in served.decoded(served.one())


def test_a_chain_through_responses(served: Served) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=served.base_url, api_key=SecretStr(KEY), use_responses_api=True)
    message = chat.invoke("hi")
    assert message.text == served.one().response_text
