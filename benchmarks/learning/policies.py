"""Measure what it saves to take the steps of many policies at the same time (`trainer.policies_at_once`).

N policies on one base model have scored groups for a step each. One worker takes these steps, once in turns and once at
the same time, on copies of one frozen database, with a vLLM that is emptied in between. Computing is apart: the phases
`model`, `measure` and `train`, and what the probe reads. What is left of the wall-clock is loading, probing, promotion,
reading from SQL and writing files.
Exit 0 only if each policy's adapter is the same bit for bit in both, all were promoted, and what is left is at most
MOST of what it is in turns. Medians of `--rounds`. Loopback only.
"""

import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy import select

from benchmarks.faults.killed.records import GROUPS_PER_STEP, freeze
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import borrowed_vllm, running_adapter_vllm, running_vllms
from benchmarks.real.report import circumstances, options_of, write
from migrations import schema
from migrations.run import upgrade
from trainer.learner.learner import ADAPTER_WEIGHTS, Learner
from trainer.step.learners import Learners
from trainer.step.schedule import rounds
from trainer.step.step import take_step
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.vllm.client import Vllm

MOST = 0.3
"""Most of what is left beside computing, as a share of what it is in turns."""
COMPUTING = ("model", "measure", "train")


@dataclass(frozen=True)
class PolicySteps:
    """A step of each policy."""

    seconds: float
    """Wall-clock."""
    computing_s: float
    by_phase: dict[str, float]
    """Seconds of all steps together."""
    adapters: dict[str, bytes]
    """Policy -> the weights of the version that is live now; only of steps that were promoted."""

    @property
    def left_s(self) -> float:
        """Seconds in which nothing was computed."""
        return self.seconds - self.computing_s


def settings_of(data: Path, policies: int, at_once: int, seed: int, model: str | None) -> Settings:
    """Return settings for so many policies."""
    names = [f"policy{number:02d}" for number in range(policies)]
    trainer = {
        **dict.fromkeys(("groups_per_step", "max_groups_per_step", "min_groups_per_step"), GROUPS_PER_STEP),
        "keep_served": 0,
        "learning_rate": 1e-4,  # rewards are random: at the starter's own rate some candidates are too far to promote
        "device": "cpu",
        "policies_at_once": at_once,
    }
    return load(
        environment={},
        data=data,
        seed=seed,
        policy=names[0],
        policies=tuple(names[1:]),
        vllm__max_loras=2 * policies,
        trainer=trainer,
        **({} if model is None else {"model": model}),
    )


def take(settings: Settings, url: str, template: Path) -> PolicySteps:
    """Take all steps that are due, on a copy of the database."""
    settings.data.mkdir(parents=True)
    shutil.copyfile(template, settings.data / "whetstone.db")
    engine = connect(settings.database_url)
    store, learners = Store(engine, settings.project), Learners(settings)
    replicas = Replicas({url: Vllm(url)})
    began = time.monotonic()
    rounds(
        settings.trained,
        lambda _: None,
        lambda: None,
        lambda policy: take_step(policy, store, learners, replicas, settings),
        settings.trainer.policies_at_once,
    )
    seconds = time.monotonic() - began
    s, v, g = schema.steps.c, schema.policy_versions.c, schema.gate_results.c
    with engine.connect() as connection:
        phases = list(connection.execute(select(s.phases).where(s.phases.is_not(None))).scalars())
        live = connection.execute(select(v.policy, v.adapter_path).where(v.state == "live", v.version > 0)).all()
        probes = list(connection.execute(select(g.figures).where(g.test == "probe")).scalars())
    engine.dispose()
    by_phase = {name: sum(one.get(name, 0.0) for one in phases) for name in {name for one in phases for name in one}}
    by_phase["read by the probe"] = sum(probe["reading_s"] for probe in probes)
    return PolicySteps(
        seconds=seconds,
        computing_s=sum(by_phase.get(name, 0.0) for name in (*COMPUTING, "read by the probe")),
        by_phase=by_phase,
        adapters={row.policy: (Path(row.adapter_path) / ADAPTER_WEIGHTS).read_bytes() for row in live},
    )


def prove(args: Any, data: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Make all runs. Return the figures, and what does not hold."""
    template = data / "frozen.db"
    common = settings_of(data, args.policies, 1, args.seed, args.model)
    upgrade(f"sqlite:///{template}")
    engine = connect(f"sqlite:///{template}")
    base = Learner.fresh(common.model, common.trainer, common.seed)
    freeze(engine, common, 1, base.logprobs)
    engine.dispose()
    console.print(f"[dim]{args.policies} policies have {GROUPS_PER_STEP} groups each[/dim]")
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # it empties its cache of prefixes then
    started = running_adapter_vllm(common) if args.fake else running_vllms(data / "logs", {"vllm": common})
    taken: dict[str, list[PolicySteps]] = {"in turns": [], "together": []}
    with started as urls:
        url = urls if isinstance(urls, str) else urls[0]
        for number in range(args.rounds + 1):
            for name, each in taken.items():
                at_once, folder = 1 if name == "in turns" else args.policies, data / f"{name} {number}"
                settings = settings_of(folder, args.policies, at_once, args.seed, args.model)
                with borrowed_vllm(url):
                    one = take(settings, url, template)
                if number or args.fake:  # the first of each warms all up
                    each.append(one)
                console.print(f"[dim]{name}: {one.seconds:.1f} s, computing {one.computing_s:.1f} s[/dim]")
    return _figures(args, taken, console)


def _figures(args: Any, taken: dict[str, list[PolicySteps]], console: Console) -> tuple[dict[str, Any], list[str]]:
    medians = {
        name: {
            "seconds": statistics.median(one.seconds for one in each),
            "computing_s": statistics.median(one.computing_s for one in each),
            "left_s": statistics.median(one.left_s for one in each),
            "by_phase": {
                phase: round(statistics.median(one.by_phase.get(phase, 0.0) for one in each), 3)
                for phase in sorted({phase for one in each for phase in one.by_phase})
            },
        }
        for name, each in taken.items()
    }
    turns, together = medians["in turns"], medians["together"]
    share = together["left_s"] / turns["left_s"]
    table = Table("", "seconds", "computing", "the rest", title=f"a step of each of {args.policies} policies")
    for name, one in medians.items():
        table.add_row(name, *(f"{one[column]:.2f}" for column in ("seconds", "computing_s", "left_s")))
    console.print(table)
    for name, one in medians.items():
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in one["by_phase"].items())
        console.print(f"{name}, all steps together: {phases}", highlight=False)
    console.print(f"the rest together is {share:.0%} of what it is in turns", highlight=False)
    all_of_them = [one for each in taken.values() for one in each]
    promoted = {len(one.adapters) for one in all_of_them}
    different = {
        policy for one in all_of_them for policy, weights in one.adapters.items()
        if weights != all_of_them[0].adapters.get(policy)
    }  # fmt: skip
    figures = {
        **circumstances(),
        "options": options_of(args),
        "medians": medians,
        "share": share,
        "different_adapters": len(different),
    }
    return figures, present(
        {
            f"promoted were {sorted(promoted)} of {args.policies}": promoted != {args.policies},
            f"adapters differ: {sorted(different)}": different,
            f"the rest is {share:.0%} of what it is in turns, at most {MOST:.0%} are due": share > MOST
            and not args.fake,
        }
    )


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "What it saves to take the steps of many policies at the same time.",
        {
            "--policies": {"type": int, "default": 16, "help": "on one base model"},
            "--rounds": {"type": int, "default": 3, "help": "of both ways, after one that warms up"},
            "--model": {"help": "the base model; the starter if left out"},
            "--fake": {"action": "store_true", "help": "one round on a model server of ours: not for figures"},
            "--seed": {"type": int, "default": 0, "help": "of the groups and the adapters"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
            "--json": {"type": Path, "help": "a file for all figures"},
        },
    )
    args = parser.parse_args()
    args.rounds = 0 if args.fake else args.rounds
    with opened("policies", args.data) as (data, console):
        figures, faults = prove(args, data, console)
    if args.json:
        write(args.json, figures)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
