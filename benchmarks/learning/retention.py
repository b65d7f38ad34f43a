"""Measure the gate's test `retention` on a real model: healthy steps should pass it, a policy that forgets must not.

Starts the whole stack with SmolLM2-135M-Instruct and `retention` in gate.tests. First come policy-gradient steps on the
task `routing` of benchmarks.real, which are harmless. Then a candidate is made that forgets: a program answers tickets
with one senseless line, and a supervised step with a high learning rate imitates it. Exit 0 only if `retention` rejects
no harmless candidate and rejects this one, the live version stays, all steps were tested, and no request failed.
Only `retention` decides. The probe runs before it and would reject the planted candidate for its distance from its
parent or for the length of its answers, so gate.max_k3, gate.max_parent_kl and gate.max_length_ratio are out of reach,
and gate.rollback is off: for the harmless steps too. Loopback only.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from sqlalchemy import Engine, select

from benchmarks.fakes.teacher import Teacher
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.model import fetched
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import LearningPolicy
from benchmarks.real.report import circumstances, options_of, steps_of, write
from benchmarks.real.task import MICRO_BATCH_TOKENS
from benchmarks.real.tasks import TASKS
from benchmarks.real.training import line_of
from migrations import schema
from trainer.domain.gate.retention import LEAST_RIGHT, read_suite
from trainer.gate.retention import SUITE
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.memory.devices import cards
from whetstone.stack.stack import running

TASK = TASKS["routing"]
PLANTED, ANSWERS = "planted", 64
"""The policy that the program is, and how many of its answers the planted step imitates."""
LINE = "The copper kettle hums below a paper moon."
"""Its answer to everything: right for no prompt of the suite."""
SINGLES = 32
"""Of a harmless step, which takes up to four times as many: what is measured is the gate, twenty times."""
SETTINGS = {
    **TASK.settings,
    "trainer__singles_per_step": SINGLES,
    **dict.fromkeys(("gate__max_k3", "gate__max_parent_kl", "gate__max_length_ratio"), 1e12),
    **{"gate__tests": ["retention"], "gate__rollback": False, "trainer__sft_rows_per_update": 8, "proxy__port": 0},
}


def tested(engine: Engine, settings: Settings, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `retention` decided on these steps' candidates; `seconds`: those of `probe` without its own."""
    r = schema.gate_results.c
    query = select(r.version, r.test, r.decision, r.reason, r.figures).where(
        r.project == settings.project, r.policy == settings.policy, r.test.in_(("probe", "retention"))
    )
    with engine.connect() as connection:
        rows = {(row.version, row.test): row for row in connection.execute(query)}
    decisions = []
    for step in steps:
        if (row := rows.get((step["version_out"], "retention"))) is not None:
            probe = rows[step["version_out"], "probe"].figures
            seconds = round(step["phases"]["probe"] - probe["sampling_s"] - probe["reading_s"], 1)
            decided = {"step": step["number"], "kind": step["kind"], "decision": row.decision, "reason": row.reason}
            decisions.append({**decided, **row.figures, "seconds": seconds})
    return decisions


def base_shares(data: Path) -> dict[str, float]:
    """Return the share that the base model answers right, by kind of prompts; empty if it has answered none."""
    right = defaultdict[str, list[bool]](list)
    for path in (data / "retention").glob("*.json"):
        for prompt, is_right in zip(read_suite(SUITE.read_bytes()), json.loads(path.read_bytes()), strict=True):
            right[prompt.kind].append(is_right)
    return {kind: fmean(each) for kind, each in right.items()}


def table_of(rows: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the table: means of prompts and seconds, and the shares right of the last candidate and the base model."""
    table = Table("candidates", "tested", "rejected", "prompts", "base right", "last candidate right", "seconds")
    for name, decisions in rows.items():
        rejected, cells = sum(one["decision"] == "reject" for one in decisions), ["-"] * 4
        if decisions and "prompts" in decisions[-1]:  # no figures where all kinds are skipped
            prompts, seconds = (fmean(one[figure] for one in decisions) for figure in ("prompts", "seconds"))
            shares = (f"{decisions[-1][whose]:.1%}" for whose in ("base_right", "candidate_right"))
            cells = [f"{prompts:.0f}", *shares, f"{seconds:.1f}"]
        table.add_row(name, str(len(decisions)), str(rejected), *cells)
    return table


def main() -> int:
    parser = parser_of(
        "Whether `retention` rejects a candidate that forgets, and no other.",
        {
            "--steps": {"type": int, "default": 20, "help": "harmless policy-gradient steps"},
            "--planted-rate": {"type": float, "default": 2e-3, "help": "AdamW's, in the step that forgets"},
            "--planted-epochs": {"type": int, "default": 4, "help": "how often that step reads its answers"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the tickets"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--json": {"type": Path, "help": "a file for all figures"},
        },
    )
    args, began = parser.parse_args(), time.monotonic()
    with opened("retention", args.data, width=None) as (data, console), Teacher(lambda _: LINE) as program:
        given: dict[str, Any] = {} if cards() else {"trainer__micro_batch_tokens": MICRO_BATCH_TOKENS}
        given |= {"trainer__sft_learning_rate": args.planted_rate, "trainer__sft_epochs": args.planted_epochs}
        given |= {"upstreams": {"program": {"url": program.url, "models": {PLANTED: "program"}}}}
        settings = load(environment={}, data=data, model=fetched(console), seed=args.seed, **SETTINGS, **given)
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            engine = connect(stack.settings.database_url)

            def figures_of(step: dict[str, Any]) -> str:
                return f"{line_of(step)}  {tested(engine, settings, [step])[0]['reason']}"

            policy = LearningPolicy(stack, TASK.app, figures_of, console)
            if args.steps:
                policy.learn(args.steps, "--questions", "0", *TASK.training_options(shuffle_rewards=False))
            before = policy.live
            # Other tickets than those of the harmless steps.
            policy.run("--model", PLANTED, "--questions", str(ANSWERS), "--thumbs", "0", "--seed", str(-1 - args.seed))
            policy.imitate(PLANTED, None, ANSWERS)
            after, steps = policy.live, policy.steps
        decisions, shares = tested(engine, settings, steps), base_shares(data)
    harmless, planted = ([one for one in decisions if one["kind"] == kind] for kind in ("grpo", "sft"))
    wrong, right = ([one["step"] for one in kind if one["decision"] == "reject"] for kind in (harmless, planted))
    console.print(table_of({"harmless": harmless, "planted": planted}))
    kinds = (f"{kind} {share:.1%}{' (skipped)' if share < LEAST_RIGHT else ''}" for kind, share in shares.items())
    console.print("base model right:", ", ".join(kinds), highlight=False)
    seconds = round(time.monotonic() - began, 1)
    console.print(f"{before} live before the planted step, {after} after it; {seconds:.0f} s", highlight=False)
    if args.json:
        figures = {**circumstances(), "options": options_of(args), "base_right": shares, "decisions": decisions}
        figures |= {
            "steps": steps_of(steps),
            "live": [before, after],
            "seconds": seconds,
            "failed_requests": policy.failed_requests,
        }
        write(args.json, figures)
    faults = {
        f"{len(harmless)} harmless candidates were tested, {args.steps} are due": len(harmless) < args.steps,
        f"harmless candidates were rejected in the steps {wrong}": wrong,
        f"retention did not reject the planted candidate: {steps[-1]['state']}, {steps[-1]['error']}": not right,
        f"{after} is live, and not {before}": after != before,
        f"{policy.failed_requests} requests failed": policy.failed_requests,
    }
    return verdict(present(faults), console)


if __name__ == "__main__":
    sys.exit(main())
