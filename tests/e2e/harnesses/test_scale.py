"""What `scale` fills and asks: copies are whole, every query finds something, and a slow one is a fault."""

import asyncio
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import func, select, text

from benchmarks.scale.__main__ import filled, queries_of, slower, timed
from benchmarks.scale.rows import GROUPS, MEMBERS, PROJECT, TURNS
from migrations import schema

BLOCKS = 3
LOST = """
    SELECT count(*) FROM completions AS c WHERE follows IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM completions AS b WHERE b.id = c.follows AND b.trajectory_id = c.trajectory_id
    )
"""
"""Turns that follow none of their own trajectory."""


def test_copies_are_whole_and_every_query_is_answered(tmp_path: Path) -> None:
    tables = {
        schema.groups: GROUPS,
        schema.trajectories: GROUPS * MEMBERS,
        schema.completions: GROUPS * MEMBERS * TURNS,
        schema.feedback: GROUPS * MEMBERS,
    }
    with filled(None, tmp_path / "data", BLOCKS, Console(quiet=True)) as engine, asyncio.Runner() as loop:
        with engine.connect() as connection:
            for table, rows in tables.items():
                assert connection.scalar(select(func.count()).select_from(table)) == BLOCKS * rows
            lost = text(LOST)
            assert connection.scalar(lost) == 0
            newest = select(schema.completions.c.id).order_by(schema.completions.c.created_at.desc()).limit(1)
            assert str(connection.scalar(newest)).startswith("b00000-")
        for ask in queries_of(engine, BLOCKS, 0, loop).values():
            ask()
        with engine.connect() as connection:
            open_groups = select(func.count()).where(
                schema.groups.c.project == PROJECT, schema.groups.c.state == "scored"
            )
            assert connection.scalar(open_groups) == 20  # the claim was given back


@pytest.mark.parametrize(("large_ms", "faults"), [(1.9, []), (2.5, ["claim"])])
def test_a_query_that_takes_more_than_twice_as_long_is_a_fault(large_ms: float, faults: list[str]) -> None:
    assert slower({"claim": 1.0, "id": 0.1}, {"claim": large_ms, "id": 0.25}) == faults


def test_sides_are_queried_in_turns() -> None:
    queried: list[str] = []
    sides = {side: {"query": lambda side=side: queried.append(side)} for side in ("small", "large")}
    took = timed(sides)
    assert queried[:4] == ["small", "large", "small", "large"]
    assert set(took["large"]) == {"query"}
