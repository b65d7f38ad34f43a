"""The base model that vLLM serves as a judge: asked directly, by the name it is served under."""

import asyncio
import json

import pytest

from judge.ruler.errors import TooLarge
from judge.ruler.llm import ask, close
from judge.ruler.ranker import reached
from whetstone.config.settings import Settings

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
}


def settings(vllm_url, **judge):
    return Settings(policy="starter", vllm={"urls": (vllm_url,)}, judges={"own": {"model": "base", **judge}})


def asked(vllm_url, text, **judge):
    async def ask_once():
        try:
            own = settings(vllm_url, **judge)
            return await ask("own", reached(own.judges["own"], own), [{"role": "user", "content": text}], SCHEMA)
        finally:
            await close()

    return asyncio.run(ask_once())


def test_base_is_the_served_base_model_at_its_own_address():
    own = settings("http://127.0.0.1:9")
    judge = reached(own.judges["own"], own)
    assert (judge.model, judge.url) == ("openai/starter@v0", "http://127.0.0.1:9/v1")
    prices = [(one.usd_per_million_prompt_tokens, one.usd_per_million_completion_tokens) for one in (
        judge, reached(settings("http://127.0.0.1:9", usd_per_million_prompt_tokens=1.0).judges["own"], own),
    )]  # fmt: skip
    assert prices == [(0.0, 0.0), (1.0, None)], "it costs nothing unless the settings have a price"


@pytest.mark.stack
def test_a_real_vllm_answers_in_the_form_that_was_asked(vllm_url):
    answer = asked(vllm_url, "XOXOX", max_output_tokens=64)
    assert answer.model == "starter@v0"
    assert answer.prompt_tokens > 0
    if not answer.cut_off:
        assert isinstance(json.loads(answer.text)["score"], int)


@pytest.mark.stack
def test_a_real_vllm_refuses_what_is_over_its_context_and_is_understood(vllm_url):
    with pytest.raises(TooLarge):
        asked(vllm_url, "XO" * 20_000, max_output_tokens=64)
