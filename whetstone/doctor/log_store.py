"""SQL of `whetstone doctor`: counts over the newest attempts of one policy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, func, select

from migrations import schema

NEWEST = 2000
"""Most trajectories and completions that are read: enough for shares, and read in a fraction of a second."""
NEWEST_TOOLS = 200
"""Most calls with tools that are read: their descriptions may be long."""

c, g, p, t = schema.completions.c, schema.groups.c, schema.policies.c, schema.trajectories.c


@dataclass(frozen=True)
class LogStatistics:
    """Counts over the newest trajectories of the split `train`, and over what belongs to them."""

    trajectories: int
    grouped: int
    """With another member in their group."""
    ended: int
    rewarded: int
    """Of those that have ended."""
    stale: int
    trained: int
    too_long: int
    longest: int
    """Tokens of the longest, prompt and answers together."""
    base_rewards: tuple[float, ...]
    """Rewards of trajectories that version 0 alone sampled, among the policy's first trajectories."""
    live_rewards: tuple[float, ...]
    """Rewards of those that the live version alone sampled, among the newest."""
    groups: int
    """Compared groups: with two or more rewarded members."""
    uniform: int
    """Of these, those with equal rewards."""
    completions: int
    lacking: tuple[tuple[str, int], ...]
    """`why_not_trained` of completions, and how many, most frequent first."""
    tools: tuple[str, ...]
    """Names of the tools that calls offered."""
    constrained: int = 0
    """Trajectories of which no token is left to learn from: their constraints decided them, or cannot be measured."""
    grammars: tuple[tuple[str, int], ...] = ()
    """Sources of grammars, and how many completions had each, most frequent first."""


def seen(engine: Engine, project: str, policy: str, max_row_tokens: int) -> LogStatistics:
    """Read the newest part of a policy's log, and its beginning. However long the log is, no query reads more."""
    attempts = select(
        t.id, t.group_id, t.state, t.reward, t.why_not_trained, t.first_version, t.last_version, t.tail_completion_id
    ).where(t.project == project, t.policy == policy, t.split == "train")
    newest = attempts.order_by(t.created_at.desc()).limit(NEWEST)
    inner = newest.subquery("newest")
    groups = select(inner.c.group_id).where(inner.c.group_id.is_not(None)).distinct()
    members = select(t.group_id).where(t.project == project, t.group_id.in_(groups))
    compared = select(g.reward_spread).where(g.project == project, g.id.in_(groups), g.rewarded > 1)
    tails = select(c.prompt_tokens + c.completion_tokens).where(
        c.project == project, c.id.in_(select(inner.c.tail_completion_id)), c.completion_tokens.is_not(None)
    )
    calls = select(c.why_not_trained, c.tools, c.constraints).where(c.project == project, c.policy == policy)
    latest_calls = calls.order_by(c.created_at.desc()).limit(NEWEST).subquery("latest_calls")
    offered = select(latest_calls.c.tools).where(latest_calls.c.tools.is_not(None)).limit(NEWEST_TOOLS)
    bent = select(latest_calls.c.constraints).where(latest_calls.c.constraints.is_not(None))
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        rows = connection.execute(newest).all()
        oldest = connection.execute(attempts.order_by(t.created_at).limit(NEWEST)).all()
        shared = set(connection.scalars(members.group_by(t.group_id).having(func.count() > 1)))
        lengths = [tokens for tokens in connection.scalars(tails) if tokens is not None]
        spreads = connection.scalars(compared).all()
        lacking = Counter(connection.scalars(select(latest_calls.c.why_not_trained)))
        tools = connection.scalars(offered).all()
        grammars = Counter(one["grammar"] for one in connection.scalars(bent) if "grammar" in one)
        live = connection.scalar(select(p.live_version).where(p.project == project, p.id == policy))
    ended = [row for row in rows if row.state != "open"]
    completions = sum(lacking.values())
    lacking.pop(None, None)
    return LogStatistics(
        trajectories=len(rows),
        grouped=sum(row.group_id in shared for row in rows),
        ended=len(ended),
        rewarded=sum(row.reward is not None for row in ended),
        stale=sum(row.why_not_trained == "stale" for row in rows),
        trained=sum(row.state == "trained" for row in rows),
        too_long=sum(tokens > max_row_tokens for tokens in lengths),
        longest=max(lengths, default=0),
        base_rewards=_rewards(oldest, 0),
        live_rewards=_rewards(rows, live),
        groups=len(spreads),
        uniform=sum(not spread for spread in spreads),
        completions=completions,
        lacking=tuple(lacking.most_common()),
        tools=tuple(sorted({name for one in tools for name in _names(one)})),
        constrained=sum(row.why_not_trained == "constrained" for row in rows),
        grammars=tuple(grammars.most_common()),
    )


def _rewards(rows: Sequence[Any], version: int | None) -> tuple[float, ...]:
    """Return the rewards of trajectories that this version alone sampled."""
    return tuple(
        row.reward for row in rows if row.first_version == row.last_version == version and row.reward is not None
    )


def _names(tools: Any) -> list[str]:
    """Return the names of tools in the format of chat, responses or messages."""
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    described = [tool.get("function", tool) for tool in listed]
    return [one["name"] for one in described if isinstance(one, dict) and isinstance(one.get("name"), str)]
