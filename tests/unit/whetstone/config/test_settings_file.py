"""A settings file that is written: what the loader reads back, that each line is explained, and that it is whole."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetstone.config.proxy import ProxySettings, VllmSettings
from whetstone.config.settings import Settings, SettingsError
from whetstone.config.settings_file import Table, text, write

SMALL = text([Table((), Settings, {"policy": "support"})])


def test_what_is_set_is_read_back_and_examples_change_nothing(tmp_path: Path) -> None:
    tables = [
        Table((), Settings, {"policy": "support.v1"}, {"database": "sqlite:///x.db"}),
        Table(("vllm",), VllmSettings, {"urls": ["http://a:1", "http://b:2"]}, {"max_loras": 9}, remark="Two servers."),
        Table(("proxy",), ProxySettings, {"port": 9000}),
    ]
    settings = write(tmp_path / "whetstone.toml", text(tables), replace=False, private=False)
    assert settings == Settings(policy="support.v1", vllm={"urls": ("http://a:1", "http://b:2")}, proxy={"port": 9000})


def test_an_example_is_right_too_once_its_sign_is_taken_away() -> None:
    content = text([Table(("proxy",), ProxySettings, {}, {"host": "0.0.0.0", "port": 1})])
    taken = [line.removeprefix("# ") if " = " in line else line for line in content.splitlines()]
    assert tomllib.loads("\n".join(taken)) == {"proxy": {"host": "0.0.0.0", "port": 1}}


# Surrogates are no text, and cannot be in a file.
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_and_any_key_survive(value: str, key: str) -> None:
    content = text([Table((), Settings, {"model": value}), Table(("learning", key), ProxySettings, {"port": 1})])
    read: dict[str, Any] = tomllib.loads(content)
    assert read == {"model": value, "learning": {key: {"port": 1}}}


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_file_with_a_password_is_its_owners_alone(tmp_path: Path, private: bool, mode: int) -> None:
    write(tmp_path / "w.toml", SMALL, replace=False, private=private)
    assert (tmp_path / "w.toml").stat().st_mode & 0o777 == mode


def test_no_other_file_is_replaced_unless_it_shall_be(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text("mine")
    with pytest.raises(SettingsError, match="--force"):
        write(path, SMALL, replace=False, private=False)
    assert path.read_text() == "mine"
    write(path, SMALL, replace=True, private=False)
    assert path.read_text() == SMALL
    assert [one.name for one in tmp_path.iterdir()] == ["w.toml"]


def test_settings_that_cannot_be_used_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no policy name"):
        write(tmp_path / "w.toml", 'policy = "No such"', replace=True, private=False)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"w\.toml cannot be written: No such file"):
        write(tmp_path / "gone" / "w.toml", SMALL, replace=False, private=False)
