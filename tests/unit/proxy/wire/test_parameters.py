"""What each field of a request does to the sampling: the table knows all fields and reads values as vLLM does."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from proxy.wire.parameters import EFFECTS, GROUPS, Effect, constraints_of, grammar_of, why_bent
from proxy.wire.request_body import DEADLY, REFUSED
from whetstone.database.types import as_json_bytes

STRICT = [{"type": "function", "function": {"name": "f", "strict": True}}]
LOOSE = [{"type": "function", "function": {"name": "f", "strict": False}}, {"type": "function"}, 7]
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def vllm_fields(module: str, name: str) -> set[str]:
    """The fields of a request of vLLM's, read from its source: to import it takes ten seconds."""
    tree = ast.parse((vllm_folder() / module).read_text(encoding="utf-8"))
    (class_,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = (node.target for node in class_.body if isinstance(node, ast.AnnAssign))
    return {one.id for one in assigned if isinstance(one, ast.Name) and not one.id.startswith("_")}


def openai_fields(module: Any) -> set[str]:
    kinds = (module.CompletionCreateParamsBase, module.CompletionCreateParamsStreaming)
    return {name for kind in kinds for name in kind.__annotations__}


SCHEMAS = {
    "vLLM's chat": vllm_fields("entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    "vLLM's completions": vllm_fields("entrypoints/openai/completion/protocol.py", "CompletionRequest"),
    "OpenAI's chat": openai_fields(openai_chat),
    "OpenAI's completions": openai_fields(openai_completion),
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_field_that_an_app_may_send_has_a_class(schema: str) -> None:
    fields = SCHEMAS[schema]
    assert {"model", "temperature", "stream", "seed"} <= fields
    assert len(fields) > 15
    assert sorted(fields - EFFECTS.keys() - REFUSED - DEADLY) == []


def test_the_table_has_no_field_that_there_is_not_and_none_twice() -> None:
    assert sorted(EFFECTS.keys() - set().union(*SCHEMAS.values())) == []
    names = [name for group in GROUPS for name in group.names.split()]
    assert sorted(names) == sorted(set(names))
    assert not EFFECTS.keys() & (REFUSED | DEADLY)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.names.split()[0])
def test_what_the_table_relies_on_is_in_vllms_source(group: Any) -> None:
    files = re.findall(r"[\w/]+\.py", group.source)
    text = "".join((vllm_folder() / file).read_text(encoding="utf-8") for file in files)
    names = [name for quoted in re.findall(r"`([^`]+)`", group.source) for name in quoted.split(".")]
    assert files
    assert [name for name in names if not re.search(rf"(class|def) {name}\b", text)] == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "m", "messages": [], "temperature": 0.7, "max_tokens": 4, "stop": "\n", "stream": True},
        {"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "u", "verbosity": "low", "store": True},
        {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"},
        {"web_search_options": {}, "function_call": "auto", "functions": [{"name": "f"}], "moderation": {"model": "m"}},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "ignore_eos": True, "seed": 1, "n": 2},
        {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "documents": [{"title": "t", "text": "x"}]},
        {"add_generation_prompt": False, "continue_final_message": True, "truncate_prompt_tokens": 9},
        {"stop_token_ids": [5], "include_stop_str_in_output": True, "max_completion_tokens": 3, "best_of": 2},
        {"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "min_tokens": 0},
        {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []},
        {"logit_bias": {"5": 0}, "use_beam_search": False, "thinking_token_budget": -1, "watermarking": False},
        {"top_p": None, "response_format": None, "tools": None, "tool_choice": None, "never_heard_of": None},
        {"response_format": {"type": "text"}, "parallel_tool_calls": False},
        {"tools": LOOSE},
        {"tools": LOOSE, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": STRICT, "tool_choice": "none", "parallel_tool_calls": False},
        # Null is not the default: vLLM then sets no grammar.
        {"tools": STRICT, "tool_choice": None},
    ],
)
def test_what_leaves_the_sampling_as_it_is_neither_bars_nor_constrains(values: dict[str, Any]) -> None:
    assert why_bent(values) is None
    assert constraints_of(values) is None


@pytest.mark.parametrize(
    ("values", "constraints"),
    [
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"top_k": 20.0, "top_p": "0.5"}, {"top_k": 20, "top_p": 0.5}),  # vLLM converts them too
        ({"presence_penalty": -1, "frequency_penalty": 2}, {"presence_penalty": -1.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {" 5": 1, "6": 0, "7": -1000, "8": 200}}, {"logit_bias": {"5": 1.0, "7": -100.0, "8": 100.0}}),
        ({"min_tokens": 3, "stop_token_ids": [7]}, {"min_tokens": 3}),
        ({"allowed_token_ids": [3, 4]}, {"allowed_token_ids": [3, 4]}),
        ({"response_format": {"type": "json_object"}}, {"grammar": "response_format"}),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, {"grammar": "response_format"}),
        ({"structured_outputs": {"choice": ["a"]}, "top_p": 0.9}, {"top_p": 0.9, "grammar": "structured_outputs"}),
        ({"tools": LOOSE, "tool_choice": "required"}, {"grammar": "tool_choice"}),
        ({"tools": STRICT, "tool_choice": NAMED, "response_format": SCHEMA}, {"grammar": "tool_choice"}),
        ({"tools": STRICT}, {"grammar": "tools"}),
        ({"tools": [*LOOSE, *STRICT], "tool_choice": "auto"}, {"grammar": "tools"}),
        # One call at most: vLLM sets a grammar that ends the answer after it.
        ({"tools": LOOSE, "parallel_tool_calls": False}, {"grammar": "tools"}),
        ({"thinking_token_budget": 9}, {"grammar": "thinking_token_budget"}),
        ({"thinking_token_budget": 9, "tools": STRICT}, {"grammar": "tools"}),
        # Beside strict tools no text is free any more.
        ({"tools": STRICT, "response_format": SCHEMA}, {"grammar": "response_format"}),
        ({"tool_choice": "required", "temperature": 0.5}, None),  # without tools, which vLLM refuses
        ({"temperature": 0, "top_p": 0.5}, {"top_p": 0.5}),
    ],
)
def test_what_bends_the_sampling_is_named_in_vllms_words(values: dict[str, Any], constraints: Any) -> None:
    assert constraints_of(values) == constraints
    assert grammar_of(values) == (constraints or {}).get("grammar")
    assert why_bent(values) == ("greedy" if values.get("temperature") == 0 else None)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.0, "service_tier": "auto"}, "greedy"),
        ({"temperature": 2.1}, "sampling_bent: temperature"),
        ({"temperature": -1}, "sampling_bent: temperature"),
        ({"temperature": "1"}, "sampling_bent: temperature"),
        ({"bad_words": ["no"]}, "sampling_bent: bad_words"),
        ({"use_beam_search": True}, "sampling_bent: use_beam_search"),
        ({"watermarking": True}, "sampling_bent: watermarking"),
        ({"guided_regex": "a"}, "sampling_bent: guided_regex"),
        ({"never_heard_of": 1}, "sampling_bent: never_heard_of"),
        # Exploring would not help such a call.
        ({"temperature": 0, "bad_words": ["no"]}, "sampling_bent: bad_words"),
        ({"top_p": [0.9]}, "sampling_bent: top_p"),
        ({"top_p": "nan"}, "sampling_bent: top_p"),
        ({"top_k": 0.5}, "sampling_bent: top_k"),
        ({"min_tokens": 1e300}, "sampling_bent: min_tokens"),
        ({"frequency_penalty": 10**400}, "sampling_bent: frequency_penalty"),
        ({"logit_bias": [1]}, "sampling_bent: logit_bias"),
        ({"logit_bias": {"a": 1}}, "sampling_bent: logit_bias"),
        ({"allowed_token_ids": [-1]}, "sampling_bent: allowed_token_ids"),
    ],
)
def test_what_no_step_can_account_for_is_named(values: dict[str, Any], why: str) -> None:
    assert why_bent(values) == why


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(EFFECTS)), JSON, max_size=4))
def test_any_value_is_answered_and_what_is_recorded_is_json(values: dict[str, Any]) -> None:
    why, constraints = why_bent(values), constraints_of(values)
    assert json.loads(as_json_bytes(constraints)) == constraints
    if why is None:
        assert [name for name in values if EFFECTS[name] is Effect.NEVER and values[name] not in (None, [], 0)] == []
