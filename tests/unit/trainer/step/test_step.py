"""A step from claim to promotion, with the real learner; a vLLM that can be made to fail answers on the real wire."""

import itertools
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Engine, select, update

from benchmarks.fakes.json_server import Handler, Server
from migrations import schema
from tests.unit.trainer.learner.gradient.shortage import shortage
from trainer.domain.claims import Member
from trainer.domain.row_builder import build_rows
from trainer.domain.rows import SampledCompletion
from trainer.errors import AdapterNotWritten, LeaseLost, NotFinite, ServiceDown, ServiceRefused
from trainer.learner.gradient import memory
from trainer.learner.learner import Learner
from trainer.learner.service.learner import Services
from trainer.step import failed_rows
from trainer.step.learners import Learners
from trainer.step.step import UNREADABLE_RETRY_S, take_step
from trainer.store.unit_of_work import Store
from trainer.vllm.device_pause import RETRY_S
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings
from whetstone.config.trainer import TrainerSettings
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry import adapters
from whetstone.registry.projects import Store as CommandLine
from whetstone.registry.versions import roll_back
from whetstone.vllm.client import Vllm, VllmDown

RULES = TrainerSettings(groups_per_step=1, threads=1, device="cpu", lora_rank=4, lora_alpha=8)
OVERFLOWING = {"entropy_weight": 1e39}
"""Rules under which no loss is finite."""
SPOKEN = [5, 9, 11]
"""What the fake samples, whatever it is asked."""


def scale_loras(learner: Learner, scale: float) -> None:
    with torch.no_grad():
        for name, weight in learner._trained.items():
            if "lora_B" in name:
                weight.mul_(scale)


class FakeVllm(Server):
    """Control calls and completions as vLLM speaks them. Its logprobs are those of the folder it was told to load."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.loaded: dict[str, Path] = {}
        self.calls: list[str] = []
        self.wrong_by_nats = 0.0
        self.sampled = 0
        """Tokens of all its completions."""
        self.wrong_scale = 1.0
        """Times a LoRA's matrices that it serves."""
        self.wrong_seeds = range(0)
        """Seeds of requests that it answers a nat too low."""
        self.refuses: set[str] = set()
        self.well = True
        """Whether its engine lives; one that does not refuses and says so."""
        self.when_called: Callable[[str], bool] = lambda _path: True
        """Asked before each call; where it says no, the connection is closed without an answer."""
        self.says: dict[str, list[int]] = {}
        """Name -> what it samples, where that is not SPOKEN."""
        super().__init__(FakeHandler)

    def learner(self, name: str) -> Learner:
        """What holds the weights of a name that it serves."""
        if name in self.loaded:
            return Learner.resume(self.model, self.loaded[name], RULES)
        return Learner.fresh(self.model, RULES, seed=0)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | str]:
        if path == "/health":
            return (200, "") if self.well else (503, "")
        if path in self.refuses:
            return 400, {"error": {"message": "no adapter of ours", "type": "BadRequestError", "code": 400}}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": False}
        if path in ("/sleep?level=1&mode=wait", "/wake_up"):
            return 200, {"status": "sleeping"}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name} for name in ["starter@v0", *self.loaded]]}
        if path == "/v1/load_lora_adapter":
            self.loaded[body["lora_name"]] = Path(body["lora_path"])
            return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."
        if path == "/v1/unload_lora_adapter":
            del self.loaded[body["lora_name"]]
            return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
        if path == "/v1/completions" and body["model"] in ("starter@v0", *self.loaded):
            said = self.says.get(body["model"], SPOKEN)
            learner, choices = self.learner(body["model"]), []
            self.sampled += len(said) * body["n"] * len(body["prompt"])
            scale_loras(learner, self.wrong_scale)
            wrong_by_nats = 1.0 if body["seed"] in self.wrong_seeds else self.wrong_by_nats
            for prompt in body["prompt"]:
                logprobs = [nats - wrong_by_nats for nats in learner.logprobs(prompt, said)]
                choices += [{"token_ids": said, "logprobs": {"token_logprobs": logprobs}}] * body["n"]
            return 200, {"choices": choices}
        return 404, {"error": {"message": f"{body.get('model')} does not exist", "type": "NotFoundError", "code": 404}}


class FakeHandler(Handler):
    server: FakeVllm

    def respond(self, body: dict[str, Any]) -> None:
        self.server.calls.append(self.path)
        if not self.server.when_called(self.path):
            self.close_connection = True
            return
        status, answer = self.server.answer(self.path, body)
        self.whole(status, answer.encode() if isinstance(answer, str) else answer)


class Training:
    """A training worker with a policy to train: what `trainer.tasks` puts together."""

    def __init__(self, engine: Engine, seed: Any, fake: FakeVllm, data: Path) -> None:
        self.engine, self.seed, self.fake = engine, seed, fake
        self.settings = Settings(data=data, model=str(fake.model), trainer=RULES)
        self.store = Store(engine, "default")
        self.vllm = Vllm(fake.url)
        self.learners = Learners(self.settings)
        self.adapters = data / "adapters"

    def step(self) -> bool:
        replicas = Replicas({"http://one": self.vllm})
        return take_step("starter", self.store, self.learners, replicas, self.settings)

    def with_rules(self, **values: Any) -> None:
        self.settings = self.settings.model_copy(update={"trainer": RULES.model_copy(update=values)})

    def shares_device(self) -> None:
        vllm = self.settings.vllm.model_copy(update={"shares_device": True})
        self.settings = self.settings.model_copy(update={"vllm": vllm})

    def vllm_stays_away(self) -> None:
        """No call is answered any more, and nobody waits for it."""
        vllm = self.settings.vllm.model_copy(update={"start_timeout_s": 0.0})
        self.settings = self.settings.model_copy(update={"vllm": vllm})
        self.fake.when_called = lambda _path: False

    def group(self, group_id: str, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0, turns: int = 2) -> None:
        self.seed.group(group_id, state="scored", size=2, rewarded=2, closed_at=datetime.now(UTC))
        for number, reward in enumerate(rewards):
            trajectory_id = f"{group_id}-{number}"
            self.seed.trajectory(
                trajectory_id, group_id, turns=turns, state="rewarded", reward=reward, first_version=version,
                last_version=version, why_not_trained="waiting_step",
            )  # fmt: skip
            self.seed.feedback(trajectory_id, reward, state="applied", trajectory_id=trajectory_id)
            # The ids differ by trajectory: equal ones with opposite advantages would cancel out.
            self.write(schema.completions, schema.completions.c.trajectory_id == trajectory_id,
                       policy_version=version, token_ids=[20 + number, 30 + number])  # fmt: skip

    def single(self, name: str, reward: float) -> None:
        """A trajectory that stayed alone."""
        self.group(name, rewards=(reward,))
        self.write(schema.groups, schema.groups.c.id == name, formed_by="single", compared_with="baseline")

    def write(self, table: Any, where: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(where).values(**values))

    def rows(self, table: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(table)))

    def all(self, table: Any, column: str) -> set[Any]:
        return {getattr(row, column) for row in self.rows(table)}

    def versions(self) -> dict[int, str]:
        return {row.version: row.state for row in self.rows(schema.policy_versions)}

    def lease_ends(self) -> None:
        s = schema.steps.c
        self.write(schema.steps, s.lease_until.is_not(None), lease_until=datetime.now(UTC) - timedelta(seconds=1))

    @property
    def live_version(self) -> int:
        return int(self.seed.one(schema.policies, "starter").live_version)


@pytest.fixture(params=["sqlite"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """What differs between databases, test_store.py tests on both."""
    return str(request.param)


@pytest.fixture
def fake(tiny_model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as fake:
        yield fake


@pytest.fixture
def training(engine: Engine, seed: Any, fake: FakeVllm, tmp_path: Path) -> Iterator[Training]:
    training = Training(engine, seed, fake, tmp_path / "data")
    yield training
    training.vllm.close()


def test_by_state_other_groups_count_at_a_prompt_and_the_step_says_how_much(training: Training) -> None:
    training.with_rules(baseline="state", groups_per_step=2)
    training.group("g")
    training.group("h", rewards=(1.0, 0.5), turns=1)
    own = schema.trajectories.c
    training.write(schema.trajectories, own.id.in_(("g-0", "g-1", "h-0", "h-1")), reward_source="trajectory")
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    # All met the first prompt: the mean there is 0.625. The second prompts of g differ: its mean is 0.5.
    assert {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)} == pytest.approx(
        {"g-0": (-0.625 - 0.5) / 2, "g-1": (0.375 + 0.5) / 2, "h-0": 0.375, "h-1": -0.125}
    )
    assert (step.state, step.sampled_tokens, step.state_share) == ("promoted", 12, 8 / 12)


def test_a_step_ends_with_a_live_version_that_vllm_has_and_the_disk_keeps(training: Training) -> None:
    training.group("g")
    assert training.step() is True
    assert training.live_version == 1
    assert training.versions() == {0: "retired", 1: "live"}
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.version_in, step.version_out, step.attempt) == ("promoted", 0, 1, 1)
    assert (step.reward_mean, step.reward_spread, step.sampled_tokens) == (0.5, 0.5, 8)
    assert step.fresh_share == 1.0 and step.mismatch_k3 > 0 and step.grad_norm > 0
    assert (step.kind, step.loss_function, step.learning_rate) == ("grpo", "dppo_tv", 1e-3)
    assert (step.advantage_spread, step.completions, step.rows, step.discarded) == (0.5, 4, 2, {})
    assert step.read_tokens >= step.sampled_tokens and step.entropy > 0 and step.kl == 0
    assert set(step.phases) == {"read", "model", "train", "write", "load", "probe"}
    assert step.tokens_per_s == pytest.approx(step.sampled_tokens / step.seconds)
    assert step.seconds >= sum(step.phases.values()) - 1e-3
    assert (step.lease_until, step.error) == (None, None)
    assert training.all(schema.groups, "state") == {"trained"}
    assert {(row.state, row.trained_in_step) for row in training.rows(schema.trajectories)} == {("trained", 1)}
    assert {(row.state, row.step) for row in training.rows(schema.feedback)} == {("used", 1)}
    assert {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)} == {
        "g-0": -0.5, "g-1": 0.5,
    }  # fmt: skip
    version = training.seed.one(schema.policy_versions, "starter@v1")
    assert version.manifest_sha256 == adapters.verify(training.adapters / "starter@v1")
    assert version.probe_k3 < 1e-9 and version.probe_tokens > 0
    assert training.fake.loaded == {"starter@v1": training.adapters / "starter@v1"} and version.served
    assert training.step() is False


def test_a_candidate_that_vllm_speaks_otherwise_is_rejected_and_the_next_step_starts_from_the_live_one(
    training: Training,
) -> None:
    training.group("g")
    training.fake.wrong_by_nats = 1.0
    assert training.step() is True
    assert training.live_version == 0
    assert training.versions() == {0: "live", 1: "rejected"}
    step = training.seed.one(schema.steps, "starter#1")
    assert set(step.phases) == {"read", "model", "train", "write", "load", "probe"} and step.tokens_per_s > 0
    version = training.seed.one(schema.policy_versions, "starter@v1")
    assert "disagree" in version.reason and version.probe_k3 > 0.1 and not version.served
    assert training.seed.one(schema.steps, "starter#1").state == "rejected"
    assert training.all(schema.trajectories, "state") == {"trained"}  # once is once

    training.fake.wrong_by_nats = 0.0
    training.group("h")
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#2")
    assert (step.state, step.version_in, step.version_out, training.live_version) == ("promoted", 0, 2, 2)
    manifest, _ = adapters.read_manifest(training.adapters / "starter@v2")
    assert (manifest["parent"], manifest["step"]) == (0, 2)
    # The same rows from the same beginning: nothing of the rejected one is left in it.
    files = [(training.adapters / f"starter@v{n}" / "adapter_model.safetensors").read_bytes() for n in (1, 2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/completions"])
def test_a_candidate_that_vllm_refuses_is_rejected_with_its_words(training: Training, path: str) -> None:
    training.group("g")
    training.fake.refuses.add(path)
    assert training.step() is True
    assert (training.live_version, training.versions()) == (0, {0: "live", 1: "rejected"})
    assert "no adapter of ours" in training.seed.one(schema.steps, "starter#1").error


def test_a_vllm_that_is_away_is_waited_for(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.vllm.retry.RETRY_S", 0.01)
    training.group("g")
    asked = itertools.count()
    training.fake.when_called = lambda _path: next(asked) >= 3
    assert training.step() is True
    assert training.live_version == 1


def test_a_vllm_that_restarts_during_the_probe_gets_the_candidate_again(training: Training) -> None:
    training.group("g")

    def dies_once(path: str) -> bool:
        if path != "/v1/completions" or path in training.fake.calls[:-1]:
            return True
        training.fake.loaded.clear()
        return False

    training.fake.when_called = dies_once
    assert training.step() is True
    assert training.live_version == 1
    assert training.fake.calls.count("/v1/load_lora_adapter") == 2


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/completions"])
def test_an_engine_that_is_dying_costs_no_candidate(
    training: Training, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("trainer.vllm.retry.RETRY_S", 0.01)
    training.group("g")
    training.fake.refuses.add(path)
    training.fake.well = False

    def gets_well(asked: str) -> bool:
        if asked == "/v1/models" and training.fake.calls.count("/health") == 2:
            training.fake.well = True
            training.fake.refuses.clear()
        return True

    training.fake.when_called = gets_well
    if path == "/v1/completions":  # of the probe there is one more try
        training.fake.when_called = lambda asked: training.fake.refuses.clear() is None if asked == "/health" else True
    assert training.step() is True
    assert (training.live_version, training.versions()) == (1, {0: "retired", 1: "live"})


def test_a_server_that_has_forgotten_the_candidate_before_it_speaks_gets_it_again(training: Training) -> None:
    training.group("g")

    def forgets_once(path: str) -> bool:
        if path == "/v1/completions" and path not in training.fake.calls[:-1]:
            training.fake.loaded.clear()
        return True

    training.fake.when_called = forgets_once
    assert training.step() is True
    assert training.live_version == 1
    assert training.fake.calls.count("/v1/load_lora_adapter") == 2


def test_a_candidate_that_takes_vllm_away_each_time_it_is_to_speak_is_rejected(training: Training) -> None:
    training.group("g")
    training.fake.when_called = lambda path: path != "/v1/completions"
    assert training.step() is True
    assert (training.live_version, training.versions()) == (0, {0: "live", 1: "rejected"})


def test_a_vllm_that_stays_away_leaves_the_step_to_whoever_comes_after_its_lease(training: Training) -> None:
    training.group("g")
    training.vllm_stays_away()
    with pytest.raises(VllmDown):
        training.step()
    training.fake.when_called = lambda _path: True
    assert training.step() is False  # until the lease ends
    training.lease_ends()
    assert training.step() is True
    assert training.versions() == {0: "retired", 1: "rejected", 2: "live"}
    served = CommandLine(training.engine).served("default", ["starter"])
    assert served == {"starter@v2": training.adapters / "starter@v2"}


def test_trajectories_that_are_alone_are_trained_on_by_their_baseline_and_the_step_says_so(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.with_rules(singles_per_step=4)
    for number, reward in enumerate((1.0, 0.0, 0.0, 0.0)):
        training.single(f"s{number}", reward)
    with caplog.at_level("INFO"):
        assert training.step() is True
    assert training.live_version == 1
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.trajectories, step.baselined) == ("promoted", 4, 4)
    assert "step starter#1: from version 0, 4 compared with a baseline" in caplog.messages
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    assert advantages == pytest.approx({"s0-0": 1.0, "s1-0": -1 / 3, "s2-0": -1 / 3, "s3-0": -1 / 3})
    assert training.all(schema.trajectories, "state") == training.all(schema.groups, "state") == {"trained"}
    assert training.all(schema.feedback, "state") == {"used"}


def test_by_kto_singles_and_groups_are_good_or_bad_by_themselves(training: Training) -> None:
    training.with_rules(objective="kto", singles_per_step=2)
    training.single("s", 1.0)
    training.single("t", 0.0)
    training.group("g", rewards=(0.4, 0.9))
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.loss_function, step.trajectories) == ("promoted", "kto", "kto", 4)
    assert step.loss == pytest.approx(0.5, abs=1e-6)  # version 0 is the reference itself
    assert (step.effective_share, step.masked_share) == (None, 0)
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    assert advantages == {"s-0": 1.0, "t-0": -1.0, "g-0": -1.0, "g-1": 1.0}
    assert training.all(schema.trajectories, "state") == {"trained"}


def test_by_dpo_pairs_of_a_group_are_compared_and_the_rest_says_why_not(training: Training) -> None:
    training.with_rules(objective="dpo", singles_per_step=2)
    training.group("g", rewards=(0.4, 0.9, 0.5))
    training.single("s", 1.0)
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kind, step.loss_function) == ("promoted", "dpo", "dpo")
    assert step.loss == pytest.approx(math.log(2), abs=1e-6)
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    assert advantages == {"g-0": -1.0, "g-1": 1.0, "g-2": None, "s-0": None}
    why = {row.id: row.why_not_trained for row in training.rows(schema.trajectories)}
    assert (why["g-2"], why["s-0"]) == ("group_uniform", "too_few")


def test_a_step_that_is_taken_over_stays_of_its_kind(training: Training) -> None:
    training.with_rules(objective="dpo")
    training.group("g")
    assert training.store.claim("starter", training.settings.trainer) is not None
    training.lease_ends()
    training.with_rules(objective="grpo")
    assert training.step() is True
    assert training.seed.one(schema.steps, "starter#1").kind == "dpo"


def test_preferences_are_compared_with_the_version_of_the_settings(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.with_rules(objective="dpo", reference_version=1)
    training.group("g")
    for _ in range(2):
        assert training.step() is False
        training.lease_ends()
    (message,) = [one for one in caplog.messages if "reference_version" in one]
    assert "version 1, which has no adapter" in message
    training.with_rules(objective="grpo", reference_version=1)
    assert training.step() is False  # it stays of its kind, and waits
    training.lease_ends()
    training.with_rules(reference_version=0)
    assert training.step() is True
    live = training.live_version
    training.with_rules(objective="dpo", reference_version=live)
    training.group("h", version=live)
    assert training.step() is True
    assert training.seed.one(schema.steps, "starter#2").loss == pytest.approx(math.log(2), abs=1e-6)


def test_a_step_says_in_its_lines_and_its_span_which_groups_it_takes(
    training: Training, logged: Any, spans: Any
) -> None:
    training.group("g")
    assert training.step() is True
    lines = [line for line in logged() if line["logger"] == "trainer.step.step"]
    assert {(line["project"], line["policy"], line["step"]) for line in lines} == {("default", "starter", 1)}
    assert [line["groups"] for line in lines if "groups" in line] == [["g"]]
    (span,) = spans.get_finished_spans()
    assert (span.name, dict(span.attributes)) == ("step", {
        "whetstone.project": "default", "whetstone.policy": "starter", "whetstone.step.id": "starter#1",
        "whetstone.version.in": "starter@v0", "whetstone.version.out": "starter@v1",
        "whetstone.group.ids": ("g",), "whetstone.trajectory.ids": ("g-0", "g-1"),
    })  # fmt: skip


def test_singles_that_all_have_the_same_reward_make_no_version(training: Training) -> None:
    training.with_rules(singles_per_step=2)
    for number in range(2):
        training.single(f"s{number}", 1.0)
    assert training.step() is True
    assert training.seed.one(schema.steps, "starter#1").state == "noop"
    assert training.all(schema.trajectories, "why_not_trained") == {"group_uniform"}
    assert training.live_version == 0


def test_the_first_of_a_task_is_left_out_and_the_next_is_compared_with_it(training: Training) -> None:
    training.with_rules(singles_per_step=2)
    training.single("s", 1.0)
    training.group("g")
    assert training.step() is True
    assert training.seed.one(schema.trajectories, "s-0").why_not_trained == "too_few"
    training.single("t", 0.0)
    training.group("h", version=1)
    assert training.step() is True
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    assert (advantages["s-0"], advantages["t-0"]) == (None, -1.0)


def test_groups_that_agree_take_no_step(training: Training) -> None:
    training.group("g", rewards=(1.0, 1.0))
    training.with_rules(fresh_waits_s=0)
    assert training.step() is False
    assert training.rows(schema.steps) == []
    assert training.all(schema.trajectories, "why_not_trained") == {"group_uniform"}


def test_a_step_of_trajectories_that_are_too_long_is_a_noop_and_says_so(training: Training) -> None:
    training.group("g", turns=5)
    training.with_rules(max_row_tokens=16)
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.version_out) == ("noop", None)
    assert "2 too_long" in step.error
    assert training.all(schema.trajectories, "why_not_trained") == {"too_long"}
    assert training.all(schema.feedback, "reason") == training.all(schema.groups, "reason") == {"too_long"}
    assert training.live_version == 0
    assert not training.adapters.exists()


def test_one_trajectory_that_is_too_long_does_not_keep_the_others_from_training(training: Training) -> None:
    training.group("g", turns=2)
    training.seed.trajectory("long", "g", turns=5, state="rewarded", reward=0.5)
    training.with_rules(max_row_tokens=16)
    assert training.step() is True
    assert training.seed.one(schema.steps, "starter#1").state == "promoted"
    ended = {row.id: (row.state, row.why_not_trained) for row in training.rows(schema.trajectories)}
    assert ended == {"g-0": ("trained", None), "g-1": ("trained", None), "long": ("excluded", "too_long")}


def test_a_trajectory_without_a_sampled_token_is_left_out(training: Training) -> None:
    training.group("g", rewards=(0.0, 1.0, 2.0))
    c = schema.completions.c
    training.write(schema.completions, c.trajectory_id == "g-2", token_ids=[], inference_logprobs=[])
    assert training.step() is True
    assert training.live_version == 1
    assert training.seed.one(schema.trajectories, "g-2").why_not_trained == "no_token_ids"


def test_what_constraints_decided_is_counted_and_a_trajectory_of_nothing_else_is_left_out(training: Training) -> None:
    training.group("g")
    c = schema.completions.c
    # The model gives these tokens a sixtieth, the server after a grammar more than a half: it decided them.
    training.write(schema.completions, c.trajectory_id == "g-0", constraints={"grammar": "tools"})
    training.write(schema.completions, c.id == "g-1-0", constraints={"top_p": 0.99, "presence_penalty": 0.5})
    training.write(schema.completions, c.id == "g-1-1", constraints={"allowed_token_ids": [21]})
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.rows, step.sampled_tokens) == ("promoted", 1, 2)
    assert set(step.phases) == {"read", "model", "measure", "train", "write", "load", "probe"}
    decided = {row.id: row.decided_tokens for row in training.rows(schema.completions)}
    assert decided == {"g-0-0": 2, "g-0-1": 2, "g-1-0": 0, "g-1-1": 2}
    ended = {row.id: (row.state, row.why_not_trained) for row in training.rows(schema.trajectories)}
    assert ended == {"g-0": ("excluded", "constrained"), "g-1": ("trained", None)}
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    assert advantages == {"g-0": None, "g-1": 0.5}


def test_a_step_of_decided_tokens_alone_is_a_noop_and_says_so(training: Training) -> None:
    training.group("g")
    training.write(schema.completions, schema.completions.c.turn >= 0, constraints={"grammar": "response_format"})
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.error) == ("noop", "no trajectory could teach anything: 2 constrained")
    assert training.all(schema.trajectories, "why_not_trained") == {"constrained"}
    assert training.all(schema.completions, "decided_tokens") == {2}


def test_constraints_that_this_trainer_does_not_know_are_not_trained_on(training: Training) -> None:
    training.group("g", rewards=(0.0, 1.0, 2.0))
    training.write(schema.completions, schema.completions.c.trajectory_id == "g-1", constraints={"top_z": 3})
    assert training.step() is True
    assert training.seed.one(schema.trajectories, "g-1").why_not_trained == "constrained"
    assert training.live_version == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_truncation_is_measured_with_the_older_version_as_long_as_its_adapter_is_there(
    training: Training, is_removed: bool
) -> None:
    for name in ("g", "h"):
        training.group(name, version=training.live_version)
        training.step()
    assert training.live_version == 2
    training.with_rules(min_fresh_share=0)
    training.group("old", version=1)
    of_old = schema.completions.c.trajectory_id.in_(["old-0", "old-1"])
    training.write(schema.completions, of_old, constraints={"min_p": 0.001})
    if is_removed:
        v = schema.policy_versions.c
        training.write(schema.policy_versions, v.version == 1, removed_at=datetime.now(UTC))
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#3")
    assert step.state == ("noop" if is_removed else "promoted")
    reasons = {row.why_not_trained for row in training.rows(schema.trajectories) if row.group_id == "old"}
    assert reasons == ({"constrained"} if is_removed else {None})


@pytest.mark.parametrize(
    "rewards",
    [(-1e308, 1e308), (1.7e308, 1.7e308, 0.0), (1.7e308, -1.7e308, -1.7e308)],
    ids=["above float32", "the sum overflows", "the difference overflows"],
)
def test_a_group_of_monstrous_rewards_is_left_out_and_the_others_are_trained(
    training: Training, rewards: tuple[float, ...]
) -> None:
    training.group("g", rewards=rewards)
    training.group("h")
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.trajectories) == ("promoted", len(rewards) + 2)
    assert step.advantage_spread == 0.5
    g, h = (training.seed.one(schema.trajectories, name) for name in ("g-0", "h-0"))
    assert (g.state, g.why_not_trained) == ("excluded", "reward_too_large")
    assert (h.state, h.trained_in_step) == ("trained", 1)


def test_a_logprob_that_makes_the_ratio_overflow_is_left_out_of_the_loss(training: Training) -> None:
    training.group("g")
    training.write(
        schema.completions, schema.completions.c.trajectory_id == "g-0", inference_logprobs=[-9000.0, -9000.0]
    )
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.masked_share) == ("promoted", 0.5)


def test_the_rows_of_a_step_that_is_not_finite_are_kept_and_are_not_finite_again(training: Training) -> None:
    training.group("g")
    training.with_rules(**OVERFLOWING)
    training.learners = Learners(training.settings)
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert step.state == "failed"
    assert step.kept == str(training.settings.data.resolve() / "kept" / "starter-1.jsonl")
    assert step.kept in step.error and "the step was not taken" in step.error
    assert set(step.phases) == {"read", "model", "train"} and step.seconds > 0 and step.tokens_per_s is None
    rows = failed_rows.read(Path(step.kept))
    assert {row.trajectory_id: row.advantages_T[-1] for row in rows} == {"g-0": -0.5, "g-1": 0.5}
    learner = Learner.fresh(training.fake.model, training.settings.trainer, training.settings.seed)
    before = learner.files()
    with pytest.raises(NotFinite):
        learner.step(rows, 0)
    assert learner.files() == before
    assert training.fake.calls == []


def test_weights_that_overflow_are_never_live_and_what_comes_of_them_is_not_saved(training: Training) -> None:
    training.group("g")
    training.with_rules(learning_rate=1e37)
    training.learners = Learners(training.settings)
    assert training.step() is True
    assert (training.live_version, training.versions()) == (0, {0: "live", 1: "rejected"})
    assert training.seed.one(schema.policy_versions, "starter@v1").probe_k3 is None
    # Were it live all the same, the step after it would find out.
    broken = Learner.resume(training.fake.model, training.adapters / "starter@v1", RULES)
    rows = build_rows(
        [Member("g-0", "g", 0.0, (SampledCompletion("c", (1, 2), (3, 4), (-0.5, -0.25), 1, 1.0),)),
         Member("g-1", "g", 1.0, (SampledCompletion("d", (1, 2), (5, 6), (-0.5, -0.25), 1, 1.0),))], 64,
    ).rows  # fmt: skip
    before = broken.files()
    with pytest.raises(NotFinite):
        broken.step(rows, 1)
    assert broken.files() == before


def test_a_disk_that_refuses_the_rows_does_not_hide_why_the_step_failed(training: Training) -> None:
    training.group("g")
    training.with_rules(**OVERFLOWING)
    training.learners = Learners(training.settings)
    training.settings.data.mkdir()
    (training.settings.data / "kept").write_text("a file where the folder belongs")
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.kept) == ("failed", None)
    assert "the step was not taken" in step.error and "its rows could not be saved: " in step.error
    assert training.all(schema.trajectories, "why_not_trained") == {"step_failed"}


def test_a_step_whose_adapter_cannot_be_written_is_taken_over_with_the_same_trajectories(training: Training) -> None:
    training.group("g")
    training.settings.data.mkdir()
    training.adapters.write_text("a file where the folder belongs")
    with pytest.raises(AdapterNotWritten):
        training.step()
    assert training.seed.one(schema.steps, "starter#1").state == "claimed"
    taken = training.all(schema.step_trajectories, "trajectory_id")
    training.adapters.unlink()
    assert training.step() is False  # it has its lease still
    training.lease_ends()
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.attempt, step.version_out) == ("promoted", 2, 2)
    assert training.all(schema.step_trajectories, "trajectory_id") == taken
    assert training.live_version == 2


def test_a_step_whose_version_cannot_be_trained_on_keeps_what_it_took_until_another_one_answers(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.group("g")
    assert training.step() is True
    training.group("h", version=1)
    training.learners = Learners(training.settings)
    (training.adapters / "starter@v1" / "adapter_config.json").write_text("{}")
    for _ in range(RULES.max_attempts + 1):
        assert training.step() is False
        step = training.seed.one(schema.steps, "starter#2")
        assert (step.state, step.attempt) == ("claimed", 0)
        assert step.lease_until > datetime.now(UTC) + timedelta(seconds=UNREADABLE_RETRY_S / 2)
        training.lease_ends()
    assert len([record for record in caplog.records if "promote another version" in record.message]) == 1
    with training.engine.begin() as connection:
        roll_back(connection, "default", "starter", None, "damaged", 2, datetime.now(UTC))
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#2")
    assert step.state == "failed" and "answers no longer" in step.error
    training.group("i")
    assert training.step() is True  # from version 0


def test_who_loses_the_lease_while_vllm_loads_promotes_nothing(training: Training) -> None:
    training.group("g")

    def take_over(path: str) -> bool:
        if path == "/v1/load_lora_adapter":
            training.lease_ends()
            assert training.store.claim("starter", RULES) is not None
        return True

    training.fake.when_called = take_over
    with pytest.raises(LeaseLost):
        training.step()
    assert (training.live_version, training.versions()) == (0, {0: "live", 1: "rejected"})
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.attempt) == ("claimed", 2)


def test_on_a_shared_accelerator_vllm_sleeps_until_the_new_version_is_to_be_loaded(training: Training) -> None:
    training.shares_device()
    training.group("g")
    assert training.step() is True
    assert training.live_version == 1
    calls = [path for path in training.fake.calls if path != "/v1/models"]
    assert calls[:4] == ["/is_sleeping", "/sleep?level=1&mode=wait", "/wake_up", "/v1/load_lora_adapter"]


class RecordingFactory:
    """The class `Learner`, with the learners that it made."""

    def __init__(self) -> None:
        self.made: list[Learner] = []

    def fresh(self, *given: Any) -> Learner:
        self.made.append(Learner.fresh(*given))
        return self.made[-1]

    def resume(self, *given: Any) -> Learner:
        self.made.append(Learner.resume(*given))
        return self.made[-1]

    def in_host_memory(self) -> bool:
        """Whether all weights of all bases are there."""
        homes = [one._residence for one in self.made]
        return all(
            home is not None
            and all(own.data_ptr() == host.data_ptr() for own, host in zip(home._base, home._host, strict=True))
            for home in homes
        )


@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_has_left_the_accelerator_when_vllm_wakes_and_while_it_is_awake(
    training: Training, fails: bool
) -> None:
    training.with_rules(**(OVERFLOWING if fails else {}))
    training.shares_device()
    recorded = RecordingFactory()
    training.learners = Learners(training.settings, recorded)
    training.group("g")
    at_calls: dict[str, bool] = {}

    def look(path: str) -> bool:
        at_calls[path] = bool(recorded.made) and recorded.in_host_memory()
        return True

    training.fake.when_called = look
    assert training.step() is True
    assert at_calls["/wake_up"] and recorded.in_host_memory()
    assert training.live_version == (0 if fails else 1)
    assert fails or at_calls["/v1/completions"]


def test_a_step_that_does_not_get_the_accelerator_is_tried_again_and_loses_no_attempt(training: Training) -> None:
    training.shares_device()
    training.fake.refuses = {"/sleep?level=1&mode=wait"}
    training.group("g")
    assert training.step() is False
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.attempt) == ("claimed", 0)
    assert datetime.now(UTC) < step.lease_until < datetime.now(UTC) + timedelta(seconds=RETRY_S)
    assert training.step() is False  # not before then
    training.lease_ends()
    assert training.step() is False
    step = training.seed.one(schema.steps, "starter#1")
    assert step.lease_until > datetime.now(UTC) + timedelta(seconds=1.5 * RETRY_S)
    training.fake.refuses = set()
    training.lease_ends()
    assert training.step() is True
    assert (training.live_version, training.seed.one(schema.steps, "starter#1").attempt) == (3, 1)
    assert not training.learners.denied


@pytest.fixture
def _new_process() -> Iterator[None]:
    """What a process has learned of its memory is of that process alone."""
    memory.budget_of.cache_clear()
    yield
    memory.budget_of.cache_clear()


@pytest.mark.usefixtures("_new_process")
def test_a_trajectory_that_fits_into_no_memory_leaves_its_group_and_the_step_goes_on(training: Training) -> None:
    training.group("first")
    assert training.step() is True  # the model was proven to read trees while there was memory
    training.group("g", rewards=(0.0, 1.0, 2.0), version=1)
    long = [30 + place % 30 for place in range(100)]
    is_long = schema.completions.c.trajectory_id == "g-2"
    training.write(schema.completions, is_long, token_ids=long, inference_logprobs=[-4.0] * len(long))
    with shortage(lambda _way, tokens: tokens >= len(long)) as moments:
        assert training.step() is True
    assert moments
    step = training.seed.one(schema.steps, "starter#2")
    assert (step.state, step.attempt, training.live_version) == ("promoted", 1, 2)
    advantages = {row.trajectory_id: row.advantage for row in training.rows(schema.step_trajectories)}
    advantages = {name: one for name, one in advantages.items() if name.startswith("g-")}
    assert advantages == {"g-0": -0.5, "g-1": 0.5, "g-2": None}
    why = {row.id: (row.state, row.why_not_trained) for row in training.rows(schema.trajectories)}
    why = {name: one for name, one in why.items() if name.startswith("g-")}
    assert why == {"g-0": ("trained", None), "g-1": ("trained", None), "g-2": ("excluded", "too_long")}


@pytest.mark.usefixtures("_new_process")
def test_a_step_without_memory_waits_and_loses_neither_an_attempt_nor_a_trajectory(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.group("g")
    for doubled in (1, 2):
        with shortage(lambda _way, _tokens: True):
            assert training.step() is False
        step = training.seed.one(schema.steps, "starter#1")
        assert (step.state, step.attempt) == ("claimed", 0)
        assert step.lease_until > datetime.now(UTC) + timedelta(seconds=0.5 * doubled * RETRY_S)
        training.lease_ends()
    assert "memory does not suffice" in caplog.text
    assert training.step() is True
    assert (training.versions()[3], training.seed.one(schema.steps, "starter#1").attempt) == ("live", 1)
    assert training.all(schema.trajectories, "state") == {"trained"}
    assert not training.learners.denied


@pytest.mark.parametrize("method", ["step", "logprobs_of"], ids=["in its update", "in the gate"])
def test_a_service_that_is_down_costs_neither_an_attempt_nor_a_trajectory(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    training.group("g")
    served = training.fake.learner("starter@v0")
    own = served.logprobs_of
    with monkeypatch.context() as patched:
        patched.setattr(Learner, method, _raising(ServiceDown("training_service: cannot be reached")))
        patched.setattr(training.fake, "learner", lambda _name: served)
        patched.setattr(served, "logprobs_of", own)
        assert training.step() is False
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.attempt) == ("claimed" if method == "step" else "loaded", 0)
    assert "cannot be reached" in caplog.text
    training.lease_ends()
    assert training.step() is True
    assert training.all(schema.trajectories, "state") == {"trained"}


def test_what_a_service_refuses_fails_the_step_and_says_why(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.group("g")
    monkeypatch.setattr(Learner, "step", _raising(ServiceRefused("training_service: no such loss")))
    assert training.step() is True
    step = training.seed.one(schema.steps, "starter#1")
    assert (step.state, step.error, training.live_version) == ("failed", "training_service: no such loss", 0)


def _raising(error: Exception) -> Callable[..., Any]:
    def step(*_: Any, **__: Any) -> Any:
        raise error

    return step


def test_a_training_service_makes_the_learners_where_one_is_set(tmp_path: Path) -> None:
    rules = TrainerSettings(loss="dapo")
    service = TrainingServiceSettings(url="http://127.0.0.1:9")
    settings = Settings(data=tmp_path, trainer=rules, training_service=service)
    assert isinstance(Learners(settings).makes, Services)
    assert Learners(Settings(data=tmp_path)).makes is Learner


def test_a_warm_learner_takes_the_step_that_one_read_from_the_disk_takes(training: Training) -> None:
    training.group("g")
    assert training.step() is True
    training.group("h", version=1)
    training.vllm_stays_away()
    with pytest.raises(VllmDown):
        training.step()  # with the learner of the step before
    training.fake.when_called = lambda _path: True
    training.lease_ends()
    assert training.step() is True  # again, from the folder of version 1
    assert training.versions() == {0: "retired", 1: "retired", 2: "rejected", 3: "live"}
    warm, cold = training.adapters / "starter@v2", training.adapters / "starter@v3"
    assert {path.name for path in warm.iterdir()} >= {"adapter_model.safetensors", "optimizer.safetensors"}
    for path in warm.iterdir():
        assert path.read_bytes() == (cold / path.name).read_bytes(), path.name
