"""Which test files run one after the other in one process, because they share what is expensive to start.

Everything else is spread over the processes file by file. Not by mark: the process that spreads the tests knows only
their names.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SHARED = {
    "a vLLM": (
        "tests/clients/test_openai.py",
        "tests/docs/test_blocks.py",
        "tests/e2e/harnesses/faults/test_judged.py",
        "tests/e2e/harnesses/learning/test_thumbs.py",
        "tests/unit/judge/ruler/test_base_model.py",
        "tests/integration/test_completeness.py",
        "tests/integration/test_differential.py",
        "tests/integration/test_engine_survives.py",
        "tests/integration/test_messages_exact.py",
        "tests/integration/test_metrics.py",
        "tests/integration/test_openapi.py",
        "tests/integration/test_parameters.py",
        "tests/integration/test_responses_exact.py",
        "tests/integration/test_responses_referred.py",
        "tests/integration/test_seeds.py",
        "tests/integration/test_shadow_groups.py",
        "tests/integration/test_trajectories.py",
        "tests/integration/test_transparent.py",
        "tests/integration/test_whose_call.py",
        "tests/integration/test_moved_versions.py",
        "tests/unit/whetstone/vllm/self_test/test_run.py",
    ),
}
"""What is shared -> the files."""

SERVERS = {"vllm_url", "parsing_vllm_url"}
"""Fixtures whose tests belong under `a vLLM`."""

SQLITE_ALONE = (
    "tests/unit/judge/audit/",
    "tests/unit/judge/decisions/test_alone.py",
    "tests/unit/judge/decisions/test_feedback.py",
    "tests/unit/judge/decisions/test_groups.py",
    "tests/unit/judge/maintenance/test_rollups.py",
    "tests/unit/judge/reward_functions/",
    "tests/unit/judge/ruler/",
    "tests/unit/judge/settlement/test_set_aside.py",
    "tests/unit/judge/settlement/test_sweep.py",
    "tests/unit/judge/settlement/test_timing.py",
    "tests/unit/proxy/admission/test_api_keys.py",
    "tests/unit/proxy/api/",
    "tests/unit/proxy/test_app.py",
    "tests/unit/proxy/background/test_evaluations.py",
    "tests/integration/test_metrics.py",
    "tests/unit/proxy/domain/test_model_names.py",
    "tests/unit/proxy/upstream/test_device_pause.py",
    "tests/unit/proxy/domain/test_version_pins.py",
    "tests/unit/proxy/inference/",
    "tests/unit/proxy/recording/test_words.py",
    "tests/unit/proxy/test_projects.py",
    "tests/unit/proxy/test_why_not_trained.py",
    "tests/unit/proxy/trajectories/test_resolver.py",
    "tests/unit/proxy/recording/test_redaction_served.py",
    "tests/unit/proxy/recording/test_turns.py",
    "tests/unit/proxy/dashboard/test_crawl.py",
    "tests/unit/proxy/dashboard/pages/test_policies.py",
    "tests/docs/test_feedback_model.py",
    "tests/unit/trainer/step/test_dry_run.py",
    "tests/unit/trainer/gate/test_controller.py",
    "tests/unit/trainer/adapters/test_retention.py",
    "tests/unit/trainer/store/test_examples.py",
    "tests/unit/trainer/vllm/test_device_pause.py",
    "tests/unit/whetstone/cli/commands/data/test_sql.py",
    "tests/unit/whetstone/config/test_privacy.py",
    "tests/unit/whetstone/domain/test_api_keys.py",
    "tests/unit/whetstone/registry/test_versions.py",
    "tests/unit/whetstone/transfer/",
)
"""Files, or folders of them, whose half on PostgreSQL is left to `make test-all`: what they prove is no database's, and
other tests ask PostgreSQL the same statements."""

SHARES = {file: shared for shared, files in SHARED.items() for file in files}
"""The same by file."""


class Sharing(LoadScopeScheduling):
    """Hands out files, or sets of files that share something, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return SHARES.get(file, file)


def leave_out(items: list[pytest.Item]) -> None:
    """Mark as `long` what of both databases only `make test-all` runs."""
    for item in items:
        if item.get_closest_marker("postgresql") and item.nodeid.startswith(SQLITE_ALONE):
            item.add_marker(pytest.mark.long(part="postgresql"))


def every_second(names: Iterable[str], part: str) -> list[Any]:
    """Leave every second parameter of a test to this part of `make test-all`."""
    long = pytest.mark.long(part=part)
    return [pytest.param(name, marks=long if number % 2 else ()) for number, name in enumerate(names)]


def order(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: what shares something, then files with slow tests."""
    first: dict[str, int] = {}
    for item in items:
        file = file_of(item.nodeid)
        slow = item.get_closest_marker("slow") or item.get_closest_marker("stack")
        first[file] = min(0 if file in SHARES else 1 if slow else 2, first.get(file, 2))
    items.sort(key=lambda item: first[file_of(item.nodeid)])


def file_of(nodeid: str) -> str:
    """Say which file a test is in."""
    return nodeid.partition("::")[0]
