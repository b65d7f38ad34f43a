"""Steps on constrained sampling, on the whole stack: what a real vLLM did to the logits, the trainer weighs."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_imitated import App
from tests.e2e.test_stack import up

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

CONFIG = """
[trainer]
groups_per_step = 1
min_groups_per_step = 1
min_fresh_share = 0.0
"""
ATTEMPTS = 8


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "whetstone.toml").write_text(CONFIG)
    with up(folder / "data", "--config", str(folder / "whetstone.toml")) as (_, addresses):
        app = App(addresses)
        yield app
        app.http.close()
        app.vllm.close()


def group(app: App, name: str, **sampling: Any) -> None:
    """Ask one question several times, and reward answers by their letters."""
    headers = {"X-Group-Id": name, "X-Group-Size": str(ATTEMPTS)}
    for number in range(ATTEMPTS):
        # Warm, since the starter is sure of what it says.
        question = {"messages": [{"role": "user", "content": "letters"}], "max_tokens": 12, "temperature": 1.5}
        body = {"model": "starter"} | question | sampling
        response = app.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        text = answer["choices"][0]["message"]["content"] or ""
        # The number makes them differ where the texts do not.
        app.feedback(completion_id=answer["id"], reward=text.count("a") + number / 100, final=True)


@pytest.mark.parametrize(
    ("name", "sampling", "decided"),
    [
        ("top-p", {"top_p": 0.98, "temperature": 1.8}, (0.0, 1.0)),
        ("top-k", {"top_k": 5}, (0.0, 0.5)),
        ("min-p", {"min_p": 0.02, "temperature": 1.8}, (0.0, 1.0)),
        ("penalties", {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}, (0.0, 0.0)),
        ("bias", {"logit_bias": {"20": 4.0, "21": -4.0}, "min_tokens": 3}, (0.0, 0.3)),
        ("warmer", {"temperature": 1.8, "top_p": 0.95}, (0.0, 1.0)),
    ],
)
def test_a_step_weighs_what_vllm_did(
    app: App, name: str, sampling: dict[str, Any], decided: tuple[float, float]
) -> None:
    group(app, name, **sampling)
    step = app.step()
    assert (step["state"], step["error"], step["trajectories"]) == ("promoted", None, ATTEMPTS)
    # The trainer's constrained distribution is vLLM's: not off by what the constraint did, tenths of a nat.
    assert step["mismatch_k3"] < 1e-4
    low, high = decided
    assert low <= step["decided_share"] <= high and step["support_disagreements"] <= 1
    assert step["grad_norm"] > 0


def test_what_a_grammar_decides_teaches_nothing_and_what_it_leaves_free_does(app: App) -> None:
    free = {"structured_outputs": {"regex": r"[\x00-\x7f]{1,40}"}}
    group(app, "free", **free)
    step = app.step()
    assert (step["state"], step["error"]) == ("promoted", None)
    assert 0 <= step["decided_share"] < 1
    group(app, "one-answer", structured_outputs={"choice": ["abc"]})
    step = app.step()
    assert step["state"] == "noop" and "constrained" in step["error"]
    rows = app.rows("SELECT DISTINCT why_not_trained FROM admin_trajectories WHERE group_id = 'one-answer'")
    assert rows == [{"why_not_trained": "constrained"}]
