"""Secrets in files: what a file holds counts as if it stood in the environment, and what is wrong with it is told."""

import os
from pathlib import Path

import pytest

from whetstone.config.secret_files import MOST_BYTES
from whetstone.config.settings import SettingsError, load

URL = "postgresql+psycopg://whetstone:s3cret@postgres:5432/whetstone"


def test_a_setting_is_taken_from_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "database").write_text(URL + "\n")
    settings = load(environment={"WHETSTONE_DATABASE_FILE": str(tmp_path / "database")})
    assert settings.database == URL


def test_so_is_a_nested_one_and_a_list(tmp_path: Path) -> None:
    (tmp_path / "port").write_text("8123")
    (tmp_path / "urls").write_text('["http://vllm:8001"]\n')
    named = {"WHETSTONE_PROXY__PORT_FILE": tmp_path / "port", "WHETSTONE_VLLM__URLS_FILE": tmp_path / "urls"}
    settings = load(environment={name: str(path) for name, path in named.items()})
    assert (settings.proxy.port, settings.vllm.urls) == (8123, ("http://vllm:8001",))


def test_the_first_key_and_judges_keys_stand_in_the_environment_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "admin").write_text("a" * 32 + "\n")
    (tmp_path / "openai").write_text("sk-of-a-judge\n")
    (tmp_path / "whetstone.toml").write_text(
        '[judges.strong]\nmodel = "openai/gpt-4o"\napi_key_env = "OPENAI_API_KEY"\n'
    )
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("WHETSTONE_CONFIG", str(tmp_path / "whetstone.toml"))
    monkeypatch.setenv("WHETSTONE_BOOTSTRAP_ADMIN_KEY_FILE", str(tmp_path / "admin"))
    monkeypatch.setenv("OPENAI_API_KEY_FILE", str(tmp_path / "openai"))
    before = dict(os.environ)
    try:
        load()
        assert os.environ["WHETSTONE_BOOTSTRAP_ADMIN_KEY"] == "a" * 32
        assert os.environ["OPENAI_API_KEY"] == "sk-of-a-judge"
        assert "WHETSTONE_BOOTSTRAP_ADMIN_KEY_FILE" not in os.environ, "a child would find both"
        load()
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_an_environment_that_is_given_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "database").write_text(URL)
    given = {"WHETSTONE_DATABASE_FILE": str(tmp_path / "database")}
    load(environment=given)
    assert given == {"WHETSTONE_DATABASE_FILE": str(tmp_path / "database")}


def test_both_ways_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "database").write_text(URL)
    with pytest.raises(SettingsError, match="WHETSTONE_DATABASE and WHETSTONE_DATABASE_FILE are both set"):
        load(environment={"WHETSTONE_DATABASE": URL, "WHETSTONE_DATABASE_FILE": str(tmp_path / "database")})


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b" \n", "empty"), (b"x" * (MOST_BYTES + 1), "too long"), (b"\xff\xfes3cret", "no text")],
)
def test_a_file_that_cannot_be_taken_is_named_with_its_variable_and_not_quoted(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "broker"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"WHETSTONE_BROKER_FILE names {path}, which .*{why}") as told:
        load(environment={"WHETSTONE_BROKER_FILE": str(path)})
    assert "s3cret" not in str(told.value)


def test_a_misspelt_one_is_a_setting_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("y")
    with pytest.raises(SettingsError, match="did you mean 'database'"):
        load(environment={"WHETSTONE_DATABSE_FILE": str(tmp_path / "x")})


def test_the_hubs_token_may_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    environment = {"HF_TOKEN_FILE": str(tmp_path / "token")}
    load(environment=environment)
    with pytest.raises(SettingsError, match="HF_TOKEN and HF_TOKEN_FILE are both set"):
        load(environment=environment | {"HF_TOKEN": "other"})
