"""Choose vLLM's parsers for a model's tool calls and reasoning, by the model's name.

From vLLM's own pages "Tool Calling" and "Reasoning Outputs" (0.32). The first family that matches wins. Any other model
gets the `hermes` parser, which leaves text alone that is not a call in its format; its reasoning stays in its text.
"""

import re
from typing import NamedTuple


class Parsers(NamedTuple):
    """Names of parsers, as vLLM's --tool-call-parser and --reasoning-parser take them."""

    tool_call: str
    reasoning: str | None = None


OTHERS = Parsers("hermes")
FAMILIES: tuple[tuple[str, Parsers], ...] = (
    # Before the models that they were made from: their names contain both.
    (r"hermes", Parsers("hermes")),
    (r"deepseek-r1-0528-qwen3", Parsers("hermes", "deepseek_r1")),
    (r"gpt-oss", Parsers("openai", "openai_gptoss")),
    (r"qwen3-?coder", Parsers("qwen3_coder")),
    # Never reasons: a parser would take its whole answer for reasoning.
    (r"qwen3.*instruct", Parsers("hermes")),
    (r"qwen3", Parsers("hermes", "qwen3")),
    (r"qwq", Parsers("hermes", "deepseek_r1")),
    (r"deepseek-r1-distill", Parsers("hermes", "deepseek_r1")),
    (r"deepseek-r1", Parsers("deepseek_v3", "deepseek_r1")),
    (r"deepseek-v3\.1", Parsers("deepseek_v31", "deepseek_v3")),
    (r"deepseek-v3\.2", Parsers("deepseek_v32", "deepseek_v3")),
    (r"deepseek-v3", Parsers("deepseek_v3")),
    (r"llama-?4", Parsers("llama4_pythonic")),
    (r"llama-?3", Parsers("llama3_json")),
    (r"magistral", Parsers("mistral", "mistral")),
    (r"mistral|mixtral|ministral|devstral", Parsers("mistral")),
    (r"glm-?4\.7", Parsers("glm47", "glm47")),
    (r"glm-?4\.[56]", Parsers("glm45", "glm45")),
    (r"kimi-?k2", Parsers("kimi_k2", "kimi_k2")),
    (r"minimax-?m2", Parsers("minimax_m2", "minimax_m2")),
    (r"gemma-?4", Parsers("gemma4", "gemma4")),
    (r"granite-?4", Parsers("granite4")),
    (r"granite", Parsers("granite")),
    (r"olmo-?3", Parsers("olmo3", "olmo3")),
    (r"seed-?oss", Parsers("seed_oss", "seed_oss")),
    (r"phi-?4-mini", Parsers("phi4_mini_json")),
    (r"xlam", Parsers("xlam")),
)
"""Pattern of the name's last part, in lower case, and the parsers of those models."""


def parsers_of(model: str) -> Parsers:
    """Return the parsers of a model, by the last part of its folder or hub name."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((parsers for pattern, parsers in FAMILIES if re.search(pattern, name)), OTHERS)
