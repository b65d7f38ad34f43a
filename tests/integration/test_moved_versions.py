"""Versions moved by hand in front of a real vLLM: what answers after it is that version, not its name alone."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from migrations import schema
from tests.conftest import Seed
from tests.unit.proxy.conftest import RunningProxy, settings_for
from trainer.adapters import files as adapter
from trainer.domain.base import BaseModel
from trainer.learner.learner import ADAPTER_WEIGHTS, Learner
from whetstone.config.settings import STARTER
from whetstone.config.trainer import TrainerSettings

pytestmark = pytest.mark.stack


class Random:
    """An adapter that changes the answers; in a fresh adapter B is zero."""

    def __init__(self) -> None:
        learner = Learner.fresh(STARTER, TrainerSettings(threads=1, device="cpu"), seed=1)
        self.base: BaseModel = learner.base
        files = dict(learner.files())
        weights = safetensors.torch.load(files[ADAPTER_WEIGHTS])
        random = torch.Generator().manual_seed(0)
        for name, weight in weights.items():
            if "lora_B" in name:
                weight.normal_(std=0.5, generator=random)
        self._files = files | {ADAPTER_WEIGHTS: safetensors.torch.save(weights)}

    def files(self) -> Mapping[str, bytes]:
        return self._files


def version_and_logprob(proxy: RunningProxy) -> tuple[int, float]:
    """The version that answers, and a logprob that tells it from others: of its likeliest first token."""
    response = proxy.chat(max_tokens=1, temperature=1.0, logprobs=True, top_logprobs=1)
    assert response.status_code == 200, response.text
    body: Any = response.json()
    return int(response.headers["x-policy-version"]), body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0][
        "logprob"
    ]


def test_a_version_that_is_promoted_and_rolled_back_answers_from_the_next_request_on(
    vllm_url: str, sqlite_template: Path, tmp_path: Path
) -> None:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    proxy = RunningProxy(settings_for(f"sqlite:///{tmp_path / 'whetstone.db'}", vllm_url, tmp_path))
    try:
        folder = tmp_path / "adapters" / "starter@v1"
        row = {"id": "starter@v1", "version": 1, "parent": 0, "state": "retired", "served": False}
        row |= {"adapter_path": str(folder), "manifest_sha256": adapter.write(folder, Random(), parent=0, step=1)}
        seed = Seed(proxy.engine)
        seed.insert(schema.policy_versions, project="default", policy="starter", created_at=seed.now, **row)
        version, base = version_and_logprob(proxy)
        assert version == 0
        for _ in range(5):
            assert proxy.client.post("/admin/policies/starter/promote", json={"version": 1}).status_code == 200
            version, moved = version_and_logprob(proxy)
            assert (version, moved == pytest.approx(base, abs=1e-3)) == (1, False)
            assert proxy.client.post("/admin/policies/starter/rollback").status_code == 200
            assert version_and_logprob(proxy) == (0, pytest.approx(base, abs=1e-3))
    finally:
        proxy.stop()
