"""The `openai` package: every call it has for us, plain, asynchronous and streamed."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.clients.conftest import KEY, MODEL, TERSE, Served

pytestmark = pytest.mark.stack

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


class Move(BaseModel):
    """Take a cell."""

    cell: Literal[0, 1, 2, 3, 4, 5, 6, 7, 8]


TOOLS: list[ChatCompletionToolParam] = [openai.pydantic_function_tool(Move, name="move")]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key=KEY) as client:
        yield client


def test_a_chat_is_recorded_as_it_was_seen(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16)
    row = served.one()
    assert completion.model == MODEL
    assert completion.choices[0].message.content == row.response_text == served.decoded(row)
    assert (completion.id, completion.choices[0].finish_reason) == (row.upstream_id, row.finish_reason)
    assert (row.endpoint, row.streamed, row.why_not_trained) == ("chat.completions", False, None)
    assert (row.new_messages, row.sampling) == (MESSAGES, {"max_tokens": 16})
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (
        row.prompt_tokens,
        row.completion_tokens,
    )


def test_calls_side_by_side_are_a_record_each(served: Served) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY) as client:
            prompts: list[Any] = [[{"role": "user", "content": f"number {number}"}] for number in range(4)]
            return await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8) for messages in prompts)
            )

    completions = asyncio.run(ask())
    rows = {row.upstream_id: row for row in served.calls(4)}
    for number, completion in enumerate(completions):
        row = rows[completion.id]
        assert row.new_messages == [{"role": "user", "content": f"number {number}"}]
        assert row.response_text == completion.choices[0].message.content


def test_a_stream_is_recorded_as_it_was_seen(client: openai.OpenAI, served: Served) -> None:
    text, ends, usage = "", [], None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=16, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usage = chunk.usage
    row = served.one()
    assert (row.streamed, row.response_text, [row.finish_reason]) == (True, text, ends)
    assert served.decoded(row) == text
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (row.prompt_tokens, row.completion_tokens)


def test_an_asynchronous_stream(served: Served) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=served.base_url, api_key=KEY) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == served.one().response_text


def test_the_helper_for_streams_sees_every_event(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=16) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    row = served.one()
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    done = [event.content for event in events if event.type == "content.done"]
    assert (deltas, done) == (row.response_text, [row.response_text])
    assert (final.id, final.choices[0].message.content) == (row.upstream_id, row.response_text)


def test_the_second_turn_continues_the_first(client: openai.OpenAI, served: Served) -> None:
    messages: list[Any] = [{"role": "system", "content": "You play tic-tac-toe."}, *MESSAGES]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, extra_headers=served.headers)
    messages += [first.choices[0].message, {"role": "user", "content": "and now?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, extra_headers=served.headers)
    rows = served.conversation(2)
    assert [row.upstream_id for row in rows] == [first.id, second.id]
    assert [row.follows for row in rows] == [None, rows[0].id]
    assert rows[1].new_messages == [{"role": "user", "content": "and now?"}]


def test_choices_are_a_record_each(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=3)
    rows = served.calls(3)
    assert {row.choice: row.response_text for row in rows} == {
        choice.index: choice.message.content for choice in completion.choices
    }
    assert {row.upstream_id for row in rows} == {completion.id}
    assert len({row.trajectory_id for row in rows}) == 3


def test_the_requested_logprobs_are_those_recorded(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, logprobs=True)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.logprob for token in logprobs.content] == pytest.approx(served.one().inference_logprobs, abs=1e-6)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI, served: Served, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "play"}]
    first = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        temperature=0,
        max_tokens=64,
        extra_headers=served.headers,
    )
    (call,) = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "move"
    assert Move.model_validate_json(call.function.arguments)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "X.. .O. ..."}]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, max_tokens=16, extra_headers=served.headers
    )
    called, answered = served.conversation(2)
    assert called.response["tool_calls"] == [call.model_dump()]
    assert (called.tools, called.why_not_trained) == (TOOLS, "greedy")
    assert (answered.upstream_id, answered.new_messages[-1]) == (second.id, messages[-1])


def test_a_tool_call_is_streamed(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=64
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    (call,) = served.one().response["tool_calls"]
    assert [(event.name, event.arguments) for event in done] == [("move", call["function"]["arguments"])]
    (seen,) = message.tool_calls or []
    assert (seen.id, seen.function.parsed_arguments) == (
        call["id"],
        Move.model_validate_json(call["function"]["arguments"]),
    )


@pytest.mark.parametrize(("strict", "constraints"), [(False, None), (True, {"grammar": "tools"})])
def test_tools_that_may_be_called_leave_the_call_trainable(
    client: openai.OpenAI, served: Served, strict: bool, constraints: dict[str, Any] | None
) -> None:
    tool: Any = {"type": "function", "function": TOOLS[0]["function"] | {"strict": strict}}
    completion = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="auto", max_tokens=16
    )
    row = served.one()
    assert (row.response_text, row.tools) == (completion.choices[0].message.content, [tool])
    assert (row.why_not_trained, row.constraints) == (None, constraints)


def test_an_answer_is_parsed(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Move, max_tokens=32, **TERSE
    )
    row = served.one()
    assert completion.choices[0].message.parsed == Move.model_validate_json(row.response_text)
    assert row.why_not_trained == "greedy"


def test_an_answer_is_parsed_while_it_streams(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Move, max_tokens=32, **TERSE
    ) as stream:
        done = [event.parsed for event in stream if event.type == "content.done"]
    assert done == [Move.model_validate_json(served.one().response_text)]


def test_a_text_is_completed(client: openai.OpenAI, served: Served) -> None:
    completion = client.completions.create(model=MODEL, prompt="hi", max_tokens=8)
    row = served.one()
    assert (completion.id, completion.choices[0].text) == (row.upstream_id, row.response_text)
    assert (row.endpoint, row.why_not_trained) == ("completions", None)
    assert served.decoded(row) == row.response_text


def test_a_text_is_completed_in_a_stream(client: openai.OpenAI, served: Served) -> None:
    stream = client.completions.create(model=MODEL, prompt="hi", max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    row = served.one()
    assert (row.response_text, row.streamed) == (text, True)


def test_several_texts_are_a_record_each(client: openai.OpenAI, served: Served) -> None:
    completion = client.completions.create(model=MODEL, prompt=["hi", "ho"], max_tokens=4, n=2)
    rows = served.calls(4)
    assert [row.response_text for row in rows] == [choice.text for choice in completion.choices]


def test_a_response_is_recorded_as_it_was_seen(client: openai.OpenAI, served: Served) -> None:
    response = client.responses.create(model=MODEL, input="hi", instructions="Be brief.", max_output_tokens=16)
    row = served.one()
    assert (response.id, response.output_text) == (row.upstream_id, row.response_text)
    assert (response.model, row.endpoint, row.why_not_trained) == (MODEL, "responses", None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (row.prompt_tokens, row.completion_tokens)


def test_a_response_is_streamed(client: openai.OpenAI, served: Served) -> None:
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=16) as stream:
        events = list(stream)
        final = stream.get_final_response()
    row = served.one()
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == row.response_text
    assert (final.output_text, final.id, row.streamed) == (row.response_text, row.upstream_id, True)


def test_a_response_calls_a_tool_and_reads_its_result(client: openai.OpenAI, served: Served) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Move, name="move")["function"] | {"type": "function"}]
    items: list[Any] = [{"role": "user", "content": "play"}]
    first = client.responses.create(
        model=MODEL,
        input=items,
        tools=tools,
        tool_choice="required",
        temperature=0,
        max_output_tokens=64,
        extra_headers=served.headers,
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert Move.model_validate_json(call.arguments)
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "X.. .O. ..."}]
    second = client.responses.create(
        model=MODEL, input=items, tools=tools, max_output_tokens=16, extra_headers=served.headers
    )
    rows = served.conversation(2)
    assert [row.upstream_id for row in rows] == [first.id, second.id]


def test_a_response_is_parsed(client: openai.OpenAI, served: Served) -> None:
    response = client.responses.parse(model=MODEL, input="hi", text_format=Move, max_output_tokens=32, extra_body=TERSE)
    assert response.output_parsed == Move.model_validate_json(served.one().response_text)


def test_thoughts_are_no_content(thinking: Served) -> None:
    with openai.OpenAI(base_url=thinking.base_url, api_key=KEY) as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True))
        brief = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, reasoning_effort="none")
    rows = thinking.calls(3)
    thoughts = [
        whole.choices[0].message.model_dump()["reasoning"],
        "".join(chunk.choices[0].delta.model_dump().get("reasoning") or "" for chunk in chunks),
    ]
    assert [row.response["reasoning"] for row in rows[:2]] == thoughts == [thinking.decoded(row) for row in rows[:2]]
    assert [row.response_text or None for row in rows] == [None, None, brief.choices[0].message.content]


def test_the_models_are_listed(client: openai.OpenAI, served: Served) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    served.calls(0)


def test_the_headers_say_which_record_it_is(client: openai.OpenAI, served: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    row = served.one()
    assert (raw.headers["x-completion-id"], raw.headers["x-trajectory-id"]) == (row.id, row.trajectory_id)
    assert (raw.headers["x-policy-version"], raw.headers["x-threaded-by"]) == ("0", "new")
    assert raw.parse().id == row.upstream_id


def test_a_header_names_the_trajectory(client: openai.OpenAI, served: Served) -> None:
    client.with_options(default_headers=served.headers).chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8
    )
    row = served.one()
    assert ({"X-Trajectory-Id": row.trajectory_id}, row.threaded_by) == (served.headers, "header")


def test_feedback_takes_the_id_that_the_app_holds(client: openai.OpenAI, served: Served) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    given: Any = client.post("/feedback", body={"completion_id": completion.id, "reward": 1.0}, cast_to=object)
    feedback: Any = client.get(f"/feedback/{given['id']}", cast_to=object)
    assert (feedback["target_id"], feedback["reward"]) == (served.one().upstream_id, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_the_clients_own_error(client: openai.OpenAI, served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=stream)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["param"] == "temperature"
    served.refused()


def test_an_unknown_model_is_the_clients_own_error(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert "no-such-model" in unknown.value.message
    served.calls(0)


def test_other_calls_fail_as_they_would_without_us(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="hi")
    served.calls(0)
