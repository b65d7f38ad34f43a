"""Check that a policy takes over from a model of another server as soon as it is as good, and is sent back when it is
not.

Starts the whole stack with the starter, which learns tic-tac-toe, and beside it a program that plays better than the
starter does at first: with a chance of SKILL it plays well, else at random. It answers as another server, the teacher
of a handover. The demo's agent plays, with the policy's name as its model, and notices none of this. The policy trains
on its share of the games, until it answers the largest share. Then version 0 is made live again: a bad policy, planted.
Exit 0 only if the share rose to the last, a game cost less there than at the first share, the planted version was sent
back within MOST groups of each, and no request failed. Loopback only.
"""

import json
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select

from benchmarks.fakes.teacher import Teacher, next_move
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import LearningPolicy
from benchmarks.real.report import circumstances
from migrations import schema
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.demo.agent_process import app, report_of
from whetstone.demo.demo import AGENT
from whetstone.demo.tictactoe import game
from whetstone.registry.handover import HandoverState, read_handover
from whetstone.stack.stack import Stack, running

SKILL = 0.5
TEACHER = "player"
SHARES = (0.3, 0.6, 0.8)
PRICES = (2.5, 10.0)
"""Dollars for a million tokens of prompts and of answers: what a large model costs."""
MOST = 200
"""Groups of the smaller sample after which a planted bad version must have been sent back."""
PAUSE_S = 0.2
"""Rest of each of the agent's connections between two games."""
SERVED_S = 30
"""How long the policy answers the last share before a bad version is planted."""

g, c, t = schema.gate_results.c, schema.completions.c, schema.trajectories.c


def _plays(messages: list[dict[str, Any]]) -> str:
    """Return a good move with a chance of SKILL, else any legal one."""
    if random.random() < SKILL:
        return next_move(messages)
    return random.choice(game.free(messages[-1]["content"]))


def _figures(step: dict[str, Any]) -> str:
    return f"{step['trajectories']} games  reward {step['reward_mean']:.3f}  {step['seconds']:.1f} s"


class Scene:
    """The stack while its agent plays."""

    def __init__(self, stack: Stack, policy: LearningPolicy, console: Console) -> None:
        self.policy, self.console = policy, console
        self.engine = connect(stack.settings.database_url).execution_options(isolation_level="AUTOCOMMIT")
        self.project, self.name = stack.settings.project, stack.settings.policy
        self.periods: list[dict[str, Any]] = []

    @property
    def state(self) -> HandoverState:
        with self.engine.connect() as connection:
            state = read_handover(connection, self.project, self.name)
        assert state is not None
        return state

    def until(self, share: float, process: Any, deadline_s: float) -> bool:
        """Wait until the policy answers this share; return whether it does before the deadline."""
        until = time.monotonic() + deadline_s
        before = self.state
        began = before.since
        while before.share != share and time.monotonic() < until:
            self.policy.look(process)
            after = self.state
            if after.since == before.since:
                continue
            if after.share != before.share:
                self.periods.append(self.period(before.share, began, after.since))
                began = after.since
                self.console.print(f"{after.share:.0%} of the games: {self.decisions[-1]['reason']}", highlight=False)
            before = after
        return self.state.share == share

    def period(self, share: float, since: datetime, until: datetime) -> dict[str, Any]:
        """Return what was played meanwhile, and what the teacher's part costs a thousand games."""
        within = (c.project == self.project, c.created_at >= since, c.created_at < until)
        # Of another server's answers no tokens are stored: here each answer is one.
        tokens = select(func.sum(c.prompt_tokens), func.count()).where(*within, c.policy == TEACHER)
        played = select(t.policy, func.count(), func.avg(t.reward)).where(
            t.project == self.project, t.created_at >= since, t.created_at < until, t.reward.is_not(None)
        )
        with self.engine.connect() as connection:
            read, written = connection.execute(tokens).one()
            rows = connection.execute(played.group_by(t.policy)).all()
        games = sum(row[1] for row in rows)
        usd = ((read or 0) * PRICES[0] + (written or 0) * PRICES[1]) / 1e6
        return {
            "share": share,
            "seconds": (until - since).total_seconds(),
            "games": {row[0]: row[1] for row in rows},
            "won": {row[0]: round(row[2], 4) for row in rows},
            "usd_per_1000_games": 1000 * usd / max(1, games),
        }

    @property
    def decisions(self) -> list[dict[str, Any]]:
        query = select(g.decision, g.reason, g.figures, g.created_at, g.version)
        with self.engine.connect() as connection:
            rows = connection.execute(query.where(g.test == "handover").order_by(g.created_at)).all()
        return [dict(row._mapping) for row in rows]


def main() -> int:
    """Run the check; return its exit code."""
    parser = parser_of(
        "Whether a policy takes over from another server's model.",
        {
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the games"},
            "--minutes": {"type": float, "default": 15, "help": "most minutes until the last share"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--json": {"type": Path, "help": "a file for all figures"},
        },
    )
    args = parser.parse_args()
    began = time.monotonic()
    with opened("handover", args.data, width=None) as (data, console), Teacher(_plays) as program:
        prices = dict(zip(("usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"), PRICES, strict=True))
        settings = load(
            environment={},
            upstreams={"program": {"url": program.url, "models": {TEACHER: "program"}}},
            learning={"starter": {"handover": {"teacher": TEACHER, "shares": SHARES, **prices}}},
            data=data,
            seed=args.seed,
            proxy__port=0,
        )
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            scene = Scene(stack, LearningPolicy(stack, AGENT, _figures, console), console)
            options = ["--games", "0", "--pause-s", str(PAUSE_S), "--seed", str(args.seed)]
            with app(stack, AGENT, options) as process:
                needed = _played(scene, process, 60 * args.minutes)
                process.terminate()
                failed = report_of(process, stack)["failed_requests"]
            decisions = scene.decisions
    costs = {one["share"]: one["usd_per_1000_games"] for one in scene.periods}
    holds = {
        "the policy took over": SHARES[-1] in costs,
        "a game costs less": costs.get(SHARES[-1], costs[SHARES[0]]) < costs[SHARES[0]],
        f"the planted version was sent back within {MOST} groups": needed is not None and needed <= MOST,
        "no request failed": not failed,
    }
    console.print(_table(scene.periods))
    for what, does_hold in holds.items():
        console.print(f"{'yes' if does_hold else '[red]no[/red]'}: {what}", highlight=False)
    seconds = round(time.monotonic() - began, 1)
    console.print(f"sent back after {needed or '-'} groups; {seconds:.0f} s")
    if args.json:
        figures = {
            **circumstances(),
            "periods": scene.periods,
            "decisions": decisions,
            "groups_until_sent_back": needed,
            "failed_requests": failed,
            "seconds": seconds,
        }
        args.json.write_text(json.dumps(figures, indent=1, default=str) + "\n")
    return 0 if all(holds.values()) else 1


def _played(scene: Scene, process: Any, deadline_s: float) -> int | None:
    """Let the policy train until it has the last share, then plant version 0.

    Return how many groups of the smaller sample it took to send that back; None if it was not, or got no share.
    """
    policy = scene.policy
    policy.set_state("training")
    took_over = scene.until(SHARES[-1], process, deadline_s)
    policy.set_state("paused")
    if not took_over:
        scene.periods.append(scene.period(scene.state.share, scene.state.since, datetime.now(UTC)))
        return None
    since, until_s = datetime.now(UTC), time.monotonic() + SERVED_S
    while time.monotonic() < until_s:
        policy.look(process)
    scene.periods.append(scene.period(SHARES[-1], since, datetime.now(UTC)))
    scene.console.print("version 0 is made live again")
    policy.promote(0)
    planted = datetime.now(UTC)
    if not scene.until(SHARES[0], process, deadline_s):
        return None
    scene.periods.pop()  # a mean of two versions
    lowered = next(one for one in scene.decisions if one["decision"] == "lower" and one["created_at"] > planted)
    return int(min(lowered["figures"]["policy_count"], lowered["figures"]["teacher_count"]))


def _table(periods: list[dict[str, Any]]) -> Table:
    table = Table("share", "games", "won", "won by the teacher", "$ per 1,000 games", "seconds")
    for one in periods:
        own, other = (f"{one['won'].get(name, 0):.1%}" for name in ("starter", TEACHER))
        cost, games = f"{one['usd_per_1000_games']:.4f}", f"{sum(one['games'].values()):,}"
        table.add_row(f"{one['share']:.0%}", games, own, other, cost, f"{one['seconds']:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
