"""litellm against servers that answer: what is asked, what is understood, and what outlives it."""

import asyncio
import gc

import pytest

from judge.ruler.errors import JudgeRefused
from judge.ruler.llm import ask, close
from tests.unit.judge.ruler.speaker import GOOD, MESSAGES, SAID, SCHEMA, completion, failure, judged, never

# litellm alone takes seconds to import.
pytestmark = pytest.mark.slow


@pytest.fixture
def strong():
    with judged() as strong:
        yield strong


def test_an_answer_is_what_was_said_by_whom_and_for_how_much(strong):
    answer = strong.says(GOOD).asked(usd_per_million_prompt_tokens=2, usd_per_million_completion_tokens=8)
    assert (answer.text, answer.model, answer.cut_off) == (SAID, "m-2026-03-01", False)
    assert (answer.prompt_tokens, answer.completion_tokens) == (70, 30)
    assert answer.cost_usd == pytest.approx((70 * 2 + 30 * 8) / 1e6)
    assert 0 < answer.seconds < 30


def test_a_question_is_the_messages_bounded_and_held_to_the_schema(strong):
    strong.says(GOOD).asked(temperature=0.5, max_output_tokens=99)
    ((path, headers, body),) = strong.server.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 99,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA},
        },
    }
    assert headers["authorization"] == "Bearer none"


def test_the_key_is_the_one_the_settings_name(strong, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
    monkeypatch.setenv("JUDGE_KEY", "mine")
    strong.says(GOOD).asked()
    strong.asked(api_key_env="JUDGE_KEY")
    assert [headers["authorization"] for _, headers, _ in strong.server.asked] == ["Bearer none", "Bearer mine"]


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_key_that_the_settings_name_nobody_is_asked(strong, monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    error = strong.says(GOOD).refused(api_key_env="JUDGE_KEY")
    assert type(error) is JudgeRefused
    assert "JUDGE_KEY of judges.strong" in str(error)
    assert strong.bodies == []


def test_an_unknown_price_is_not_nothing(strong):
    assert strong.says(GOOD).asked().cost_usd is None
    assert strong.asked(usd_per_million_prompt_tokens=2).cost_usd is None
    assert strong.asked(usd_per_million_prompt_tokens=0, usd_per_million_completion_tokens=0).cost_usd == 0


def test_a_price_that_litellm_knows_is_taken(strong):
    answer = strong.says((200, completion(model="gpt-4.1-2025-04-14"))).asked(model="openai/gpt-4.1-2025-04-14")
    assert answer.cost_usd == pytest.approx((70 * 2 + 30 * 8) / 1e6)


def test_tokens_nobody_counted_are_unknown_and_so_is_their_cost(strong):
    said = completion()
    del said["usage"]
    answer = strong.says((200, said)).asked(usd_per_million_prompt_tokens=2, usd_per_million_completion_tokens=8)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cost_usd) == (None, None, None)


def test_who_answered_is_who_was_asked_where_nobody_says(strong):
    said = completion()
    del said["model"]
    assert strong.says((200, said)).asked().model in ("m", "openai/m")


def test_an_answer_that_reached_its_bound_is_cut_off(strong):
    answer = strong.says((200, completion('{"scores": [', finish="length"))).asked()
    assert (answer.text, answer.cut_off) == ('{"scores": [', True)


def choices(**message):
    return [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "I would rather not."}, ""),
        ({"content": ""}, ""),
        ({}, ""),
        ({"content": None, "reasoning_content": SAID}, ""),
        ({"content": SAID, "reasoning_content": "Let me see."}, SAID),
    ],
    ids=["refusal", "empty", "missing", "thought alone", "thought first"],
)
def test_only_what_a_judge_says_counts(strong, message, text):
    assert strong.says((200, completion(choices=choices(**message)))).asked().text == text


NO_TEMPERATURE = failure(
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
    "invalid_request_error",
    "unsupported_value",
)
NO_SCHEMA = failure("Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model.")
NO_MAX_TOKENS = failure(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "invalid_request_error",
    "unsupported_parameter",
)


@pytest.mark.parametrize(
    ("no", "key"),
    [(NO_TEMPERATURE, "temperature"), (NO_SCHEMA, "response_format"), (NO_MAX_TOKENS, "max_tokens")],
    ids=["temperature", "response_format", "max_tokens"],
)
def test_a_parameter_that_a_model_refuses_is_left_out_from_then_on(strong, no, key):
    strong.says((400, no), GOOD)
    assert strong.asked().text == strong.asked().text == SAID
    assert [key in body for body in strong.bodies] == [True, False, False]
    assert [body.get("max_completion_tokens") for body in strong.bodies[1:]] == [
        4096 if key == "max_tokens" else None
    ] * 2


def test_another_model_of_the_same_judge_is_asked_with_everything(strong):
    strong.says((400, NO_TEMPERATURE), GOOD).asked()
    strong.asked(model="openai/n")
    strong.asked(name="other")
    assert ["temperature" in body for body in strong.bodies] == [True, False, True, True]


def test_a_model_may_refuse_all_of_them_once_each(strong):
    strong.says((400, NO_SCHEMA), (400, NO_MAX_TOKENS), (422, NO_TEMPERATURE), GOOD).asked()
    assert set(strong.bodies[-1]) == {"model", "messages", "max_completion_tokens"}
    assert len(strong.bodies) == 4


def test_a_model_that_refuses_what_it_was_not_sent_is_not_asked_for_ever(strong):
    assert type(strong.says((400, NO_TEMPERATURE)).refused()) is JudgeRefused
    assert len(strong.bodies) == 2
    strong.says(GOOD).asked()
    assert "temperature" in strong.bodies[-1]


def test_what_litellm_knows_a_model_refuses_is_not_sent(strong):
    assert strong.says(GOOD).asked(model="openai/gpt-5-mini").text == SAID
    (body,) = strong.bodies
    assert "temperature" not in body
    assert body["max_completion_tokens"] == 4096
    assert body["response_format"]["type"] == "json_schema"


def test_another_vendors_wire_leaves_the_question_as_it_was(strong, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "mine")
    said = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [{"type": "text", "text": SAID}],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 70, "output_tokens": 30},
    }
    messages, schema = str(MESSAGES), str(SCHEMA)
    values = {"model": "anthropic/claude-sonnet-4-5", "url": strong.server.url, "api_key_env": "JUDGE_KEY"}
    answer = strong.says((200, said)).asked(**values)
    assert (answer.text, answer.cut_off, answer.prompt_tokens, answer.completion_tokens) == (SAID, True, 70, 30)
    ((path, headers, body),) = strong.server.asked
    assert (path, headers["x-api-key"]) == ("/v1/messages", "mine")
    assert body["messages"][0]["content"][0]["text"] == "These."
    assert (str(MESSAGES), str(SCHEMA)) == (messages, schema)


def test_questions_side_by_side_are_answered_in_one_loop_after_the_other(strong):
    async def many():
        answers = await asyncio.gather(*(ask("strong", strong.judge(), MESSAGES, SCHEMA) for _ in range(8)))
        await close()
        return [answer.text for answer in answers]

    strong.says(GOOD)
    assert [asyncio.run(many()) for _ in range(3)] == [[SAID] * 8] * 3
    # A connection left open would warn here, and a warning is a failure.
    gc.collect()


def test_loops_in_two_threads_do_not_close_one_anothers_connections(strong):
    async def two():
        asking = [asyncio.to_thread(strong.asked) for _ in range(6)]
        return [answer.text for answer in await asyncio.gather(*asking)]

    strong.says(GOOD)
    assert asyncio.run(two()) == [SAID] * 6


def test_nothing_of_a_closed_loop_is_kept(strong):
    import litellm

    before = set(litellm.in_memory_llm_clients_cache.cache_dict)
    strong.says(GOOD).asked()
    assert set(litellm.in_memory_llm_clients_cache.cache_dict) == before


def test_a_question_that_is_called_off_is_not_mistaken_for_a_failure(strong):
    async def called_off():
        task = asyncio.create_task(ask("strong", strong.judge(), MESSAGES, SCHEMA))
        while not strong.bodies:
            await asyncio.sleep(0.02)
        task.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() == {asyncio.current_task()}
        finally:
            await close()

    strong.says(never)
    asyncio.run(called_off())
    gc.collect()


def test_nothing_is_printed_and_nothing_logged(strong, capfd, caplog):
    caplog.set_level("INFO")
    strong.says(GOOD).asked()
    strong.says((500, failure())).refused()
    strong.refused(model="nobodys/m")
    assert capfd.readouterr() == ("", "")
    assert [record.name for record in caplog.records if record.name.startswith("LiteLLM")] == []
