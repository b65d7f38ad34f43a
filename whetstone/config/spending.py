"""Settings of the spending cap, and what answers of other servers cost."""

from dataclasses import dataclass

from pydantic import Field

from whetstone.config.rewards import Section

MILLION = 1_000_000


class SpendingSettings(Section):
    """One cap on what other companies' servers cost: judges, upstreams, the teacher of a handover. docs/keys.md says
    what is counted."""

    usd_per_day: float | None = Field(None, ge=0)
    """Once all projects together have spent this much in a day (UTC), nothing that has a price is called until the next
    day: judging waits, upstreams answer 429, a handover's policy answers itself. Calls in flight may exceed it. Every
    price must then be known, 0 for what costs nothing. Unset: no cap."""


@dataclass(frozen=True)
class Prices:
    """What a model costs, in US dollars for a million tokens."""

    prompt: float
    completion: float

    @property
    def is_free(self) -> bool:
        """Return whether it costs nothing."""
        return not self.prompt and not self.completion

    def usd(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return what so many tokens cost."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / MILLION


def known_prices(prompt: float | None, completion: float | None) -> Prices | None:
    """Return the prices; None unless both are known."""
    return None if prompt is None or completion is None else Prices(prompt, completion)
