"""The secrets that sign feedback tokens: from the environment, or a file that the first start makes."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.admission.token_secrets import FILE, read_secrets
from whetstone.config.settings import FEEDBACK_SECRETS_VARIABLE, SettingsError, load

LONG = "a" * 32


def test_the_first_start_makes_a_secret_for_its_owner_alone_and_the_next_reads_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (made,) = read_secrets(data, {})
    assert read_secrets(data, {}) == (made,) and len(made) == 64
    assert stat.S_IMODE((data / FILE).stat().st_mode) == 0o600
    assert [path.name for path in data.iterdir()] == [FILE], "nothing unfinished stays"
    assert read_secrets(tmp_path / "other", {}) != (made,)


def test_proxies_that_start_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda _: read_secrets(tmp_path, {}), range(8)))
    assert len(set(read)) == 1


def test_the_environment_counts_more_and_leaves_no_file(tmp_path: Path) -> None:
    environment = {FEEDBACK_SECRETS_VARIABLE: f"{LONG}\n{'b' * 40}\n"}
    assert read_secrets(tmp_path, environment) == (LONG.encode(), b"b" * 40)
    assert list(tmp_path.iterdir()) == []


def test_it_is_read_from_a_file_that_the_environment_names_and_is_no_setting(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(LONG + "\n", encoding="utf-8")
    environment = {f"{FEEDBACK_SECRETS_VARIABLE}_FILE": str(tmp_path / "secret"), FEEDBACK_SECRETS_VARIABLE: ""}
    assert LONG not in str(load(environment=environment))


@pytest.mark.parametrize("text", ["short", f"{LONG}\nshort", "   "])
def test_a_secret_that_could_be_guessed_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    for environment in ({}, {FEEDBACK_SECRETS_VARIABLE: text}):
        with pytest.raises(SettingsError, match="openssl rand") as caught:
            read_secrets(tmp_path, environment)
        assert text.strip() == "" or text not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(SettingsError, match=FILE):
        read_secrets(tmp_path, {})
