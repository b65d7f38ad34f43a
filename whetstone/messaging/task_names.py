"""Celery's task and queue names, by which programs that never import one another call each other."""

ASSEMBLE = "judge.assemble"
"""Apply waiting feedback, end idle trajectories, close and score groups. No arguments."""

CODE = "judge.code"
"""Run the reward functions that are due. No arguments."""

RANK = "judge.rank"
"""Have judges rank the groups that are due for them. No arguments."""

RETAIN = "judge.retain"
"""Delete data past its retention time, and continue unfinished deletions. No arguments."""

ROLL_UP = "judge.roll_up"
"""Add changes to the aggregates that dashboards read. No arguments."""

STEP = "trainer.step"
"""Take every step that is due. No arguments."""

JUDGE_QUEUE = "judge"
TRAINER_QUEUE = "trainer"

QUEUES = {
    ASSEMBLE: JUDGE_QUEUE,
    CODE: JUDGE_QUEUE,
    RANK: JUDGE_QUEUE,
    RETAIN: JUDGE_QUEUE,
    ROLL_UP: JUDGE_QUEUE,
    STEP: TRAINER_QUEUE,
}
