"""Retention in its short form: it deletes half while others write, and a write that waits too long is a fault."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.scale.__main__ import filled
from benchmarks.scale.retention import prove
from benchmarks.scale.rows import GROUPS, MEMBERS


@pytest.mark.slow
def test_half_of_what_there_is_goes_while_others_write(tmp_path: Path) -> None:
    with filled(None, tmp_path / "data", 2, Console(quiet=True)) as engine:
        now = datetime.now(UTC)
        ran = prove(engine, now - timedelta(hours=1), now)
    assert [fault for fault in ran.faults if " took " not in fault] == []
    assert ran.deleted == GROUPS * MEMBERS
    assert ran.beside_s
