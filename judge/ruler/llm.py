"""Call judge models: messages out, text in. The only file that imports litellm.

`errors` classifies how a request can fail, and what to do then.

Proxies are taken from the environment as litellm does it, for loopback addresses too unless NO_PROXY names them.
"""

import asyncio
import contextlib
import copy
import inspect
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from judge.ruler.errors import JudgeRefused, JudgeUnavailable, Kind, kind_of, message_of, translated
from whetstone.config.rewards import JudgeSettings
from whetstone.observability import tracing

NO_KEY = "none"
"""Sent to the user's own server that has no key: OpenAI's client requires one, and it must not be OPENAI_API_KEY's."""
LOCAL = ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS")
"""Variables that make litellm use the data files in its package."""
REFUSALS = {
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "response_format": re.compile(r"response_?format|json_?schema|structured_?.?output|guided", re.IGNORECASE),
    "max_tokens": re.compile(r"max_completion_tokens", re.IGNORECASE),
}
"""Parameters that not every model accepts, and the wording of the refusals."""

_refused: dict[tuple[str, str], frozenset[str]] = {}
"""The parameters that a judge has refused, by its name and model, since the process began."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A judge's answer and its cost."""

    text: str
    """Empty where the judge refused, or produced no answer."""
    model: str
    """The model that the provider names, else the requested one."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float | None
    """None where the price is unknown; 0.0 is free of charge."""
    seconds: float
    cut_off: bool
    """It reached its maximum number of tokens."""


async def ask(name: str, judge: JudgeSettings, messages: list[dict[str, str]], schema: dict[str, Any]) -> Answer:
    """Return judge `name`'s answer to `messages`, as JSON of `schema` if the model supports that.

    Sends one request, and one more without each parameter that the judge refuses. Call `close` before the event loop
    ends.

    Raises:
        JudgeUnavailable: it is busy, down, slow or unintelligible.
        TooLarge: the prompt exceeds its context.
        JudgeRefused: it will never answer this.
    """
    key = _key(name, judge)
    litellm = load()
    began = time.monotonic()
    traced: dict[str, tracing.Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": judge.model.partition("/")[0],
        "gen_ai.request.model": judge.model,
    }
    with tracing.span(f"chat {judge.model}", traced, "client"):
        try:
            # An HTTP client restarts its time limit with each byte.
            async with asyncio.timeout(judge.timeout_s) as limit:
                response = await _complete(litellm, name, judge, messages, schema, key)
            answer = _answer(litellm, judge, response, time.monotonic() - began)
        except Exception as error:
            if limit.expired():
                raise JudgeUnavailable(f"it took longer than {judge.timeout_s:g} s") from error
            raise translated(error, name, judge) from error
        tracing.tell(
            {
                "gen_ai.response.model": answer.model,
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.completion_tokens,
            }
        )
        return answer


def priced(judge: JudgeSettings) -> bool:
    """Return whether the price of an answer is known: from the settings, or from litellm."""
    if judge.usd_per_million_prompt_tokens is not None and judge.usd_per_million_completion_tokens is not None:
        return True
    try:
        return bool(load().get_model_info(judge.model))
    except Exception:  # litellm raises many kinds of errors for unknown models
        return False


async def close() -> None:
    """Close the connections of the running event loop. Await it once, after the last call in that loop.

    litellm caches its clients by the loop's id, which the next loop may have again.
    """
    cache = getattr(sys.modules.get("litellm"), "in_memory_llm_clients_cache", None)
    if cache is None:
        return
    for key in list(cache.cache_dict):
        if key.endswith(f"-{id(asyncio.get_running_loop())}"):
            client = cache.cache_dict.pop(key, None)
            cache.ttl_dict.pop(key, None)
            closing = getattr(client, "aclose", None) or getattr(client, "close", None)
            with contextlib.suppress(Exception):
                if closing is not None and inspect.isawaitable(closed := closing()):
                    await closed


def _key(name: str, judge: JudgeSettings) -> str | None:
    if judge.api_key_env is None:
        return NO_KEY if judge.url is not None else None
    if key := os.environ.get(judge.api_key_env):
        return key
    raise JudgeRefused(f"there is no key: set the environment variable {judge.api_key_env} of judges.{name}")


def load() -> Any:
    """Import litellm without its logs and network access, and return it.

    The first time takes seconds: no module imports it at the top, and a call in the event loop comes after one outside.
    """
    if "litellm" not in sys.modules:
        # Else it fetches prices and headers, and reads a .env file.
        os.environ |= dict.fromkeys(LOCAL, "True") | {"LITELLM_MODE": "PRODUCTION"}
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # A parameter that a provider lacks must be an error, so that only our code drops it.
    litellm.drop_params = False
    # httpx closes what a cancelled task leaves open; litellm's own transport does so only at garbage collection.
    litellm.disable_aiohttp_transport = True
    for logger in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(logger).disabled = True
    return litellm


async def _complete(
    litellm: Any,
    name: str,
    judge: JudgeSettings,
    messages: list[dict[str, str]],
    schema: dict[str, Any],
    key: str | None,
) -> Any:
    from litellm._internal_context import is_internal_call

    without = _refused.get((name, judge.model), frozenset())
    while True:
        # No callbacks of litellm's own: their worker would outlive the event loop.
        internal = is_internal_call.set(True)
        try:
            # Copies: for some providers litellm removes messages from the list and keys from the schema.
            request = copy.deepcopy({"messages": messages, **_parameters(judge, schema, without)})
            response = await litellm.acompletion(
                model=judge.model,
                api_base=judge.url,
                api_key=key,
                timeout=judge.timeout_s,
                num_retries=0,
                max_retries=0,
                **request,
            )
        except Exception as error:
            if (refused := _refusal(error, without)) is None:
                raise
            without |= {refused}
        else:
            if without:
                _refused[name, judge.model] = without
            return response
        finally:
            is_internal_call.reset(internal)


def _parameters(judge: JudgeSettings, schema: dict[str, Any], without: frozenset[str]) -> dict[str, Any]:
    parameters = {
        "temperature": judge.temperature,
        "max_tokens": judge.max_output_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "scores", "strict": True, "schema": schema},
        },
    }
    if "max_tokens" in without:
        parameters["max_completion_tokens"] = judge.max_output_tokens
    return {key: value for key, value in parameters.items() if key not in without}


def _refusal(error: Exception, without: frozenset[str]) -> str | None:
    """Return the parameter that a request was refused for, if it can be left out."""
    if kind_of(error) is not Kind.REFUSED:
        return None
    message = message_of(error)
    return next((key for key, how in REFUSALS.items() if key not in without and how.search(message)), None)


def _answer(litellm: Any, judge: JudgeSettings, response: Any, seconds: float) -> Answer:
    choice, usage = response.choices[0], getattr(response, "usage", None)
    # Where a provider reports no count, litellm returns 0; no prompt has 0 tokens.
    prompt = getattr(usage, "prompt_tokens", None) or None
    completion = getattr(usage, "completion_tokens", None) if prompt else None
    return Answer(
        text=choice.message.content or "",
        model=response.model or judge.model,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost_usd=_cost_usd(litellm, judge, response, prompt, completion),
        seconds=seconds,
        cut_off=choice.finish_reason == "length",
    )


def _cost_usd(
    litellm: Any, judge: JudgeSettings, response: Any, prompt: int | None, completion: int | None
) -> float | None:
    if prompt is None or completion is None:
        return None
    prices = judge.usd_per_million_prompt_tokens, judge.usd_per_million_completion_tokens
    if prices[0] is not None and prices[1] is not None:
        return (prompt * prices[0] + completion * prices[1]) / 1e6
    # It raises for unknown models.
    with contextlib.suppress(Exception):
        return float(litellm.completion_cost(completion_response=response, model=judge.model))
    return None
