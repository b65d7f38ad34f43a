"""Check that kill -9 does not change training: one undisturbed run, one whose training worker is killed repeatedly.

Both train on copies of one frozen database of scored groups, with the worker's own program (Celery, as `whetstone up`
starts it), one thread, and a model server on vLLM's wire that outlives it. Kills come at random moments, aimed at every
part of a step. Exit 0 only if each step left the same adapter, optimizer and random state in both runs, bit for bit,
with the same figures and from the same trajectories, and no trajectory is in two steps. Loopback only.
"""

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, select

from benchmarks.faults.killed.records import GROUPS_PER_STEP, differences, freeze, ledger, wrong_with
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import evenly, opened, present, worker_command
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT, running_adapter_vllm, running_broker
from migrations import schema
from migrations.run import upgrade
from trainer.adapters.files import TEMPORARY
from trainer.learner.learner import Learner
from whetstone.config.settings import Settings, as_environment, load
from whetstone.database.engine import connect
from whetstone.domain.ids import version_id
from whetstone.messaging.task_names import TRAINER_QUEUE
from whetstone.stack.stack import trainer_program

AIMS = ("promoted", "start", "claimed", "written", "trained", "loaded")
"""Start of a kill's window: the worker's start, or when a new claim, a folder or a state is first seen."""
BETWEEN_S = 0.15
"""Time from a promotion until the next claim has been read."""
LOOK_EVERY_S, WATCHED_S = 0.002, 0.05
STILL_S = 240.0
"""A run of one worker that takes longer fails; a busy machine sometimes takes a minute for a step."""


@dataclass(frozen=True)
class StepState:
    """The newest step at one moment; number 0 before the first."""

    number: int
    attempt: int
    state: str
    next_version: int
    left: int
    """Groups that are not over."""

    @property
    def claim(self) -> tuple[int, int]:
        return self.number, self.attempt


@dataclass(frozen=True)
class Kill:
    """A kill, and the worker's state at that moment."""

    aim: str
    after_s: float
    """Since the worker's start."""
    seen: StepState
    met: str

    def __str__(self) -> str:
        seen = self.seen
        step = f"step {seen.number}, attempt {seen.attempt}, {seen.state}" if seen.number else "no step"
        return f"{self.after_s:5.2f} s after its start, {self.met} ({step}; aimed at {self.aim})"


@dataclass(frozen=True)
class Run:
    """A worker, its database and its model server, until all groups are over."""

    settings: Settings
    engine: Engine
    still_s: float = STILL_S

    def look(self) -> StepState:
        """Return the newest step."""
        s, g = schema.steps.c, schema.groups.c
        newest = select(s.number, s.attempt, s.state).order_by(s.number.desc()).limit(1)
        left = select(g.id).where(g.state.in_(("scored", "claimed")))
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            step = connection.execute(newest).one_or_none()
            next_version = connection.execute(select(schema.policies.c.next_version)).scalar_one()
            groups_left = len(connection.execute(left).all())
        number, attempt, state = step or (0, 0, "none")
        return StepState(number, attempt, state, next_version, groups_left)

    @contextlib.contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the training worker; kill it at the end, if it still runs."""
        program = trainer_program(self.settings.trainer)
        command = worker_command("trainer", TRAINER_QUEUE, "--pool", "solo", program=program)
        environment = {**os.environ, **as_environment(self.settings), "OMP_WAIT_POLICY": "PASSIVE"}
        with (
            (self.settings.data / "trainer.log").open("ab") as log,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def to_its_end(self) -> dict[str, float]:
        """Train on all that is left. Return the windows for kills in seconds, by aim.

        Raises:
            RuntimeError: the worker ends, or nothing changes.
        """
        began = time.monotonic()
        with self.worker() as process:
            self._await(lambda seen: seen.number > 0, process, began)
            startup_s = time.monotonic() - began
            self._await(lambda _: False, process, began)
        return {"start": startup_s, **self._phases()}

    def killed(self, aim: str, share: float, windows_s: Mapping[str, float]) -> Kill | None:
        """Start the worker and kill it at `share` of its aim's window; return None if all was over before.

        Raises:
            RuntimeError: the worker ends by itself, or nothing changes.
        """
        before, began = self.look(), time.monotonic()
        if not before.left:
            return None
        with self.worker() as process:
            if aim != "start" and not self._await(lambda seen: self._reached(aim, before, seen), process, began):
                return None
            time.sleep(share * windows_s[aim])
            self._check(process, began)
            at_s = time.monotonic() - began
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        seen = self.look()
        return Kill(aim, at_s, seen, self._met(before, seen))

    def _await(self, reached: Callable[[StepState], bool], process: subprocess.Popen[bytes], began: float) -> bool:
        """Wait until this state is reached; return whether that came before all was over."""
        while (seen := self.look()).left:
            if reached(seen):
                return True
            self._check(process, began)
            time.sleep(LOOK_EVERY_S)
        return False

    def _reached(self, aim: str, before: StepState, seen: StepState) -> bool:
        if aim == "promoted":
            ended = before.number if before.state in ("none", "promoted") else before.number - 1
            return seen.number > ended + 1 or (seen.number == ended + 1 and seen.state == "promoted")
        if seen.claim == before.claim:
            return False
        states = {"claimed": (), "written": (), "trained": ("claimed",), "loaded": ("claimed", "trained")}
        return seen.state not in states[aim] and (aim != "written" or seen.state != "claimed" or self._writes(seen))

    def _writes(self, seen: StepState) -> bool:
        """Return whether the claim's folder exists, in any state. Writing is very fast, so this looks without SQL."""
        until = time.monotonic() + WATCHED_S
        while time.monotonic() < until:
            if any((self.settings.data / "adapters").glob(f"*{self._name(seen)}*")):
                return True
        return False

    def _name(self, seen: StepState) -> str:
        """Return the name of the version that the newest claim makes."""
        return version_id(self.settings.policy, seen.next_version - 1)

    def _met(self, before: StepState, seen: StepState) -> str:
        """Return what the worker was doing, as far as it is visible."""
        if seen.claim == before.claim and seen.state == before.state:
            return "starting"
        if seen.state == "claimed":
            adapters = self.settings.data / "adapters"
            if (adapters / self._name(seen)).exists():
                return "written, not reported"
            return "writing" if any(adapters.glob(f"{TEMPORARY}{self._name(seen)}-*")) else "reading or training"
        return {"trained": "loading", "loaded": "probing"}.get(seen.state, "between two steps")

    def _phases(self) -> dict[str, float]:
        query = select(schema.steps.c.phases).order_by(schema.steps.c.number)
        with self.engine.connect() as connection:
            phases = list(connection.execute(query).scalars())

        def usual(phase: str) -> float:
            return float(statistics.median(one[phase] for one in phases))

        return {
            # A killed worker's model is gone: each attempt loads it again, as the first step did.
            "claimed": usual("read") + phases[0]["model"] + usual("train"),
            # Half of this time passes before the folder exists.
            "written": usual("write") / 2,
            "trained": usual("load"),
            "loaded": usual("probe"),
            "promoted": BETWEEN_S,
        }

    def _check(self, process: subprocess.Popen[bytes], began: float) -> None:
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended by itself; see {self.settings.data / 'trainer.log'}")
        if time.monotonic() - began > self.still_s:
            raise RuntimeError(f"nothing more after {self.still_s:.0f} s: {self.look()}")


def settings_of(data: Path, seed: int) -> Settings:
    """Return settings in which the groups of a step depend only on their order, with a short lease."""
    return load(
        environment={},
        data=data,
        seed=seed,
        sweep_s=0.1,
        trainer={
            "groups_per_step": GROUPS_PER_STEP,
            "max_groups_per_step": GROUPS_PER_STEP,
            "min_groups_per_step": GROUPS_PER_STEP,
            "min_fresh_share": 0.0,
            "max_staleness": 10_000,
            "micro_batch_tokens": 256,
            "lora_rank": 8,
            "lora_alpha": 16,
            "threads": 1,
            "device": "cpu",
            "lease_s": 1.0,
            # Every kill may hit the same step.
            "max_attempts": 10_000,
        },
    )


def moments(kills: int, rng: random.Random) -> list[tuple[str, float]]:
    """Return aim and share of its window for each kill: every aim equally often, in random order."""
    return [(aim, rng.random()) for aim in evenly(AIMS, kills, rng)]


@contextlib.contextmanager
def _run(common: Settings, name: str, template: Path) -> Iterator[Run]:
    with running_broker() as messages, running_adapter_vllm(common) as url:
        vllm = common.vllm.model_copy(update={"urls": (url,)})
        settings = common.model_copy(update={"data": common.data / name, "broker": messages, "vllm": vllm})
        settings.data.mkdir(parents=True)
        shutil.copyfile(template, settings.data / "whetstone.db")
        engine = connect(settings.database_url)
        try:
            yield Run(settings, engine)
        finally:
            engine.dispose()


def prove(data: Path, kills: int, steps: int, seed: int, console: Console) -> tuple[list[Kill], list[str]]:
    """Make both runs. Return the kills, and what does not hold."""
    template = data / "frozen.db"
    common = settings_of(data, seed)
    upgrade(f"sqlite:///{template}")
    engine = connect(f"sqlite:///{template}")
    base = Learner.fresh(common.model, common.trainer, seed)
    freeze(engine, common, steps, base.logprobs)
    engine.dispose()

    with _run(common, "undisturbed", template) as run:
        windows_s = run.to_its_end()
        undisturbed = ledger(run.engine)
    console.print(f"[dim]undisturbed: {windows_s['start']:.1f} s to start, {len(undisturbed.steps)} steps[/dim]")
    taken: list[Kill] = []
    with _run(common, "killed", template) as run:
        for aim, share in moments(kills, random.Random(seed)):
            kill = run.killed(aim, share, windows_s)
            if kill is None:
                break
            taken.append(kill)
            console.print(f"kill {len(taken):2}: {kill}", highlight=False)
        run.to_its_end()
        killed = ledger(run.engine)
    is_read_back = any(kill.seen.number > 1 or kill.seen.state == "promoted" for kill in taken)
    return taken, [
        *(f"undisturbed: {fault}" for fault in wrong_with(undisturbed, steps)),
        *wrong_with(killed, steps),
        *differences(undisturbed, killed),
        *present(
            {
                "every kill met step 1: no adapter was ever read back": not is_read_back,
                f"all was over after {len(taken)} kills of {kills}: see --steps": len(taken) < kills,
            }
        ),
    ]


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether kill -9 of the training worker changes what is learned.",
        {
            "--kills": {"type": int, "default": 20, "help": "of the training worker"},
            "--steps": {"type": int, "default": 16, "help": f"of {GROUPS_PER_STEP} groups each"},
            "--seed": {"type": int, "default": 0, "help": "of the groups, the adapter and the moments of the kills"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    with opened("killed", args.data) as (data, console):
        taken, faults = prove(data, args.kills, args.steps, args.seed, console)
    table = Table("the worker was", "kills")
    for what, times in Counter(kill.met for kill in taken).most_common():
        table.add_row(what, str(times))
    console.print(table)
    same = f"{len(taken)} kills, {args.steps} steps, each adapter the same bit for bit: it holds"
    return verdict(faults, console, same)


if __name__ == "__main__":
    sys.exit(main())
