"""Ask a candidate prompts that the base model can answer, and see whether it still can.

The prompts are in `retention.jsonl`: instructions, tool format, language, refusals, arithmetic, with exact checks. Both
models answer at temperature 0. The base model's answers are the same at every step: they are sampled once, and whether
each was right is stored in the data folder.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from trainer.domain.claims import Claim
from trainer.domain.gate.retention import RetentionPrompt, chosen, looks, read_suite, retained
from trainer.domain.gate.verdict import Verdict
from trainer.gate.probe import BAD_REQUEST
from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused

SUITE = Path(__file__).with_name("retention.jsonl")
MOST_TOKENS = 48
"""Longest answer."""
AT_ONCE = 16
"""Requests in flight."""
TIMEOUT_S = 300.0
"""Of one answer; a CPU that is also training takes its time."""

log = logging.getLogger(__name__)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Chat(msgspec.Struct):
    choices: list[_Choice]


def run_retention(vllm: Vllm, claim: Claim, settings: Settings, renew: Callable[[], None]) -> Verdict:
    """Ask the candidate as many prompts as a decision needs; return the decision.

    `renew` renews the step's lease.

    Raises:
        VllmDown: the server cannot be reached, or has lost what it had loaded.
    """
    suite = read_suite(SUITE.read_bytes())
    base = _base_right(vllm, version_id(claim.policy, 0), suite, settings, renew)
    to_ask = chosen(suite, base)
    skipped = "".join(
        f"; skipped: {kind}, of which the base model answers {share:.0%} right"
        for kind, share in to_ask.skipped.items()
    )
    if not to_ask.places:
        return Verdict("pass", f"no prompts{skipped}")
    answered: list[bool] = []
    verdict = Verdict("testing", "")
    for look in looks(len(to_ask.places)):
        places = to_ask.places[len(answered) : look]
        answered += _right(vllm, claim.name_out, [suite[place] for place in places])
        renew()
        before = [base[place] for place in to_ask.places[:look]]
        verdict = retained(before, answered, len(to_ask.places), settings.gate)
        if verdict.decision != "testing":
            break
    return Verdict(verdict.decision, verdict.reason + skipped, verdict.figures, verdict.looked)


def _base_right(
    vllm: Vllm,
    name: str,
    suite: Sequence[RetentionPrompt],
    settings: Settings,
    renew: Callable[[], None],
) -> list[bool]:
    """Return whether the base model answers each prompt right: as it is stored, or asked and then stored."""
    of_model = hashlib.sha256(settings.model.encode() + SUITE.read_bytes()).hexdigest()[:16]
    path = settings.data.resolve() / "retention" / f"{of_model}.json"
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=list[bool])
        if len(stored) == len(suite):
            return stored
    except (OSError, msgspec.MsgspecError):  # not there yet, or half written: they are asked
        pass
    log.info("the base model answers %d fixed prompts, once", len(suite))
    right: list[bool] = []
    for start in range(0, len(suite), AT_ONCE):
        right += _right(vllm, name, suite[start : start + AT_ONCE])
        renew()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(right))
    return right


def _right(vllm: Vllm, name: str, prompts: Sequence[RetentionPrompt]) -> list[bool]:
    """Return whether a version answers each prompt right."""

    def is_right(prompt: RetentionPrompt) -> bool:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": prompt.prompt}],
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
        }
        try:
            answer = msgspec.convert(vllm.answer("POST", "/v1/chat/completions", body, TIMEOUT_S), _Chat)
        except VllmRefused as error:
            if error.status == BAD_REQUEST:  # a model without a chat template, for example, answers none
                return False
            raise VllmDown(f"{name} answers no more: {error}") from error
        except ValueError as error:
            raise VllmDown(f"{name} answers, but not as vLLM does: {error}") from error
        return prompt.check.holds(answer.choices[0].message.content or "")

    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        return list(threads.map(is_right, prompts))
