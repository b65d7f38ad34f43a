"""Stock clients, changed in nothing but their address, before a real vLLM; and what the database says of their calls.

The model behind is the starter, which speaks one small format: tests look at shapes, texts and records, never at sense.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.unit.proxy.conftest import RunningProxy, settings_for, wait_for
from whetstone.config.settings import Settings

# Read while the packages are imported: prices come from the package, traces go nowhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "true"

MODEL = "starter"
KEY = "any-string"
TERSE: Any = {"temperature": 0, "frequency_penalty": 2}
"""Sampling for answers in JSON: else the starter fills with blanks what room a grammar leaves it."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all `long` where those are: to import their packages takes half a minute."""
    long = collection_path.name.startswith("test_") and collection_path.name != "test_openai.py"
    return True if long and "not long" in config.option.markexpr else None


class Served:
    """A proxy that stock clients talk to, and what it recorded since one test began."""

    def __init__(self, proxy: RunningProxy, tokenizer: Tokenizer) -> None:
        self.host = proxy.url
        self.base_url = proxy.url + "/v1"
        self.headers = {"X-Trajectory-Id": uuid.uuid4().hex}
        """What an app adds to the calls of one conversation."""
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._before = len(self._written())

    def calls(self, count: int) -> list[Any]:
        """The completions of this test in order of their calls: so many, each whole."""
        rows = self._written()[self._before :]
        assert len(rows) == count
        by_id = {row.id: row for row in rows}
        for row in rows:
            self._check(row, by_id.get(row.follows))
        return rows

    def conversation(self, count: int) -> list[Any]:
        """The same, of one trajectory: the one that `headers` name."""
        rows = self.calls(count)
        assert {row.trajectory_id for row in rows} == set(self.headers.values())
        assert [row.turn for row in rows] == list(range(count))
        return rows

    def one(self) -> Any:
        """The only completion of this test."""
        return self.calls(1)[0]

    def refused(self) -> None:
        """The only record of this test says that vLLM refused."""
        (row,) = self._written()[self._before :]
        assert (row.status, row.why_not_trained, row.token_ids) == ("error", "error", None)
        assert row.error.startswith("400: ")

    def _written(self) -> list[Any]:
        wait_for(lambda: self._proxy.client.get("/readyz").json()["unwritten"] == 0)
        return self._proxy.rows()

    def _check(self, row: Any, followed: Any) -> None:
        assert (row.status, row.error, row.policy, row.policy_version) == ("complete", None, MODEL, 0)
        assert len(row.token_ids) == len(row.inference_logprobs) == row.completion_tokens > 0
        assert all(logprob <= 0 for logprob in row.inference_logprobs)
        before = followed.prompt_tokens + followed.completion_tokens if followed else 0
        assert row.prompt_tokens == before + len(row.prompt_token_ids)
        assert (row.response_text or "") in self.decoded(row)

    def decoded(self, row: Any) -> str:
        """The sampled ids as text, before any parser."""
        return str(self._tokenizer.decode(row.token_ids, skip_special_tokens=True))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(Settings().model) / "tokenizer.json"))


@pytest.fixture(scope="session")
def plain_proxy(vllm_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _running(vllm_url, sqlite_template, tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="session")
def parsing_proxy(
    parsing_vllm_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    yield from _running(parsing_vllm_url, sqlite_template, tmp_path_factory.mktemp("clients"))


def _running(vllm_url: str, sqlite_template: Path, data: Path) -> Iterator[RunningProxy]:
    (data / "whetstone.db").write_bytes(sqlite_template.read_bytes())
    proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", vllm_url, data))
    yield proxy
    proxy.stop()


@pytest.fixture
def served(plain_proxy: RunningProxy, tokenizer: Tokenizer) -> Served:
    """Before the vLLM that `whetstone up` starts."""
    return Served(plain_proxy, tokenizer)


@pytest.fixture
def thinking(parsing_proxy: RunningProxy, tokenizer: Tokenizer) -> Served:
    """Before one with a reasoning parser: what the starter says are thoughts to it, unless thinking is switched off."""
    return Served(parsing_proxy, tokenizer)
