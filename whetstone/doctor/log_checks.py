"""Check whether the log contains anything to learn from: the second half of `whetstone doctor`.

`examine` reads; the rest is pure. Each check says what its result means and what to do.
"""

import re
from collections.abc import Sequence

from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.text import Text
from sqlalchemy import Engine

from whetstone.config.settings import Settings
from whetstone.doctor.log_store import LogStatistics, seen
from whetstone.doctor.rendering import checks_shown
from whetstone.domain.why_not_trained import name_of
from whetstone.vllm.self_test.questions import Check, Question

ENOUGH = 20
"""Smallest sample for a share."""
LEAST_GROUPED = 0.5
LEAST_REWARDED = 0.1
LEAST_SUCCESS, MOST_SUCCESS = 0.3, 0.95
"""Below, most groups fail entirely; above, most succeed entirely. A group of 8 at 30 % is mixed in 94 % of cases, at 5
% in 34 %, and then mostly by one member."""
LEAST_MIXED = 0.3
MOST_LOST = 0.1
MOST_STALE = 0.2
HABITS = {
    "greedy": "temperature 0: let the policy explore (docs/inference.md), or set a temperature above 0.",
    "fixed_seed": "a fixed seed: leave it out, or vary it between attempts.",
    "sampling_bent": "a field that is unknown, or whose effect no one can compute again: leave it out "
    "(docs/parameters.md).",
    "media": "images, audio or files in the request: no step reads them; attempts with text only can be trained on.",
    "no_token_ids": "no token ids: a request that has no exact chat, as some of the Responses API have, or a gateway "
    "between the proxy and vLLM (docs/inference.md).",
    "no_logprobs": "`echo`: leave it out.",
}
"""Reason of a completion -> the habit of a framework behind it, and the remedy."""
GRAMMARS = {
    "tools": "strict tools: send `strict: false` where the framework allows it; text before a call stays free.",
    "tool_choice": "`tool_choice` requires a call: let the model choose (`auto`) where it can.",
    "response_format": "a `response_format`: ask for the form in the prompt, and reward it.",
    "structured_outputs": "`structured_outputs`: ask for the form in the prompt, and reward it.",
    "thinking_token_budget": "a budget for thoughts, as Anthropic's `thinking: enabled` sets: allow more, or set an "
    "effort.",
}
"""Source of a grammar -> the habit behind it, and the remedy."""
MOST_NAMED = 3
"""Most habits that one check names."""
_ACTS = re.compile(
    r"(?:^|[_\-.])(?:add|apply|approve|book|buy|cancel|charge|close|commit|create|delete|deploy|drop|edit|exec|execute"
    r"|insert|install|issue|merge|move|order|pay|post|publish|purchase|push|put|refund|remove|reply|restart|run|send|set"
    r"|shell|submit|terminate|transfer|update|upload|write)(?:$|[_\-.])"
)

_MORE = "Not enough data yet."
SIBLINGS = Question(
    "attempts with a sibling",
    "Attempts are compared with one another.",
    "An attempt that is alone is compared with a running mean, which takes many more of them. Give attempts at the "
    "same thing one X-Group-Id, ask with n above 1, cut out what makes prompts differ (proxy.normalise), or have "
    "siblings drawn (docs/groups.md).",
    _MORE,
)
REWARDS = Question(
    "rewards",
    "Enough attempts are rewarded.",
    "Hardly any attempt that has ended is rewarded: post feedback (docs/feedback.md), name functions that tell "
    "(docs/rewards_in_code.md), or have a judge rank groups (docs/ruler.md).",
    _MORE,
)
SUCCESS = Question(
    "base success",
    "The base model succeeds often enough to learn from its own attempts.",
    "Policy gradients strengthen what succeeds, and can only choose among what is there. Below 30 %: warm up by "
    "supervised steps (docs/supervised.md), give parts of the reward for parts of the task, begin with easier ones, or "
    "take a stronger base model. Above 95 % this reward has little left to teach.",
    "No rewards of version 0 between 0 and 1 yet, so this cannot be checked; look at how rewards differ instead.",
)
MIXED = Question(
    "rewards differ within groups",
    "Most comparisons prefer something.",
    "Members of most groups have equal rewards, and such a group teaches nothing (`group_uniform`): finer rewards, "
    "larger groups, or tasks that are neither too hard nor too easy.",
    "Fewer than 20 groups were compared so far.",
)
SAMPLED = Question(
    "sampled freely",
    "Answers are sampled so that they can be trained on.",
    "A good part of the answers cannot be weighed because of how they were requested.",
    _MORE,
)
CONSTRAINED = Question(
    "left to choose",
    "Grammars and truncations leave enough to choose.",
    "A grammar or a truncation decided all tokens of these attempts (`constrained`), and what was decided "
    "teaches nothing.",
    _MORE,
)
TOOLS = Question(
    "tools without effects",
    "No tool that calls offered looks as if it changed anything.",
    "Several attempts at the same thing do it several times. Run training attempts in a sandbox, or mark "
    "what must not be repeated with X-No-Train. This check goes by the tools' names only.",
    "No call offered tools.",
)
LENGTH = Question(
    "length",
    "Every attempt fits into a row.",
    "Longer attempts are left out (`too_long`): raise trainer.max_row_tokens as far as the trainer's memory allows, or "
    "shorten the conversations.",
    _MORE,
)
FRESH = Question(
    "fresh",
    "Attempts are trained on soon after they were made.",
    "Steps come too slowly for the traffic, and what is older than trainer.max_staleness updates is given up: a faster "
    "trainer, larger steps (trainer.max_groups_per_step), or less traffic that trains (X-No-Train).",
    "Too few were trained on or given up to tell.",
)


def examine(engine: Engine, settings: Settings) -> tuple[Check, ...]:
    """Check how well the log of the settings' policy suits training."""
    return checks(seen(engine, settings.project, settings.policy, settings.trainer.max_row_tokens))


def checks(log: LogStatistics) -> tuple[Check, ...]:
    """Return one check for each question."""
    return (
        _share(SIBLINGS, log.grouped, log.trajectories, "attempts are in a group with another", LEAST_GROUPED),
        _share(REWARDS, log.rewarded, log.ended, "ended attempts have a reward", LEAST_REWARDED),
        _success(log),
        _share(MIXED, log.groups - log.uniform, log.groups, "groups have different rewards", LEAST_MIXED),
        _sampled(log),
        _constrained(log),
        _tools(log.tools),
        LENGTH.answer(
            None if log.trajectories < ENOUGH else not log.too_long,
            f"{_of(log.too_long, log.trajectories)} too long; longest {log.longest}",
        ),
        FRESH.answer(
            log.stale <= MOST_STALE * (log.stale + log.trained) if log.stale + log.trained >= ENOUGH else None,
            f"{log.trained} trained on, {log.stale} given up as stale",
        ),
    )


def shown(results: Sequence[Check], policy: str, *, verbose: bool) -> RenderableType:
    """Return the checks, and the doubts below them; `verbose`: each check with its meaning."""
    verdict = Text("nothing in the log speaks against training on it", style="bold green")
    if all(check.ok is None for check in results):
        verdict = Text(f"too little is recorded yet: most checks need {ENOUGH} attempts with rewards", style="yellow")
        if not verbose:
            return Group(Text(_title(policy), style="bold"), verdict)
    elif doubts := ", ".join(check.name for check in results if check.ok is False):
        verdict = Text(f"training may not work well on this: {doubts}", style="yellow")
    return checks_shown(_title(policy), results, "not known yet (--verbose says why)", verdict, verbose=verbose)


def _title(policy: str) -> str:
    return f"the log of {policy}, its newest attempts"


def _share(question: Question, part: int, whole: int, words: str, least: float) -> Check:
    return question.answer(None if whole < ENOUGH else part >= least * whole, f"{_of(part, whole)} {words}")


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def _success(log: LogStatistics) -> Check:
    rewards = log.base_rewards
    if len(rewards) < ENOUGH or not all(0 <= reward <= 1 for reward in rewards):
        return SUCCESS.answer(None, f"{len(rewards)} rewards of version 0")
    mean = sum(rewards) / len(rewards)
    summary = f"mean reward {mean:.2f} of {len(rewards)} attempts of version 0"
    if log.live_rewards:
        summary += f"; {sum(log.live_rewards) / len(log.live_rewards):.2f} of the live one's {len(log.live_rewards)}"
    return SUCCESS.answer(LEAST_SUCCESS <= mean <= MOST_SUCCESS, summary)


def _sampled(log: LogStatistics) -> Check:
    bent = [(why, count) for why, count in log.lacking if name_of(why) in HABITS]
    lost = sum(count for _, count in bent)
    named = "".join(f"; {why} {count}" for why, count in bent)
    ok = None if log.completions < ENOUGH else lost <= MOST_LOST * log.completions
    check = SAMPLED.answer(ok, f"{_of(lost, log.completions)} answers cannot be weighed{named}")
    return _with_habits(check, [HABITS[name_of(why)] for why, _ in bent])


def _constrained(log: LogStatistics) -> Check:
    named = "".join(f"; answers with a grammar from {source}: {count}" for source, count in log.grammars)
    ok = None if log.ended < ENOUGH else log.constrained <= MOST_LOST * log.ended
    check = CONSTRAINED.answer(
        ok, f"{_of(log.constrained, log.ended)} attempts were decided by what was allowed{named}"
    )
    return _with_habits(check, [GRAMMARS[source] for source, _ in log.grammars if source in GRAMMARS])


def _with_habits(check: Check, habits: Sequence[str]) -> Check:
    """Return a check that failed with the habits behind it, the most frequent first."""
    if check.ok is not False:
        return check
    return replace(check, means=" ".join([check.means, *list(dict.fromkeys(habits))[:MOST_NAMED]]))


def _tools(names: Sequence[str]) -> Check:
    if not names:
        return TOOLS.answer(None, "no tools")
    # bookFlight and book-flight are book_flight.
    acting = [name for name in names if _ACTS.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())]
    return TOOLS.answer(not acting, f"may act: {', '.join(acting)}" if acting else f"offered: {', '.join(names)}")
