"""What a stack needs in the database before it starts."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from migrations import schema
from whetstone.config.settings import Settings, SettingsError
from whetstone.registry.projects import Store, UnknownPolicy

TEACHER = {"url": "https://api.openai.com/v1", "models": {"teacher": "gpt-4o"}}
MANY = Settings(
    data=Path("unused"),
    policies=("second",),
    aliases={"gpt-4o": "starter", "gpt-4": "starter"},
    upstreams={"openai": TEACHER},  # type: ignore[dict-item]
    vllm={"max_loras": 8},  # type: ignore[arg-type]
)


def policies(engine: Engine) -> dict[str, Any]:
    with engine.connect() as connection:
        return {row.id: row for row in connection.execute(select(schema.policies))}


def test_every_policy_of_the_settings_is_there_with_version_0(engine: Engine) -> None:
    Store(engine).prepare(MANY)
    found = policies(engine)
    assert {name: (row.base_model, row.upstream, row.aliases) for name, row in found.items()} == {
        "starter": ("starter@v0", None, ["gpt-4", "gpt-4o"]),
        "second": ("starter@v0", None, None),
        "teacher": ("gpt-4o", "openai", None),
    }
    assert {row.state for row in found.values()} == {"recording"}
    with engine.connect() as connection:
        versions = {
            row.id for row in connection.execute(select(schema.policy_versions).where(schema.policy_versions.c.served))
        }
    assert versions == {"starter@v0", "second@v0", "teacher@v0"}


def test_a_second_start_changes_names_and_nothing_that_was_learnt(engine: Engine) -> None:
    store = Store(engine)
    store.prepare(MANY)
    with engine.begin() as connection:
        connection.execute(schema.policies.update().values(live_version=3, state="training"))
    store.prepare(MANY.model_copy(update={"aliases": {"o1": "second"}}))
    found = policies(engine)
    assert {name: row.aliases for name, row in found.items()} == {"starter": None, "second": ["o1"], "teacher": None}
    assert {(row.live_version, row.state) for row in found.values()} == {(3, "training")}


def test_a_policy_follows_its_base_model_when_the_folder_moves(engine: Engine, tmp_path: Path) -> None:
    here, moved = tmp_path / "here", tmp_path / "moved"
    here.mkdir()
    store = Store(engine)
    store.prepare(MANY.model_copy(update={"model": str(here)}))
    store.prepare(MANY.model_copy(update={"model": str(moved)}))
    assert policies(engine)["starter"].model_path == str(here), "it is there, and what was trained belongs to it"
    here.rename(moved)
    store.prepare(MANY.model_copy(update={"model": str(moved)}))
    found = policies(engine)
    assert {name: row.model_path for name, row in found.items()} == {
        "starter": str(moved), "second": str(moved), "teacher": "gpt-4o"
    }  # fmt: skip


def test_another_servers_policy_cannot_be_set_to_train(engine: Engine) -> None:
    store = Store(engine)
    store.prepare(MANY)
    store.set_policy_state("default", "second", "training")
    with pytest.raises(UnknownPolicy, match="there are: second, starter"):
        store.set_policy_state("default", "teacher", "training")
    assert {name: row.state for name, row in policies(engine).items()} == {
        "second": "training", "starter": "recording", "teacher": "recording"
    }  # fmt: skip


def test_a_policy_stays_with_its_project(engine):
    tenants = {"acme": {"policies": ["agent"]}}
    Store(engine).prepare(Settings(projects=tenants, vllm={"max_loras": 8}))
    assert [row["id"] for row in Store(engine).policies("acme")] == ["agent"]
    moved = Settings(projects={"other": {"policies": ["agent"]}}, vllm={"max_loras": 8})
    with pytest.raises(SettingsError, match="'other' cannot have the policy 'agent': it is of project 'acme'"):
        Store(engine).prepare(moved)
    assert Store(engine).policies("other") == []
