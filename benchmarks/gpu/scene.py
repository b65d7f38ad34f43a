"""Serve and train one model as `whetstone up` does, under load, and measure it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.gpu.cards import Peak, Peaks
from benchmarks.gpu.load import ANSWER_TOKENS, Answer, Load, first_token_s, longest_silence_s, tokens_per_s
from benchmarks.kit.process import ROOT
from trainer.domain.gate.parity import SMALLEST_K3
from whetstone.config.settings import Settings, as_environment, load
from whetstone.database.engine import connect
from whetstone.memory.training import TRAINER_BYTES
from whetstone.registry.projects import Store
from whetstone.stack.stack import Stack, running

WHETSTONE = str(Path(sys.executable).with_name("whetstone"))
WARM_S = 5.0
"""Left out of a measurement of speed: the first requests compile kernels and fill the batch."""
MOST_RATIO = 1.15
"""A plan that is exceeded by more is a fault; what stays below it is only shown."""
MOST_K3_RATIO = 2.0
"""More of its parent's k3 is a fault. The gate, which must reject no healthy version, allows twice as much."""
NO_SETTINGS: Mapping[str, Any] = {}
STEPS = """SELECT step, state, version_in, version_out, trajectories, sampled_tokens, read_tokens, seconds,
    tokens_per_s, mismatch_k3, kl, grad_norm, phases, error, created_at, ended_at FROM admin_steps ORDER BY step"""
GATE = "SELECT version, test, decision, reason, figures FROM admin_gate_results ORDER BY created_at"
PARITY = "SELECT version, parent, state, probe_k3 FROM admin_versions ORDER BY version"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    steps: int
    seconds: float
    """Of each measurement of speed."""
    connections: int
    """At once; a measurement with a single one comes before."""
    groups: int
    """In a step, of four attempts each."""
    patience_s: float
    """For all steps of a model together."""


@dataclass
class ModelReport:
    """What a model's run gave: figures by name, and what did not hold."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def settings_of(data: Path, model: str, scale: Scale, chosen: Mapping[str, Any]) -> Settings:
    """Return the settings of the environment and of whetstone.toml, but for `chosen` ones and those that the run itself
    needs."""
    return load(
        data=data,
        model=model,
        proxy__port=0,
        proxy__max_wait_s=scale.patience_s,
        trainer__groups_per_step=scale.groups,
        trainer__max_groups_per_step=2 * scale.groups,
        **chosen,
    )


def plan_of(model: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the plan for the model, as `whetstone doctor --memory` makes it, or what it says instead."""
    command = ["doctor", "--memory", model, *options, "--json"]
    done = subprocess.run([WHETSTONE, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"command": " ".join(["whetstone", *command]), "output": done.stdout + done.stderr}


def compared(plan: Mapping[str, Any], peaks: Mapping[str, Peak]) -> list[dict[str, Any]]:
    """Return planned and measured memory beside each other; nothing where there is no plan.

    Of the GPU: vLLM's share of its card, and what a step needs beside its process (TRAINER_BYTES). Of the host: all
    parts together.
    """
    if "gpu_memory_utilization" not in plan:
        return []
    servers = [peak.gpu_mib for part, peak in peaks.items() if part.startswith("vllm")]
    trainer = peaks["trainer"].gpu_mib if "trainer" in peaks else 0
    pairs = {
        "GPU memory of a vLLM": (plan["gpu_memory_utilization"] * plan["card_bytes"] / 2**20, max(servers, default=0)),
        "GPU memory of the trainer": ((sum(plan["trainer"].values()) + TRAINER_BYTES) / 2**20, trainer),
        "host memory": (plan["host_bytes"] / 2**20, sum(peak.host_mib for peak in peaks.values())),
    }
    return [
        {"what": what, "planned MiB": planned, "measured MiB": measured, "ratio": measured / planned}
        for what, (planned, measured) in pairs.items()
    ]


def unlike_parents(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the versions whose k3 of server to trainer matters, and is over MOST_K3_RATIO times their parent's."""
    faults = []
    for row in decisions:
        figures = row["figures"] or {}
        k3, parent = figures.get("k3"), figures.get("parent_k3")
        if (
            row["decision"] == "pass"
            and k3 is not None
            and parent is not None
            and k3 > max(MOST_K3_RATIO * parent, SMALLEST_K3)
        ):
            faults.append(f"version {row['version']}: k3 {k3:.2g} nats a token, its parent {parent:.2g}")
    return faults


def measure(
    data: Path,
    model: str,
    scale: Scale,
    console: Console,
    planned_for: Sequence[str] = (),
    chosen: Mapping[str, Any] = NO_SETTINGS,
) -> ModelReport:
    """Plan, start, serve, train, stop. `planned_for`: options of `whetstone doctor --memory`; `chosen`: settings.

    Raises:
        SettingsError, StartFailed: the stack does not come up.
    """
    plan, lines = plan_of(model, planned_for), list[str]()
    report = ModelReport({"plan": plan})

    def say(line: str) -> None:
        lines.append(line)
        console.print(f"[dim]{line}[/dim]", highlight=False)

    settings, began = settings_of(data, model, scale, chosen), time.monotonic()
    with running(settings, say) as stack:
        report.figures["start"] = {"seconds until it serves": time.monotonic() - began, "output": "\n".join(lines)}
        peaks = Peaks(lambda: _pids(stack))
        asyncio.run(_measured(stack, scale, peaks, report, console))
    report.figures["most memory, MiB"] = [{"part": part, **asdict(peak)} for part, peak in peaks.of.items()]
    report.figures["plan against peaks"] = rows = compared(plan, peaks.of)
    for row in rows:
        if not planned_for and row["ratio"] > MOST_RATIO:
            report.faults.append(f"{row['what']}: {row['measured MiB']} MiB, planned {row['planned MiB']:.0f}")
    return report


def _pids(stack: Stack) -> Mapping[str, int]:
    pids: Mapping[str, int] = json.loads((stack.settings.data / "up.json").read_text(encoding="utf-8"))["pids"]
    return {part: pid for part, pid in pids.items() if part != "up"}


async def _measured(stack: Stack, scale: Scale, peaks: Peaks, report: ModelReport, console: Console) -> None:
    with peaks.during():
        report.figures["serving alone"] = [
            await _speed(stack, count, scale, report) for count in (1, scale.connections)
        ]
        console.print(f"{report.figures['serving alone']}", highlight=False)
    with peaks.during():
        await _train(stack, scale, report, console)


async def _speed(stack: Stack, connections: int, scale: Scale, report: ModelReport) -> dict[str, Any]:
    """Measure how fast it serves while nothing trains."""
    load = Load(stack.proxy_url, stack.settings.policy, connections, stack.settings.seed, rewarded=False)
    async with load.running():
        await asyncio.sleep(WARM_S)
        since = time.time()
        await asyncio.sleep(scale.seconds)
        until = time.time()
    _report_failed(load.answers, report)
    waits = first_token_s(load.answers, since, until) or [float("nan")]
    return {
        "requests at once": connections,
        "tokens/s": tokens_per_s(load.answers, since, until),
        "first token, median s": waits[len(waits) // 2],
        "longest silence, s": longest_silence_s(load.answers, since, until),
    }


async def _train(stack: Stack, scale: Scale, report: ModelReport, console: Console) -> None:
    """Let it take its steps under load; then see what each took, and what serving felt of it."""
    settings = stack.settings
    store = Store(connect(settings.database_url))
    load = Load(stack.proxy_url, settings.policy, scale.connections, settings.seed, rewarded=True)
    store.set_policy_state(settings.project, settings.policy, "training")
    deadline, shown = time.monotonic() + scale.patience_s, 0
    async with load.running():
        while shown < scale.steps and time.monotonic() < deadline:
            await asyncio.sleep(1)
            if restarted := await asyncio.to_thread(stack.watch):
                report.faults.append(f"{', '.join(restarted)} ended and was started again: see the logs")
            ended = [step for step in store.steps(settings.project, settings.policy) if step["ended_at"] is not None]
            for step in ended[shown:]:
                console.print(f"step {step['number']}: {step['state']} {step['error'] or ''}", highlight=False)
            shown = len(ended)
    store.set_policy_state(settings.project, settings.policy, "paused")
    _report_failed(load.answers, report)
    steps = _sql(settings, STEPS)
    if shown < scale.steps:
        report.faults.append(f"only {shown} of {scale.steps} steps within {scale.patience_s:.0f} s")
    if not any(step["state"] == "promoted" for step in steps):
        report.faults.append("no step was promoted: column error of the steps, decisions of the gate")
    report.figures["steps"] = [{name: value for name, value in step.items() if name != "phases"} for step in steps]
    report.figures["seconds by phase"] = [{"step": step["step"], **(step["phases"] or {})} for step in steps]
    report.figures["serving during steps"] = [_felt(step, load.answers) for step in steps if step["ended_at"]]
    report.figures["parity, k3 in nats a token"] = _sql(settings, PARITY)
    report.figures["decisions of the gate"] = decisions = _sql(settings, GATE)
    report.faults += unlike_parents(decisions)
    report.figures["afterwards"] = await _answers(stack, store, report)


def _felt(step: Mapping[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what serving felt of a step."""
    since, until = _seconds(step["created_at"]), _seconds(step["ended_at"])
    waits = first_token_s(answers, since, until) or [float("nan")]
    return {
        "step": step["step"],
        "tokens/s": tokens_per_s(answers, since, until),
        "first token, median s": waits[len(waits) // 2],
        "longest first token, s": waits[-1],
        "longest silence, s": longest_silence_s(answers, since, until),
    }


async def _answers(stack: Stack, store: Store, report: ModelReport) -> dict[str, Any]:
    """Ask once more: after the last step the server must still be there, with the version that is live."""
    body = {
        "model": stack.settings.policy,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": ANSWER_TOKENS,
    }
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=stack.proxy_url, timeout=120, trust_env=False) as client:
        response = await client.post("/v1/chat/completions", json=body)
    if response.is_error:
        report.faults.append(f"after the steps it answers {response.status_code}: {response.text[:300]}")
    return {
        "live version": store.live_name(stack.settings),
        "status": response.status_code,
        "seconds": time.monotonic() - began,
    }


def _report_failed(answers: Sequence[Answer], report: ModelReport) -> None:
    if failed := [answer for answer in answers if answer.error]:
        report.faults.append(f"{len(failed)} of {len(answers)} requests failed, the first: {failed[0].error}")


def _sql(settings: Settings, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query on the views, by `whetstone sql`."""
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    command = [WHETSTONE, "sql", "--json", query]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def _seconds(text: str) -> float:
    """Return a time of SQL, which is UTC, in seconds since the epoch."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
