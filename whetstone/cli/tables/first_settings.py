"""What `whetstone init` writes: answers to five questions, checked one by one, as parts of a settings file."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from whetstone.config.proxy import ProxySettings, VllmSettings
from whetstone.config.rewards import JudgeSettings, RewardFunction, RewardSettings, RulerSettings
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.config.settings_file import Table
from whetstone.database.engine import without_password
from whetstone.models.catalog import MODELS

RewardSource = Literal["feedback", "code", "judge"]
STARTER, UP, SQLITE = "starter", "up", "sqlite"
"""Answers that stand for a default: the starter model, a vLLM that `up` starts, SQLite in the data folder."""
FUNCTION, JUDGE = "rewards:score", "base"
_POSTGRES = ("postgres://", "postgresql://")


@dataclass(frozen=True)
class Answers:
    """What was answered; None is the default."""

    model: str | None = None
    vllm: tuple[str, ...] = ()
    policy: str = "starter"
    rewards: RewardSource = "feedback"
    by: str | None = None
    """The function that rewards, or the model that judges."""
    database: str | None = None
    data: str = "data"

    @property
    def has_password(self) -> bool:
        """Whether the file will contain a password."""
        return self.database is not None and without_password(self.database) != self.database


def model(answer: str) -> str | None:
    """Return the model to write; None for the starter.

    Raises:
        SettingsError: it is neither a folder that is there nor the name of a model on a hub.
    """
    if answer == STARTER:
        return None
    folder = Path(answer).expanduser()
    if folder.is_dir():
        return str(folder) if answer.startswith("~") else answer
    if answer in MODELS:
        raise SettingsError(f"{answer!r} is fetched first: `whetstone models get {answer}`; then name its folder")
    if answer.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", answer):
        raise SettingsError(
            f"{answer!r} is no folder here, and a name on a hub has the form owner/model, such as "
            f"Qwen/Qwen2.5-7B-Instruct; {STARTER!r} is the tiny model that comes with Whetstone"
        )
    return answer


def vllm(answer: str) -> tuple[str, ...]:
    """Return the addresses of vLLM servers; none if `up` starts one.

    Raises:
        SettingsError: one of them is no address.
    """
    urls = tuple(one for one in re.split(r"[\s,]+", answer) if one and one != UP)
    if strange := [url for url in urls if not re.match(r"https?://[^/\s]+", url)]:
        raise SettingsError(f"{strange[0]!r} is no address of a server, such as http://127.0.0.1:8001")
    if any(url.rstrip("/").endswith("/v1") for url in urls):
        raise SettingsError("leave out /v1: the address is that of the server, such as http://127.0.0.1:8001")
    return load(Path(os.devnull), {}, vllm__urls=urls).vllm.urls


def policy(answer: str) -> str:
    """Return the name of the policy.

    Raises:
        SettingsError: it is malformed or reserved.
    """
    return load(Path(os.devnull), {}, policy=answer).policy


def policy_for(model_name: str | None) -> str:
    """Return the name that is proposed for a model: `qwen2.5-7b-instruct` for Qwen/Qwen2.5-7B-Instruct."""
    if model_name is None:
        return STARTER
    return re.sub(r"^[^a-z0-9]+|[^a-z0-9._-]", "", Path(model_name).name.lower())[:64] or STARTER


def rewards(answer: str) -> RewardSource:
    """Return where rewards come from.

    Raises:
        SettingsError: it is none of the three.
    """
    known: dict[str, RewardSource] = {"feedback": "feedback", "code": "code", "judge": "judge"}
    if answer not in known:
        raise SettingsError(f"rewards come from feedback, code or judge, not from {answer!r}")
    return known[answer]


def function(answer: str) -> str:
    """Return the function or program that rewards.

    Raises:
        SettingsError: it names neither.
    """
    if not re.fullmatch(r"[\w.]+:\w+", answer) and "/" not in answer:
        raise SettingsError(
            f"{answer!r} names no function: write package.module:function, or the path of a program, ./reward.sh"
        )
    return answer


def judge(answer: str, model_name: str | None) -> str:
    """Return the model that judges.

    Raises:
        SettingsError: it cannot judge.
    """
    if answer == JUDGE and model_name is None:
        raise SettingsError(
            "the starter is too small to judge: name another model as litellm does, openai/gpt-4.1-2025-04-14"
        )
    if answer != JUDGE and "/" not in answer:
        raise SettingsError(
            f"{answer!r} is no judge: write provider/model as litellm does, openai/gpt-4.1-2025-04-14, or {JUDGE!r}, "
            "the base model of this stack"
        )
    return answer


def database(answer: str) -> str | None:
    """Return the database's URL; None for SQLite in the data folder.

    Raises:
        SettingsError: it is no URL of a database that is supported.
    """
    if answer == SQLITE:
        return None
    if answer.startswith(_POSTGRES):
        rest = without_password(answer).partition("://")[2]
        raise SettingsError(f"write the URL of PostgreSQL with its driver: postgresql+psycopg://{rest}")
    try:
        url = make_url(answer)
    except ArgumentError:
        url = None
    if url is None or url.drivername not in ("postgresql+psycopg", "sqlite"):
        raise SettingsError(
            f"no URL of a database; write {SQLITE!r} for a file in the data folder, or "
            "postgresql+psycopg://user@host/name"
        )
    return answer


def tables(answers: Answers) -> Iterator[Table]:
    """Yield the parts of the file."""
    at_top = {"model": answers.model, "policy": answers.policy, "data": answers.data, "database": answers.database}
    values = {key: value for key, value in at_top.items() if value is not None}
    examples = {"model": "Qwen/Qwen2.5-7B-Instruct", "database": "postgresql+psycopg://whetstone@127.0.0.1/whetstone"}
    yield Table(
        (),
        Settings,
        values,
        {key: value for key, value in examples.items() if key not in values},
        remark="`database` has a password: keep this file out of version control, or move the line to the variable "
        "WHETSTONE_DATABASE."
        if answers.has_password
        else None,
    )
    yield Table(("proxy",), ProxySettings, {"port": 8000}, {"host": "0.0.0.0"})
    if answers.vllm:
        yield Table(
            ("vllm",),
            VllmSettings,
            {"urls": list(answers.vllm)},
            remark=f"Each serves the base model as {answers.policy}@v0 (--served-model-name) and takes adapters "
            "(--enable-lora): docs/deploy.md. `whetstone doctor` checks it.",
        )
    else:
        yield Table(("vllm",), VllmSettings, {}, {"urls": ["http://127.0.0.1:8001"], "max_model_len": 8192})
    yield from _rewards(answers)


def _rewards(answers: Answers) -> Iterator[Table]:
    learning = ("learning", answers.policy)
    if answers.rewards == "feedback":
        yield Table(
            learning,
            RewardSettings,
            {"baseline": True},
            {"failure_reward": 0.0},
            remark="Rewards come from feedback: POST /v1/feedback (docs/feedback.md). A policy only records until "
            f"`whetstone policies train on {answers.policy}`.",
        )
    elif answers.rewards == "code":
        run = answers.by or FUNCTION
        yield Table(
            (*learning, "rewards"),
            RewardFunction,
            {"name": reward_name(run), "run": run, "kind": "reward", "weight": 1.0},
            {"timeout_s": 10.0},
            remark="Rewards come from your code, which scores each finished trajectory (docs/rewards_in_code.md). `up` "
            "refuses to start while it cannot be loaded. More functions: more parts like this one.",
            is_one_of_many=True,
        )
    else:
        yield Table(
            ("judges", "main"),
            JudgeSettings,
            {"model": answers.by or JUDGE},
            {"api_key_env": "OPENAI_API_KEY"},
            remark="Rewards come from a model that compares the attempts of a group (docs/ruler.md).",
        )
        yield Table((*learning, "ruler"), RulerSettings, {"judges": ["main"], "rank": "all"}, {"usd_per_day": 5.0})


def reward_name(run: str) -> str:
    """Return the name of a function's or program's score: `score` of `rewards:score`, `reward` of `./reward.sh`."""
    name = run.rpartition(":")[2] if ":" in run else Path(run).stem
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
