"""List the tasks on which a real model, SmolLM2-135M-Instruct, is trained."""

import sys

from benchmarks.real.task import EXAMPLES, Lessons, Task

sys.path.extend(str(EXAMPLES / name) for name in ("desk", "records"))

import desk
import records

WITH_LESSONS = {
    "trainer__learning_rate": 1e-4,
    "trainer__sft_learning_rate": 3e-4,
    "trainer__updates_per_step": 4,
}
"""Twice the default learning rate, and four updates to a step, which share its probe: an answer has ten times the
tokens of a routed ticket, and most of them are right already. Supervised steps at that rate would take an hour."""
TASKS = {
    task.name: task
    for task in (
        # Each ticket once, a thumb on three answers in ten: compared with the running mean. No ticket waits for others.
        Task(
            "routing",
            EXAMPLES / "tickets" / "app.py",
            right="right team",
            steps=20,
            pause_s=1,
            training=("--attempts", "1", "--thumbs", "0.3"),
            settings={"groups__prompt_window_s": 0},
        ),
        # Eight attempts at a ticket are a group: they have the same prompt. A thumb on each, so that groups settle.
        Task(
            "routing-groups",
            EXAMPLES / "tickets" / "app.py",
            right="right team",
            steps=20,
            pause_s=2,
            training=("--attempts", "8", "--thumbs", "1"),
        ),
        # The rule program reads plain messages only, one in twelve; rewards are given for all.
        Task(
            "json",
            EXAMPLES / "records" / "app.py",
            right="exact record",
            fields="right fields",
            steps=12,
            pause_s=5,
            training=("--attempts", "8"),
            lessons=Lessons(lambda messages: records.teach(messages[-1]["content"]), steps=6, questions=778),
            settings=WITH_LESSONS,
        ),
        # The rule program understands five sentences of 20; rewards are given for all.
        # Attempts that found the same order are compared from there on. As a whole, a refund without its amount
        # earns more than a customer who is not found, and the policy learns to leave the amount out.
        # The learning rate falls over all 24 steps: at its height versions swing between two habits, calls with and
        # without an amount.
        Task(
            "agent",
            EXAMPLES / "desk" / "app.py",
            right="solved",
            fields="right action",
            steps=24,
            pause_s=20,
            training=("--attempts", "8"),
            lessons=Lessons(desk.teach, steps=6, questions=211, compare=False),
            settings=WITH_LESSONS | {"trainer__baseline": "state"},
            decays=True,
        ),
    )
}
