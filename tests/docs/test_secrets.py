"""Passwords and keys stay where they were put: not in errors, not in up.json, not in what the command line says."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from migrations.run import DatabaseUnreachable, upgrade
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.main import app
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import without_password
from whetstone.stack.admin_client import of_running
from whetstone.stack.stack import Stack
from whetstone.stack.supervisor import Supervisor

SECRET = "pa55w0rd"
DATABASE = f"postgresql+psycopg://me:{SECRET}@db.example.com:5432/whetstone"
TOLD = "postgresql+psycopg://me:***@db.example.com:5432/whetstone"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (DATABASE, TOLD),
        (f"redis://:{SECRET}@10.0.0.1:6379/0", "redis://:***@10.0.0.1:6379/0"),
        (f"amqp://me:{SECRET}@rabbit//", "amqp://me:***@rabbit//"),
        (f"postgres://me:{SECRET}/@#:@h/db", "postgres://me:***@h/db"),
        (f"postgresql+psycopg://h/db?user=me&password={SECRET}&sslmode=require",
         "postgresql+psycopg://h/db?user=me&password=***&sslmode=require"),
        ("postgresql+psycopg://me@h/db", "postgresql+psycopg://me@h/db"),
        ("sqlite:////var/a:b@c/whetstone.db", "sqlite:////var/a:b@c/whetstone.db"),
        ("redis+socket:///run/redis.sock", "redis+socket:///run/redis.sock"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("", ""),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        DATABASE.replace("db.example.com:5432", "127.0.0.1:1"),
        DATABASE.replace("postgresql+psycopg", "postgres"),
        f"me:{SECRET}@host",
    ],
)
def test_a_database_that_cannot_be_used_keeps_its_password(url: str) -> None:
    try:
        upgrade(url)
    except DatabaseUnreachable as error:
        assert SECRET not in str(error)
    else:
        raise AssertionError


@pytest.mark.parametrize(
    "values",
    [
        {"database": [SECRET]},
        {"broker": {"url": SECRET}},
        {"upstreams": {"far": {"url": f"https://me:{SECRET}@far.example/v1", "models": {"teacher": "m"}}}},
        {"upstreams": {"far": {"url": f"ftp://me:{SECRET}@far", "models": {"teacher": "m"}}}},
        {"upstreams": {"far": {"url": "https://far/v1", "api_key_env": f"sk-{SECRET}", "models": {"teacher": "m"}}}},
        {"upstreams": {"far": {"url": "https://far/v1", "api_key": f"sk-{SECRET}", "models": {"teacher": "m"}}}},
        {"judges": {"strong": {"model": "m", "api_key_env": f"gsk_{SECRET}"}}},
        {"judges": {"strong": {"model": "m", "url": f"https://me:{SECRET}@judge/v1"}}},
        {"vllm": {"urls": [f"http://me:{SECRET}@10.0.0.1:8000"]}},
        {"database": DATABASE, "aliases": {"a": "unknown"}},
    ],
)
def test_settings_that_cannot_be_used_are_named_without_what_may_be_a_secret(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "whetstone.toml"
    config.write_text("", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load(config, {}, **values)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_key_in_the_place_of_its_variable_is_recognised() -> None:
    with pytest.raises(SettingsError, match="api_key_env"):
        load(environment={"WHETSTONE_JUDGES__A__MODEL": "m", "WHETSTONE_JUDGES__A__API_KEY_ENV": f"hf_{SECRET}"})


def test_for_an_address_with_a_login_the_error_names_the_place_of_keys() -> None:
    with pytest.raises(SettingsError, match="api_key_env names the variable that has the key"):
        load(environment={"WHETSTONE_VLLM__URLS": f"http://me:{SECRET}@10.0.0.1:8000"})


def test_up_json_has_no_password(tmp_path: Path) -> None:
    broker = f"redis://:{SECRET}@10.0.0.1:6379/0"
    settings = Settings(data=tmp_path, database=DATABASE, broker=broker, vllm={"urls": ("http://h:1",)})  # type: ignore[arg-type]
    Stack(settings, Supervisor(tmp_path / "logs"), "http://127.0.0.1:8000").write_addresses()
    written = (tmp_path / "up.json").read_text(encoding="utf-8")
    assert SECRET not in written and json.loads(written)["database"] == TOLD


def test_the_command_line_takes_the_password_from_its_own_settings(tmp_path: Path) -> None:
    write_addresses(tmp_path, database=TOLD)
    assert of_running(Settings(data=tmp_path, database=DATABASE)).database_url == DATABASE
    for other in (None, DATABASE.replace("/whetstone", "/another")):
        with pytest.raises(SettingsError, match="WHETSTONE_DATABASE") as caught:
            of_running(Settings(data=tmp_path, database=other))
        assert SECRET not in str(caught.value)


def test_a_migration_tells_which_database_but_not_its_password(sqlite_template: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/whetstone.db?password={SECRET}"
    result = CliRunner(env={"WHETSTONE_DATABASE": url}).invoke(app, ["migrate", "--data", str(tmp_path)])
    assert SECRET not in result.output
