"""What `whetstone export` writes is what `datasets` and TRL read: proved in TRL's own environment."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migrations.run import upgrade
from tests.conftest import Seed
from whetstone.config.settings import STARTER
from whetstone.database.engine import connect
from whetstone.transfer.exporting import files
from whetstone.transfer.exporting.exporter import ExportOptions, run
from whetstone.transfer.exporting.store import Filter

ROOT = Path(__file__).parents[2]
LOADS = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
from trl.data_utils import apply_chat_template, is_conversational
kind, path, model = sys.argv[1:]
rows = load_dataset(path.rpartition(".")[2].replace("jsonl", "json"), data_files=path, split="train")
tokenizer = AutoTokenizer.from_pretrained(model)
assert len(rows) == 1 and is_conversational(rows[0]), rows
print({name: text for name, text in apply_chat_template(rows[0], tokenizer).items()})
"""


@pytest.fixture
def database_url(tmp_path: Path) -> Iterator[str]:
    """A group of two attempts, one of which was worth it."""
    url = f"sqlite:///{tmp_path / 'whetstone.db'}"
    upgrade(url)
    engine = connect(url)
    seed = Seed(engine)
    seed.project("default")
    seed.group("g")
    for name, reward in (("good", 1.0), ("bad", 0.0)):
        seed.trajectory(name, "g", turns=0, completions=1, reward=reward)
        said = {"role": "assistant", "content": name}
        seed.completion(name, 0, response=said)
    engine.dispose()
    yield url


@pytest.mark.slow
@pytest.mark.long(part="trl")
@pytest.mark.parametrize("end", ["jsonl", "parquet"])
@pytest.mark.parametrize(("kind", "named"), [("sft", "text"), ("preferences", "chosen")])
def test_datasets_loads_it_and_trl_renders_it(
    database_url: str, tmp_path: Path, kind: Any, named: str, end: str
) -> None:
    path = tmp_path / f"out.{end}"
    with files.opened(str(path), kind, ids=False) as rows:
        assert run(database_url, ExportOptions(kind, Filter("default")), rows, lambda _: None).rows == 1
    python = ROOT / ".venv-trl" / "bin" / "python"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    command = [python, "-W", "ignore", "-c", LOADS, kind, str(path), str(STARTER)]
    loaded = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert f"'{named}'" in loaded.stdout and "good" in loaded.stdout
