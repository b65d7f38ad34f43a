"""The edge to the judge models: messages out, text in. The only file that has litellm.

It knows no prompt, no score and no table. How a request can fail, and what to do then, is in `errors`.
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

from judge.ruler.errors import Kind, Later, TooLarge, Unable, Unanswered, kind_of, said_by, translated
from whetstone import tracing
from whetstone.worth import JudgeSettings

__all__ = ["Answer", "Later", "TooLarge", "Unable", "Unanswered", "ask", "close", "load", "priced"]

NO_KEY = "none"
"""Sent to a server of one's own that has no key: OpenAI's client wants one, and it must not be OPENAI_API_KEY's."""
LOCAL = ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS")
"""Variables that have litellm take what came with it."""
REFUSALS = {
    "temperature": re.compile(r"temperature", re.IGNORECASE),
    "response_format": re.compile(r"response_?format|json_?schema|structured_?.?output|guided", re.IGNORECASE),
    "max_tokens": re.compile(r"max_completion_tokens", re.IGNORECASE),
}
"""Parameters that not every model takes, and how it says so."""

_refused: dict[tuple[str, str], frozenset[str]] = {}
"""Which of them a judge has refused, by its name and model, since the process began."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a judge said and what it cost."""

    text: str
    """Empty where it refused, or came to no answer."""
    model: str
    """What the provider says has answered, else what was asked."""
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float | None
    """None where nobody knows the price; 0.0 is free of charge."""
    seconds: float
    cut_off: bool
    """It reached the most tokens it may have."""


async def ask(name: str, judge: JudgeSettings, messages: list[dict[str, str]], schema: dict[str, Any]) -> Answer:
    """What judge `name` says to `messages`, as JSON of `schema` if it can be held to that.

    It is asked once, and once more without each parameter that it refuses. `close` before the event loop ends.

    Raises:
        Later: it is busy, down, slow or unintelligible.
        TooLarge: the prompt is over its context.
        Unable: it will not answer, whenever it is asked.
    """
    key = _key(name, judge)
    litellm = _litellm()
    began = time.monotonic()
    with tracing.span(f"chat {judge.model}", _traced(judge), "client"):
        try:
            # The time limit of an HTTP client starts again with each byte.
            async with asyncio.timeout(judge.timeout_s) as limit:
                response = await _asked(litellm, name, judge, messages, schema, key)
            answer = _answer(litellm, judge, response, time.monotonic() - began)
        except Exception as error:
            if limit.expired():
                raise Later(f"it took longer than {judge.timeout_s:g} s") from error
            raise translated(error, name, judge) from error
        tracing.tell(
            {
                "gen_ai.response.model": answer.model,
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.completion_tokens,
            }
        )
        return answer


def _traced(judge: JudgeSettings) -> dict[str, tracing.Value]:
    provider = judge.model.partition("/")[0]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": judge.model,
    }


def load() -> None:
    """Load what asking needs, which takes seconds; else the first `ask` does, in the event loop."""
    _litellm()


def priced(judge: JudgeSettings) -> bool:
    """Whether what an answer costs is known: by the settings, or by litellm."""
    if judge.usd_per_million_prompt_tokens is not None and judge.usd_per_million_completion_tokens is not None:
        return True
    try:
        return bool(_litellm().get_model_info(judge.model))
    except Exception:  # of many kinds, for what it does not know
        return False


async def close() -> None:
    """Close the connections of the running event loop. Awaited once, when nothing is asked there any more.

    litellm keeps its clients by the loop's id, which the next loop may well have again.
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
    raise Unable(f"there is no key: set the environment variable {judge.api_key_env} of judges.{name}")


def _litellm() -> Any:
    """The package, told to be quiet and to stay off the network; it takes seconds, so no module imports it."""
    if "litellm" not in sys.modules:
        # Else it fetches prices and headers, and reads a .env file.
        os.environ |= dict.fromkeys(LOCAL, "True") | {"LITELLM_MODE": "PRODUCTION"}
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    # What a provider lacks is an error, so that it is dropped in one place, ours.
    litellm.drop_params = False
    # httpx closes what a cancelled task leaves; what litellm has in its place does so when it is collected.
    litellm.disable_aiohttp_transport = True
    for logger in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(logger).disabled = True
    return litellm


async def _asked(
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
            # Copies: for some providers litellm takes messages out of the list and keys out of the schema.
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
    """The parameter that a request was refused for, if it can do without."""
    if kind_of(error) is not Kind.REFUSED:
        return None
    said = said_by(error)
    return next((key for key, how in REFUSALS.items() if key not in without and how.search(said)), None)


def _answer(litellm: Any, judge: JudgeSettings, response: Any, seconds: float) -> Answer:
    choice, usage = response.choices[0], getattr(response, "usage", None)
    # Where a provider counts nothing, litellm says 0; no prompt has 0 tokens.
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
    # It raises for what it does not know.
    with contextlib.suppress(Exception):
        return float(litellm.completion_cost(completion_response=response, model=judge.model))
    return None
