"""Settings: where they come from, what stops the start."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from whetstone.config.settings import Settings, SettingsError, as_environment, load
from whetstone.domain.suggestions import keys_of


def test_the_file_beats_the_default_the_environment_the_file_and_the_command_line_both(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    config.write_text('seed = 1\npolicy = "from-file"\n[trainer]\nlora_rank = 8\n')
    settings = load(config, {"WHETSTONE_SEED": "2", "WHETSTONE_TRAINER__LORA_ALPHA": "16"}, policy="given", data=None)
    assert (settings.seed, settings.policy) == (2, "given")
    assert (settings.trainer.lora_rank, settings.trainer.lora_alpha) == (8, 16)


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        ({"WHETSTONE_MODLE": "x"}, "did you mean 'model'"),
        ({"WHETSTONE_TRAINER__LERNING_RATE": "1"}, "did you mean 'trainer.learning_rate'"),
        ({"WHETSTONE_PROXI__PORT": "1"}, "unknown setting 'proxi'"),
        ({"WHETSTONE_PROXY__PORT": "70000"}, "proxy.port"),
        ({"WHETSTONE_PROXY__CORS_ORIGINS": '["https://*.example.com"]'}, "no origin as browsers send it"),
        ({"WHETSTONE_POLICY": "Big Name"}, "no policy name"),
        ({"WHETSTONE_SEED": "1", "WHETSTONE_SEED__X": "1"}, "seed"),
        ({"WHETSTONE_TRAINER__LEARNING_RATE": "nan"}, "learning_rate"),
        ({"WHETSTONE_TRAINER__GROUPS_PER_STEP": "40"}, "no step would ever be due"),
        (
            {"WHETSTONE_TRAINER__POLICIES_AT_ONCE": "2", "WHETSTONE_TRAINER__PROCESSES": "2"},
            "take one policy at a time: set policies_at_once to 1",
        ),
        (
            {"WHETSTONE_TRAINER__POLICIES_AT_ONCE": "2", "WHETSTONE_VLLM__SHARES_DEVICE": "true"},
            r"set trainer\.policies_at_once to 1, or vllm\.shares_device to false",
        ),
        ({"WHETSTONE_ADAPTERS__STORE": "s4://bucket"}, "s3://bucket/prefix"),
        ({"WHETSTONE_ADAPTERS__STORE": "s3://"}, "s3://bucket/prefix"),
        ({"WHETSTONE_ADAPTERS__STORE": "/mnt/adapters"}, "file:///folder"),
        ({"WHETSTONE_ADAPTERS__STORE": "s3://key:secret@bucket"}, "contains no key"),
        ({"WHETSTONE_ADAPTERS__STORE": "s3://b", "WHETSTONE_ADAPTERS__TIMEOUT_S": "40"}, "less than trainer.lease_s"),
        ({"WHETSTONE_POLICIES": '["Big Name"]'}, "no policy name"),
        ({"WHETSTONE_POLICIES": '["best"]'}, "no policy can be named 'best'"),
        ({"WHETSTONE_POLICIES": '["starter"]'}, "two policies are named 'starter'"),
        ({"WHETSTONE_POLICIES": '["a", "b"]'}, "vllm.max_loras is 6; 3 policies need 12"),
        ({"WHETSTONE_POLICIES": '["a"'}, "WHETSTONE_POLICIES"),
        ({"WHETSTONE_ALIASES": '{"gpt-4o": "nobody"}'}, "leads to 'nobody'; there are: starter"),
        ({"WHETSTONE_ALIASES": '{"starter": "starter"}'}, "is the name of a policy"),
        ({"WHETSTONE_LEARNING": '{"starter": {"explore": {"share": 0.1}}}'}, "explore.share needs explore.temperature"),
        ({"WHETSTONE_LEARNING": '{"starter": {"explore": {"temperature": 0}}}'}, "explore.temperature"),
        ({"WHETSTONE_ALIASES": '{"": "starter"}'}, "is no alias"),
        ({"WHETSTONE_ALIASES": '{"starter@v0": "starter"}'}, "is no alias"),
        ({"WHETSTONE_PROJECT": ""}, "project"),
        ({"WHETSTONE_UPSTREAMS": '{"o": {"url": "ftp://x", "models": {"t": "m"}}}'}, "upstreams.o.url"),
        ({"WHETSTONE_UPSTREAMS": '{"o": {"url": "http://x", "models": {}}}'}, "upstreams.o.models"),
        (
            {
                "WHETSTONE_SPENDING__USD_PER_DAY": "5",
                "WHETSTONE_UPSTREAMS": '{"o": {"url": "http://x", "models": {"t": "m"}, '
                '"usd_per_million_prompt_tokens": 1}}',
            },
            r"upstreams\.o: spending\.usd_per_day is set, and the price of 't' is unknown; set usd_per_million_",
        ),
        ({"WHETSTONE_UPSTREAMS": '{"o": {"url": "http://x", "models": {"T T": "m"}}}'}, "no policy name"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_remedy(environment: dict[str, str], hint: str) -> None:
    with pytest.raises(SettingsError, match=hint):
        load(environment=environment)


def test_a_misspelt_key_in_the_file_is_named_with_the_nearest_right_one(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    config.write_text("[trainer]\nlora_ranks = 8\n")
    with pytest.raises(SettingsError, match=r"trainer\.lora_ranks.*did you mean 'trainer\.lora_rank'"):
        load(config, {})


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[learning.starter]\nshadow_shares = 1", "learning.starter.shadow_share"),
        ("[learning.starter.ruler]\nmin_spreads = 1", "learning.starter.ruler.min_spread"),
        ("[learning.starter.explore]\nshares = 1", "learning.starter.explore.share"),
        ('[[learning.starter.rewards]]\nname = "n"\nrun = "a:b"\nwaight = 1', "learning.starter.rewards.0.weight"),
        ("[projects.acme.privacy]\nkeep_day = 1", "projects.acme.privacy.keep_days"),
        ("[learnings.starter]\nshadow_share = 1", "learning"),
        ("[trainer]\nshadow_share = 1", "learning.<name>.shadow_share"),
        ("learning_rate = 1", "trainer.learning_rate"),
    ],
)
def test_a_misspelt_key_is_looked_for_beside_it_first_and_then_elsewhere(tmp_path: Path, text: str, meant: str) -> None:
    config = tmp_path / "w.toml"
    config.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load(config, {})
    assert f"did you mean {meant!r}?" in str(refused.value)


def test_a_key_that_resembles_no_setting_gets_no_wrong_suggestion(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    config.write_text("[learning.starter]\nzzz = 1\n")
    with pytest.raises(SettingsError, match=r"unknown setting 'learning\.starter\.zzz'; docs/settings\.md lists"):
        load(config, {})


@pytest.mark.parametrize("text", ["not = [toml", "\x00"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: str) -> None:
    config = tmp_path / "w.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=r"w\.toml"):
        load(config, {})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        load(tmp_path / "absent.toml", {})


def test_a_child_process_loads_the_very_same_settings(tmp_path: Path) -> None:
    config = tmp_path / "w.toml"
    config.write_text("""
        policies = ["second"]
        [aliases]
        "GPT-4o 'mini'" = "second"
        "a.b/c" = "teacher"
        [upstreams.openai]
        url = "https://api.openai.com/v1"
        api_key_env = "OPENAI_API_KEY"
        models = { teacher = "gpt-4o" }
        [vllm]
        max_loras = 8
        extra_args = ["--a", "it's \\"b\\" [c]"]
    """)
    settings = load(config, {}, data=tmp_path, seed=7)
    assert settings.aliases == {"GPT-4o 'mini'": "second", "a.b/c": "teacher"}
    assert settings.upstreams["openai"].models == {"teacher": "gpt-4o"}
    assert settings.trained == ("starter", "second")
    for file in (config, Path(os.devnull)):
        assert load(environment=as_environment(settings, file)) == settings


def test_every_setting_is_documented() -> None:
    def undocumented(section: type) -> list[str]:
        fields = section.model_fields  # type: ignore[attr-defined]
        nested = [field.annotation for field in fields.values() if hasattr(field.annotation, "model_fields")]
        own = [name for name, field in fields.items() if field.description is None and field.annotation not in nested]
        return own + [name for inner in nested for name in undocumented(inner)]

    assert undocumented(Settings) == []
    assert "trainer.learning_rate" in set(keys_of(Settings))


def test_a_child_loads_these_very_settings_whatever_file_lies_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whetstone.toml").write_text("[vllm]\nmax_model_len = 64\n")
    monkeypatch.chdir(tmp_path)
    settings = Settings(data=tmp_path)
    assert load(environment=as_environment(settings, Path(os.devnull))) == settings


TENANTS = {"acme": {"policies": ["acme-agent"], "aliases": {"gpt-4o": "acme-agent"}}}
ROOM = {"max_loras": 8}


def test_each_project_has_settings_of_its_own():
    settings = Settings(projects=TENANTS, vllm=ROOM, aliases={"gpt-4o": "starter"}, learning={"acme-agent": {}})
    home, acme = settings.of_projects()
    assert (home.project, home.trained, home.aliases) == ("default", ("starter",), {"gpt-4o": "starter"})
    assert (acme.project, acme.trained, acme.aliases) == ("acme", ("acme-agent",), {"gpt-4o": "acme-agent"})
    assert acme.served_name == "acme-agent@v0"
    assert [own.home for own in (settings, home, acme)] == ["default"] * 3
    assert [own.all_trained for own in (settings, home, acme)] == [("starter", "acme-agent")] * 3
    assert (list(home.learning), list(acme.learning)) == ([], ["acme-agent"])
    assert [settings.of_policy(name).project for name in ("acme-agent", "starter", None, "nobody")] == [
        *("acme", "default", "default", "default")
    ]


def test_a_projects_settings_are_settings_for_a_program_of_its_own(tmp_path):
    (acme,) = Settings(projects=TENANTS, vllm=ROOM, data=tmp_path).of_projects()[1:]
    child = load(environment=as_environment(acme))
    assert (child.project, child.trained, child.aliases) == (acme.project, acme.trained, acme.aliases)


def test_another_servers_models_are_one_projects():
    far = {"far": {"url": "http://far/v1", "models": {"teacher": "large"}, "project": "acme"}}
    home, acme = Settings(projects=TENANTS, vllm=ROOM, upstreams=far).of_projects()
    assert (list(home.upstreams), list(acme.upstreams)) == ([], ["far"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"projects": {"acme": {}}}, r"projects\.acme: name its policies"),
        ({"projects": {"a b": {"policies": ["x"]}}}, "'a b' is no project name"),
        ({"projects": {"acme": {"policies": ["starter"]}}}, "two policies are named 'starter'"),
        ({"projects": {"acme": {"policies": ["x"], "aliases": {"y": "starter"}}}}, "the alias 'y' leads to 'starter'"),
        ({"projects": {"acme": {"policies": ["x"], "aliases": {"starter": "x"}}}}, "is the name of a policy"),
        ({"upstreams": {"f": {"url": "http://f", "models": {"t": "l"}, "project": "no"}}}, "there is no project 'no'"),
    ],
)
def test_projects_that_cannot_be_told_apart_stop_the_start(values, says):
    with pytest.raises(ValidationError, match=says):
        Settings(**{"vllm": ROOM} | values)


def test_a_project_that_nobody_named_is_told_so():
    with pytest.raises(SettingsError, match="there is no project 'nobody'; there are: default, acme"):
        Settings(projects=TENANTS, vllm=ROOM).of_project("nobody")


SERVICE = {"url": "http://127.0.0.1:9", "sums": "row_means"}


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({}, "no loss dppo_tv: set trainer.loss to cispo, dapo, grpo or dr_grpo"),
        ({"loss": "gspo"}, "no loss gspo"),
        ({"loss": "dapo", "objective": "kto"}, "trainer.objective is kto.* set it to grpo"),
        ({"loss": "dapo", "kl_weight": 0.1}, "trainer.kl_weight is 0.1.* set it to 0"),
        ({"loss": "dapo", "max_sequence_ratio": 2}, "trainer.max_sequence_ratio is 2.* set it to nothing"),
    ],
)
def test_what_a_training_service_cannot_do_stops_the_start(trainer, says):
    with pytest.raises(ValidationError, match=says):
        Settings(trainer=trainer, training_service=SERVICE)


def test_a_training_service_reaches_the_programs_that_up_starts():
    settings = Settings(trainer={"loss": "dapo"}, training_service=SERVICE)
    again = load(environment=as_environment(settings, config=Path(os.devnull)))
    assert again.training_service == settings.training_service
    assert Settings().training_service is None


def test_a_launcher_reaches_the_programs_that_up_starts():
    settings = Settings(launcher={"command": ("sh", "-c", "exit 3"), "usd_per_hour": 2.5})
    again = load(environment=as_environment(settings, config=Path(os.devnull)))
    assert again.launcher == settings.launcher
    assert Settings().launcher.command == ()


def test_no_machine_is_started_for_a_training_service():
    with pytest.raises(ValidationError, match="remove one of the two"):
        Settings(trainer={"loss": "dapo"}, training_service=SERVICE, launcher={"command": ("true",)})


def test_vllm_does_not_sleep_for_a_training_service():
    with pytest.raises(ValidationError, match="set vllm.shares_device to false"):
        Settings(trainer={"loss": "dapo"}, training_service=SERVICE, vllm={"shares_device": True})
