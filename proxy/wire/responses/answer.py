"""Translate a whole chat answer into the object that vLLM's own /v1/responses would have returned. Pure.

Follows the types of vLLM 0.32 with openai 2.54, whose classes vLLM fills: keys, their order, their nulls (with openai
3, tools and their calls also have `async`). It reads chat answers to requests from `responses.request.chat_of`, of a
vLLM with a tool or reasoning parser, started with `--generation-config vllm`. Ids are made from the chat answer's.
Streams are handled by `responses.stream`.

Chat does not report three things. How much of the prompt was cached: with `--enable-prompt-tokens-details` it does,
otherwise the answer reports 0. Whether a whole answer with a tool call (`tool_choice: auto`) that used every token
it had would have ended there: it is treated as cut off, `incomplete`. And whether vLLM dropped `text` because a grammar
for tools took its place: that is so with all tool parsers that have such a grammar, as hermes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.wire.responses import schema, tools
from proxy.wire.responses.custom import input_of
from proxy.wire.responses.shapes import repeat

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}

COLDEST = 0.01
"""vLLM raises a temperature between 0 and this value to it (`vllm.sampling_params`)."""


class Echo(msgspec.Struct, frozen=True):
    """A Responses object without its output: what was requested, and which model answers."""

    id: str
    created_at: int
    model: str
    values: dict[str, Any]
    max_output_tokens: int

    def response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the whole object. `usage` is None until the answer has ended."""
        values = self.values
        temperature = values.get("temperature")
        temperature = 1.0 if temperature is None else float(temperature)
        top_p = values.get("top_p")
        return {
            "id": self.id,
            "created_at": self.created_at,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": values.get("instructions"),
            "metadata": values.get("metadata"),
            "model": self.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": values.get("parallel_tool_calls") is not False,
            "temperature": max(temperature, COLDEST) if temperature else temperature,
            "tool_choice": _tool_choice(values),
            "tools": [tools.repeat_tool(tool) for tool in values.get("tools", ())],
            # At temperature 0 vLLM ignores it.
            "top_p": float(top_p) if temperature and top_p is not None else 1.0,
            "background": False,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": values.get("max_tool_calls"),
            "previous_response_id": values.get("previous_response_id"),
            "prompt": None,
            "reasoning": repeat(schema.REASONING, values.get("reasoning")),
            "service_tier": values.get("service_tier") or "auto",
            "status": status,
            "text": None if _grammar_of_tools(values) else repeat(schema.TEXT, values.get("text")),
            "top_logprobs": (values.get("top_logprobs") or 0) if schema.wants_logprobs(values) else None,
            "truncation": values.get("truncation") or "disabled",
            "usage": usage,
            "user": values.get("user"),
            "presence_penalty": float(values.get("presence_penalty") or 0),
            "frequency_penalty": float(values.get("frequency_penalty") or 0),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def ended(self, output: list[dict[str, Any]], finish_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the object of an answer that has ended, with chat's finish reason and usage."""
        return self.response("incomplete" if finish_reason == "length" else "completed", output, _usage(usage))

    def names(self) -> tools.ToolNames:
        """Return how the model's names of tools are written in this answer."""
        return tools.names_of(self.values.get("tools") or [])

    @property
    def shows_reasoning(self) -> bool:
        """Return whether reasoning is part of the answer."""
        return schema.shows_reasoning(self.values)

    @property
    def shows_logprobs(self) -> bool:
        """Return whether logprobs are part of the answer. vLLM hides them with the reasoning."""
        return self.shows_reasoning and schema.wants_logprobs(self.values)


def echo_of(chat: dict[str, Any], values: dict[str, Any], prompt_tokens: int, max_model_len: int) -> Echo:
    """Return what an answer repeats. `chat` is the answer or its first chunk, `values` the request; lengths in
    tokens."""
    room = max_model_len - prompt_tokens
    limit = values.get("max_output_tokens")
    return Echo(
        id=id_of(chat["id"]),
        created_at=chat["created"],
        model=chat["model"],
        values=values,
        max_output_tokens=room if limit is None else min(limit, room),
    )


def id_of(chat_id: str) -> str:
    """Return the id that the app sees, from the chat answer's."""
    return f"resp_{chat_id.removeprefix('chatcmpl-')}"


def item_id(kind: str, response_id: str, output_index: int) -> str:
    """Return the id of an output item of this type at this index."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{output_index}"


def answer_of(chat: dict[str, Any], values: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Return a whole chat answer as a Responses object.

    Args:
        chat: the answer, without what capture added.
        values: the Responses request that it answers.
        max_model_len: most tokens of prompt and answer together, from GET /v1/models of vLLM.
    """
    choice, usage = chat["choices"][0], chat["usage"]
    echo = echo_of(chat, values, usage["prompt_tokens"], max_model_len)
    finish_reason = choice["finish_reason"]
    if finish_reason == "tool_calls" and values.get("tool_choice", "auto") == "auto":
        finish_reason = "length" if usage["completion_tokens"] >= echo.max_output_tokens else "stop"
    message = choice["message"] if echo.shows_reasoning else choice["message"] | {"reasoning": None}
    logprobs = logprobs_of(choice) if echo.shows_logprobs else None
    return echo.ended(output_of(message, echo.id, echo.names(), logprobs), finish_reason, usage)


def error_of(body: bytes, status: int, max_model_len: int) -> bytes:
    """Return an error that vLLM answered to a chat as it would answer it to a Responses app.

    A field's name differs; and for a prompt that fills the whole length, vLLM's chat reports that no token is left.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        match error["param"]:
            case "max_completion_tokens":
                message = error["message"].replace("max_completion_tokens", "max_output_tokens")
                error |= {"message": message, "param": "max_output_tokens"}
            case "max_tokens":
                message = f"The engine prompt length {max_model_len} exceeds the max_model_len {max_model_len}. "
                error |= {
                    "message": message + "Please reduce prompt.",
                    "type": "invalid_request_error",
                    "param": "input",
                }
            case _:
                return body
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return body
    return msgspec.json.encode({"error": error})


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a message's part with this text, and the logprobs of its tokens."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def message_item(item_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """Return a message as an output item."""
    return {
        "id": item_id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def reasoning_item(item_id: str, text: str | None, status: str | None) -> dict[str, Any]:
    """Return reasoning as an output item. `text` is None while it is incomplete."""
    return {
        "id": item_id,
        "summary": [],
        "type": "reasoning",
        "content": None if text is None else [{"text": text, "type": "reasoning_text"}],
        "encrypted_content": None,
        "status": status,
    }


def call_item(item_id: str, call_id: str, name: tuple[str | None, str], arguments: str, status: str) -> dict[str, Any]:
    """Return a function call as an output item. `name` is the namespace, if any, and the name in it. `arguments` is
    JSON if the model wrote it correctly."""
    return {
        "arguments": arguments,
        "call_id": call_id,
        "name": name[1],
        "type": "function_call",
        "id": item_id,
        "caller": None,
        "namespace": name[0],
        "status": status,
    }


def custom_call_item(item_id: str, call_id: str, name: str, text: str) -> dict[str, Any]:
    """Return the call of a custom tool with this text as an output item."""
    return {
        "call_id": call_id,
        "input": text,
        "name": name,
        "type": "custom_tool_call",
        "id": item_id,
        "caller": None,
        "namespace": None,
    }


def logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the logprobs of a chat's choice, or of a chunk's, token by token."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    return [
        {**_logprob(token), "top_logprobs": [_logprob(other) for other in token["top_logprobs"]]} for token in content
    ]


def _logprob(token: dict[str, Any]) -> dict[str, Any]:
    # Numbers near 0 as vLLM writes them: -8.1e-05, where msgspec writes -0.000081.
    return {"token": token["token"], "bytes": token["bytes"], "logprob": msgspec.Raw(repr(token["logprob"]).encode())}


def output_of(
    message: Mapping[str, Any],
    response_id: str,
    names: tools.ToolNames = tools.NO_NAMES,
    logprobs: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return a chat message as output items. `names`: how its tools are written; `logprobs`: those of its tokens."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning"):
        items.append(reasoning_item(item_id("reasoning", response_id, 0), message["reasoning"], None))
    if message.get("content"):
        content = [text_part(message["content"], logprobs or None)]
        items.append(message_item(item_id("message", response_id, len(items)), content, "completed"))
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in names.custom:
            called_id = item_id("custom_tool_call", response_id, len(items))
            items.append(custom_call_item(called_id, call["id"], name, input_of(arguments)))
        else:
            called_id = item_id("function_call", response_id, len(items))
            items.append(call_item(called_id, call["id"], names.split(name), arguments, "completed"))
    return items


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage in tokens. The lists by turn are for tools that vLLM itself calls."""
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": prompt.get("cached_tokens") or 0,
            "cache_write_tokens": prompt.get("created_cache_tokens") or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": completion.get("reasoning_tokens") or 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage["total_tokens"],
    }


def _tool_choice(values: dict[str, Any]) -> Any:
    given, choice = values.get("tools"), values.get("tool_choice", "auto")
    if not given:
        return "none"
    if tools.names_function(choice):
        choice = choice | {"name": tools.flat_choice(choice["name"], given)}
    return repeat(schema.TOOL_CHOICE, choice)


def _grammar_of_tools(values: dict[str, Any]) -> bool:
    """Return whether the answer follows a grammar for tools (`vllm.parser.abstract_parser`, `_apply_structural_tag`).
    vLLM puts it in the place of `text`, and joins a format that `text` requested to it."""
    choice, functions = values.get("tool_choice", "auto"), tools.functions_of(values.get("tools") or [])
    if choice == "none" or not functions or (isinstance(choice, dict) and not tools.names_function(choice)):
        return False
    form = (values.get("text") or {}).get("format") or {"type": "text"}
    free = form["type"] == "text" and values.get("structured_outputs") is None
    single = values.get("parallel_tool_calls") is False and free
    return choice != "auto" or single or any(function.get("strict") for function in functions)
