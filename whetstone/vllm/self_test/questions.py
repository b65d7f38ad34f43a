"""The questions of the self-test, and what each outcome means for the user."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec.structs import replace


class Check(msgspec.Struct, frozen=True):
    """A question and its outcome."""

    name: str
    ok: bool | None
    """None: could not be determined."""
    needed: bool
    """Whether a no makes training impossible."""
    found: str
    """What was observed."""
    means: str
    """What it means for the user, and what to do."""


@dataclass(frozen=True)
class Question:
    """A question and its three outcomes in words."""

    name: str
    yes: str
    no: str
    unknown: str = "Run `whetstone doctor` again when vLLM answers and is idle."
    needed: bool = False
    refusal_is_no: bool = False
    """Whether a refused request means no; otherwise the outcome is unknown."""
    flags: tuple[str, ...] = ()
    """vLLM's arguments that it depends on."""
    of_the_model: str = ""
    """Meaning of a no, and of an unknown outcome, if vLLM was started with all of `flags`."""

    def answer(self, ok: bool | None, observed: str) -> Check:
        """Return the check with this outcome."""
        return Check(self.name, ok, self.needed, observed, self.unknown if ok is None else self.yes if ok else self.no)


def knowing(check: Check, arguments: Sequence[str]) -> Check:
    """Adapt the check to the `arguments` that vLLM was started with, so that it does not advise a flag that is set."""
    question = _DEPENDING.get(check.name)
    if check.ok or question is None or not set(question.flags) <= set(arguments):
        return check
    values = {flag: value for flag, value in pairwise(arguments) if not value.startswith("--")}
    given = " ".join(f"{flag} {values[flag]}" if flag in values else flag for flag in question.flags)
    return replace(check, means=f"vLLM was started with {given}. {question.of_the_model}")


_NO_IDS = (
    "Such calls are answered and recorded, but training needs ids and logprobs: reach vLLM (0.26 or later) directly, "
    "with no gateway between."
)
PLAIN = Question("ids in plain answers", "Plain answers can be trained on.", _NO_IDS, needed=True, refusal_is_no=True)
STREAMED = Question("ids in streams", "Streamed answers can be trained on.", _NO_IDS, needed=True, refusal_is_no=True)
TOOLS = Question(
    "ids beside tools",
    "Calls with tools can be trained on.",
    _NO_IDS,
    "It shows once vLLM takes calls with tools. Training does not need them.",
    needed=True,
)
CALL = Question(
    "tool calls",
    "Apps get tool calls as tool calls.",
    "Apps get no tool calls: start vLLM with --enable-auto-tool-choice and the --tool-call-parser of the model's "
    "family (`hermes` for most Qwen models). Training does not need it.",
    "The model could not be brought to call a tool; if apps need it, check vLLM's --tool-call-parser and "
    "--reasoning-parser. Training does not need it.",
    refusal_is_no=True,
    flags=("--enable-auto-tool-choice", "--tool-call-parser"),
    of_the_model="So no flag is missing: this model does not write tool calls that the parser reads. If apps need "
    "tools, take a model that was trained for them; if this one was, set vllm.tool_call_parser to the parser of its "
    "family. Training does not need it.",
)
REASONING = Question(
    "reasoning",
    "Apps can tell reasoning, where there is any, from the answer; both are recorded and trained on.",
    "Apps cannot tell reasoning from the answer: start vLLM with the --reasoning-parser of the model's family, or "
    "without one where the model does not reason. Training does not need it.",
    "Ask the model something and look whether content comes; without any, vLLM's --reasoning-parser is not that of "
    "the model's family. Training does not need it.",
    flags=("--reasoning-parser",),
    of_the_model="So no flag is missing: this model does not mark its reasoning as the parser expects. If it was "
    "trained to reason, set vllm.reasoning_parser to the parser of its family. Training does not need it.",
)
TEMPLATE = Question(
    "chat template",
    "Each turn adds to one row: a conversation is trained on in one pass.",
    "Each turn opens a row of its own: training is slower, nothing is lost. A --chat-template that leaves earlier "
    "answers as they were sampled changes that.",
    "Whether turns share a row shows in training; nothing is lost either way.",
)
LOGPROBS = Question(
    "logprob mode",
    "Calls at any temperature above 0 can be trained on.",
    "Training takes logprobs for those of the distribution that was sampled from, and these are not: start vLLM with "
    "--logprobs-mode processed_logprobs.",
    "Start vLLM with --logprobs-mode processed_logprobs to be sure; temperature 1 is right with raw ones too.",
    needed=True,
)
DEFAULTS = Question(
    "sampling defaults",
    "What an app leaves unset is neutral, as its record says.",
    "The model's generation_config bends what apps leave unset, so logprobs are not those that training expects: "
    "start vLLM with --generation-config vllm and without --override-generation-config.",
    "Start vLLM with --generation-config vllm to be sure: the model's own defaults would spoil training.",
    needed=True,
)
SEEDS = Question(
    "seeds",
    "An app's `seed` repeats its answer.",
    "An app's `seed` does not repeat its answer; other traffic in the same batch can cause that. "
    "Training does not need it.",
)
ADAPTERS = Question(
    "adapters at run time",
    "New versions can be served without a restart.",
    "No version could be served: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its "
    "environment.",
    needed=True,
)
_DEPENDING = {question.name: question for question in (CALL, REASONING)}
"""Questions whose outcome depends on the model as much as on vLLM's arguments."""
OF_THE_MODEL = frozenset({CALL.name, REASONING.name, TEMPLATE.name})
"""Questions that cannot be answered with some models."""
