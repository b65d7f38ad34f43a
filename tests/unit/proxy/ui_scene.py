"""What the dashboard's tests look at: groups of every fate, conversations in all dialects, hostile texts, in rows."""

import math
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from tokenizers import Tokenizer

from migrations import schema
from tests.conftest import Seed
from whetstone.config.settings import STARTER

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{7*7}}"
QUESTION = "A train leaves at 9:40 and takes 2 h 35 min. When does it arrive? Answer in one sentence."
ANSWERS = (
    ("It arrives at 12:15, for 9:40 plus two hours is 11:40, and 35 minutes more make 12:15.", 1.0, 1.21),
    ("It arrives at 12:15.", 1.0, 0.87),
    ("It arrives at 12:05, for 9:40 plus two hours is 11:40, and 25 minutes more make 12:05.", 0.25, -0.4),
    ("The train arrives at 11:75, that is 9:40 plus 2:35.", 0.0, -0.93),
    ("I cannot tell without a timetable.", 0.0, -0.93),
)
THOUGHT = "I need the timetable."
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up a timetable.", "parameters": {"type": "object"}},
}
_TOKENIZER = Tokenizer.from_file(str(STARTER / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    """The text as the starter's tokens."""
    return list(_TOKENIZER.encode(text, add_special_tokens=False).ids)


def logprobs_of(ids: Sequence[int], seed: int = 0) -> list[float]:
    """Some sure, some surprising."""
    drawn = random.Random(seed)
    return [
        round(math.log(drawn.choice((0.999, 0.99, 0.98, 0.97, 0.95, 0.93, 0.92, 0.7, 0.35, 0.12, 0.02))), 4)
        for _ in ids
    ]


class Scene(Seed):
    """Rows for the pages."""

    def __init__(self, engine: Engine, now: datetime) -> None:
        super().__init__(engine, now)

    def says(self, trajectory: str, turn: int, asked: Sequence[Any], answer: str, **values: Any) -> str:
        """One completion with the tokens that spell its answer."""
        ids = ids_of(answer)
        row = {
            "new_messages": list(asked), "response": {"role": "assistant", "content": answer},
            "token_ids": ids, "inference_logprobs": logprobs_of(ids, turn), "completion_tokens": len(ids),
            "prompt_tokens": 40 + 60 * turn, "ttft_ms": 84.0, "total_ms": 913.0, "streamed": True,
            "created_at": self.now + timedelta(seconds=turn),
        }  # fmt: skip
        return self.completion(trajectory, turn, **(row | values))

    def attempt(self, name: str, group: str | None, turns: int = 1, **values: Any) -> str:
        """A trajectory whose turns are said one by one."""
        row = {"completions": turns, "tail_completion_id": f"{name}-{turns - 1}", "sampled_tokens": 40 * turns}
        return self.trajectory(name, group, turns=0, **(row | values))


def fill(scene: Scene) -> None:
    """All of it; the project and its policy are there."""
    now = scene.now
    scene.insert(
        schema.steps, project="default", id="starter#1", policy="starter", number=1, state="promoted", version_in=0,
        version_out=1, groups=1, trajectories=5, reward_mean=0.45, reward_spread=0.46, loss=-0.012, kl=0.0021,
        entropy=1.31, mismatch_k3=1e-12, grad_norm=0.42, sampled_tokens=640, tokens_per_s=81.0, seconds=7.9,
        config={}, attempt=1, created_at=now, ended_at=now,
    )  # fmt: skip
    _trained(scene)
    _conversations(scene)
    _others(scene)
    _judged(scene)


def _trained(scene: Scene) -> None:
    """A group that a step has trained on, judged before."""
    now = scene.now
    scene.group(
        "trains-17", state="trained", size=5, rewarded=5, reward_mean=0.45, reward_spread=0.458, step=1,
        closed_at=now, compared_with="group", target_size=5,
    )  # fmt: skip
    prompt = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": QUESTION}]
    for place, (answer, reward, advantage) in enumerate(ANSWERS):
        name = f"trains-17-{place}"
        scene.attempt(
            name, "trains-17", state="trained", reward=reward, reward_source="judge", trained_in_step=1, ended_at=now,
            task="arithmetic", metadata={"customer": 42, "plan": "free", "beta": True},
            created_at=now - timedelta(minutes=place),
        )  # fmt: skip
        scene.says(name, 0, prompt, answer)
        scene.insert(
            schema.step_trajectories, project="default", step_id="starter#1", trajectory_id=name, policy="starter",
            group_id="trains-17", reward=reward, advantage=advantage, staleness=0,
        )  # fmt: skip
    scene.feedback("trains-17-0", 1.0, trajectory_id="trains-17-0", state="used", step=1, comment="right, and says why")


def _conversations(scene: Scene) -> None:
    """Long ones, with tools, pictures, redactions; some cannot be trained on."""
    scene.attempt(
        "long", None, 40, state="rewarded", reward=0.5, reward_source="trajectory", why_not_trained="no_group"
    )
    for turn in range(40):
        scene.says("long", turn, [{"role": "user", "content": f"question {turn}"}], f"answer number {turn}, at length.")
    scene.attempt("agent", None, 3, state="ended", why_not_trained="no_reward", task="travel", ended_at=scene.now)
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"train": "ICE 17"}'}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "When does this one arrive?"}, picture]}]
    scene.says("agent", 0, asked, "", tools=[TOOL], redactions=1, finish_reason="tool_calls",
               response={"role": "assistant", "content": None, "tool_calls": [call], "reasoning": THOUGHT})  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"arrives": "12:15", "contact": "[email]"}'}
    scene.says("agent", 1, [result], "It arrives at 12:15. Write to [email] for more.", redactions=2)
    scene.says(
        "agent", 2, [{"role": "user", "content": "Thanks"}], "Gladly.", status="aborted", why_not_trained="aborted"
    )
    anthropic = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]}]
    scene.attempt(
        "dialects", None, 3, policy="starter", why_not_trained="sampling_bent: top_p", state="rewarded", reward=1.0
    )
    scene.says("dialects", 0, anthropic, "So it is 42.", endpoint="messages")
    items = [
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"type": "reasoning", "summary": [{"text": "hm"}]},
    ]
    scene.says("dialects", 1, items, "Seven.", endpoint="responses", follows=None)
    scene.says("dialects", 2, [{"prompt": "Once upon"}], " a time", endpoint="completions", response=None,
               response_text=" a time", follows=None)  # fmt: skip
    scene.attempt(
        "hostile",
        None,
        1,
        state="rewarded",
        reward=0.0,
        task=HOSTILE,
        metadata={HOSTILE: HOSTILE},
        why_not_trained="greedy",
    )
    scene.says(
        "hostile",
        0,
        [{"role": HOSTILE, "content": HOSTILE, "name": HOSTILE}, HOSTILE],
        HOSTILE,
        tools=[{"name": HOSTILE}],
    )
    scene.feedback("hostile", 0.0, trajectory_id="hostile", state="applied", comment=HOSTILE, metadata={"x": HOSTILE})
    scene.attempt("unspelled", None, 1, policy="starter", state="open", why_not_trained="no_reward")
    scene.says("unspelled", 0, [{"role": "user", "content": "?"}], "what no token spells", token_ids=[999_999, 5],
               inference_logprobs=[-1.0, -0.01])  # fmt: skip


def _others(scene: Scene) -> None:
    """Groups under way and given up; feedback of every state."""
    now = scene.now
    scene.group("waiting-for-more", target_size=4)
    for place in range(3):
        scene.attempt(f"waiting-{place}", "waiting-for-more", why_not_trained="no_reward")
        scene.says(f"waiting-{place}", 0, [{"role": "user", "content": QUESTION}], ANSWERS[place][0])
    scene.group("all-the-same", state="discarded", reason="group_uniform", size=2, rewarded=2, reward_mean=1.0,
                reward_spread=0.0, closed_at=now)  # fmt: skip
    for place in range(2):
        scene.attempt(f"same-{place}", "all-the-same", state="excluded", reward=1.0, reward_source="trajectory",
                      why_not_trained="group_uniform", ended_at=now)  # fmt: skip
        scene.says(f"same-{place}", 0, [{"role": "user", "content": QUESTION}], "It arrives at 12:15.")
    scene.attempt("held-out", None, split="eval", state="rewarded", reward=1.0, why_not_trained="split_eval")
    scene.says("held-out", 0, [{"role": "user", "content": QUESTION}], "It arrives at 12:15.")
    scene.feedback("nobody", 1.0, state="failed", reason="no such trajectory in this project")
    scene.feedback(
        "long", 0.5, trajectory_id="long", state="applied", parts={"helpful": 0.7, "short": 0.3}, source="parts"
    )
    scene.feedback("long", 0.0, trajectory_id="long", state="superseded", source="thumbs", withdrawn_at=now)
    scene.feedback("all-the-same", kind="group", rewards={"same-0": 1.0, "same-1": 1.0}, state="applied")


def _judged(scene: Scene) -> None:
    """What judges said, and what people are asked about."""
    now = scene.now
    scene.insert(schema.rubrics, project="default", id="r1", text="Right answers first; then short ones.", parts=None)
    scores = {
        f"trains-17-{place}": {
            "score": reward,
            "explanation": f"Attempt {place + 1}: {'right' if reward else 'wrong'}.",
            "position": place,
        }
        for place, (_, reward, _) in enumerate(ANSWERS)
    }
    scene.insert(
        schema.judgements, project="default", id="j1", group_id="trains-17", policy="starter", attempts_hash="h",
        place=0, section=0, purpose="reward", state="accepted", judge="strong", model="openai/strong", rubric_hash="r1",
        scores=scores, calls=1, refusals=0, left_out=0, prompt_tokens=1840, completion_tokens=220, cost_usd=0.0123,
        seconds=3.4, created_at=now, accepted_at=now,
    )  # fmt: skip
    for days in range(3):
        day = f"{now - timedelta(days=days):%Y-%m-%d}"
        scene.insert(schema.judge_days, project="default", policy="starter", day=day, judge="strong", calls=31 - days,
                     refused=1, failed=0, tokens=61_000, cost_usd=0.38)  # fmt: skip
    scene.group("judged", state="scored", size=1, rewarded=1, reward_mean=0.75, reward_spread=0.0, closed_at=now)
    scene.attempt("to-look-at", "judged", state="rewarded", reward=0.75, reward_source="judge", task="arithmetic",
                  why_not_trained="waiting_step", review_at=now)  # fmt: skip
    scene.says("to-look-at", 0, [{"role": "user", "content": QUESTION}], ANSWERS[0][0])
    scene.insert(
        schema.judgements, project="default", id="j2", group_id="judged", policy="starter", attempts_hash="h2", place=0,
        section=0, purpose="reward", state="accepted", judge="strong", model="openai/strong", rubric_hash="r1",
        scores={"to-look-at": {"score": 0.75, "explanation": "Right, if a little long."}}, calls=1, refusals=0,
        left_out=0, prompt_tokens=900, completion_tokens=80, cost_usd=None, seconds=1.2,
        created_at=now, accepted_at=now,
    )  # fmt: skip


COMPARISON = "compare-019ae1c5b000" + "0" * 20


def compare(scene: Scene) -> None:
    """A comparison that is complete, and what three people thought of its answers. No part of `fill`: tests count."""
    prompt = [{"role": "user", "content": QUESTION}]
    for number in (1, 2):
        for side, model in (("a", "starter@v0"), ("b", "starter")):
            name, metadata = f"{COMPARISON}.{side}{number}", {"comparison": COMPARISON, "side": side, "model": model}
            scene.attempt(name, None, split="eval", no_train=True, metadata=metadata, why_not_trained="split_eval")
            scene.says(name, 0, prompt, ANSWERS[number if side == "a" else 0][0])
            for rater, reward in (("Anna", 1.0), ("Ben", 0.5 * number), (HOSTILE, 0.0)):
                scene.feedback(name, reward, trajectory_id=name, state="applied", metadata={"rater": rater})
