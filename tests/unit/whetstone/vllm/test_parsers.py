import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from whetstone.vllm.parsers import FAMILIES, OTHERS, parsers_of


@pytest.mark.parametrize(
    ("model", "tool_call", "reasoning"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen/Qwen3-0.6B", "hermes", "qwen3"),
        ("Qwen/Qwen3-4B-Instruct-2507", "hermes", None),
        ("Qwen/Qwen3-4B-Thinking-2507/", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "hermes", "deepseek_r1"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "hermes", "deepseek_r1"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes", None),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3_json", None),
        ("/models/Mistral-7B-Instruct-v0.3", "mistral", None),
        ("openai/gpt-oss-20b", "openai", "openai_gptoss"),
        ("whetstone/starter", "hermes", None),
    ],
)
def test_a_models_name_tells_its_parsers(model: str, tool_call: str, reasoning: str | None) -> None:
    assert parsers_of(model) == (tool_call, reasoning)


def test_vllm_has_every_parser_that_is_named() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    for kind, names in (
        ("tool_parsers", {parsers.tool_call for _, parsers in FAMILIES} | {OTHERS.tool_call}),
        ("reasoning", {parsers.reasoning for _, parsers in FAMILIES} - {None}),
    ):
        registered = set(re.findall(r'^    "([^"]+)": \(', (package / kind / "__init__.py").read_text(), re.MULTILINE))
        assert names <= registered
