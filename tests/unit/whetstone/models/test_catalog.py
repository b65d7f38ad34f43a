"""The catalog's templates: a longer conversation begins with the tokens of a shorter one, with tools and without."""

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whetstone.models.catalog import MODELS, CatalogModel

TOOLS = [{"type": "function", "function": {"name": "route", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "route", "arguments": {"team": "billing"}}}
QUESTION = {"role": "user", "content": "Where is my parcel?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CONVERSATION = [
    QUESTION,
    CALLED,
    {"role": "tool", "content": " on its way \n"},
    {"role": "assistant", "content": " It is on its way. "},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "You are welcome."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(params=MODELS.values(), ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> CatalogModel:
    return request.param  # type: ignore[no-any-return]


def rendered(model: CatalogModel, messages: list[dict[str, Any]], *, answer: bool, **given: Any) -> str:
    """Render as transformers does (`utils/chat_template_utils.py`)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(model.template).render(messages=messages, add_generation_prompt=answer, **given)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_prompt_with_its_answer_begins_the_longer_conversation(
    model: CatalogModel, system: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    whole = system + CONVERSATION
    answers = [place for place, message in enumerate(whole) if message["role"] == "assistant"]
    for place in answers:
        prompt = rendered(model, whole[:place], answer=True, tools=tools)
        answered = rendered(model, whole[: place + 1], answer=False, tools=tools)
        assert answered.startswith(prompt)
        for longer in answers:
            if longer > place:
                assert rendered(model, whole[:longer], answer=True, tools=tools).startswith(answered)


def test_a_conversation_without_a_system_message_has_the_one_of_the_training(model: CatalogModel) -> None:
    assert model.system in rendered(model, [QUESTION], answer=True)
    assert model.system not in rendered(model, [SYSTEM, QUESTION], answer=True)
    assert rendered(model, [SYSTEM, QUESTION], answer=True).count("system\n") == 1


def test_tools_and_calls_are_written_as_the_hermes_parser_reads_them(model: CatalogModel) -> None:
    text = rendered(model, [QUESTION, CALLED], answer=False, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text
    call = text.split("<tool_call>\n")[-1].split("\n</tool_call>")[0]
    assert json.loads(call) == {"name": "route", "arguments": {"team": "billing"}}
