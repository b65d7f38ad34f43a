"""Audits look at what the ruler did: its tests' court and model servers."""

from tests.unit.judge.ruler.conftest import court, server, spare, speaker  # noqa: F401
