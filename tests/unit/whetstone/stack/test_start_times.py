"""How long vLLM's last start took is known for the same model and as many servers, whatever became of the file."""

from pathlib import Path

import pytest

from whetstone.stack.start_times import FILE, StartTime, expected_s, remember


def test_the_last_start_of_the_same_servers_is_the_estimate(tmp_path: Path) -> None:
    assert expected_s(tmp_path, "qwen", 1) is None
    for seconds in (90.0, 71.2):
        remember(tmp_path, StartTime("qwen", 1, seconds))
    assert expected_s(tmp_path, "qwen", 1) == 71.2
    assert expected_s(tmp_path, "llama", 1) is None and expected_s(tmp_path, "qwen", 2) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": "qwen"}', b"\xff"])
def test_a_damaged_file_is_no_estimate(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert expected_s(tmp_path, "qwen", 1) is None


def test_a_folder_that_cannot_be_written_does_not_stop_the_start(tmp_path: Path) -> None:
    remember(tmp_path / "missing", StartTime("qwen", 1, 71.2))
    assert not (tmp_path / "missing").exists()
