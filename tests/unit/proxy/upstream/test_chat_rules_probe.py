"""A server's rules for Anthropic messages are found out by asking it, whatever its chat template and its options."""

import asyncio
from typing import Any

import jinja2
import pytest

from proxy.domain.chat_rules import ChatRules, common_rules
from proxy.upstream.chat_rules_probe import EFFORTS, probe_chat_rules
from proxy.upstream.load_balancer import Replica, Replicas
from proxy.upstream.reconciler import Reconciler
from proxy.upstream.server import Upstream
from tests.unit.proxy.conftest import FakeVllm
from tests.unit.proxy.upstream.test_reconciler import Tables

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ refuse('system comes first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
IN_TURN = (
    "{% set turns = messages | rejectattr('role', 'eq', 'system') | list %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ refuse('user comes next') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ refuse('in turn') }}{% endif %}"
    "{% endfor %}"
)
NO_FRAME = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
THINKS = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
NAMES_EFFORT = PLAIN + "{{ reasoning_effort }}"
ALWAYS_THINKS = (
    PLAIN
    + "{% if reasoning_effort == 'none' %}{{ refuse('it thinks') }}{% endif %}{{ reasoning_effort | length * 'x' }}"
)
LISTS_TOOLS = PLAIN + "{% if tools is not none %}Tools:{% endif %}"


class Renderer:
    """The two routes of vLLM 0.32 that make prompts, each character a token. vLLM's own decisions are as in
    `vllm/entrypoints/anthropic/serving.py`."""

    def __init__(self, template: str, effort: str = "auto", parses_tools: bool = True) -> None:
        self._template = jinja2.Environment().from_string(template)
        self._parses_tools = parses_tools
        turn = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        self._merges = self._prompt(turn) is None
        self._effort = self._chosen_effort() if effort == "auto" else effort

    def _prompt(self, messages: Any, tools: Any = None, **variables: Any) -> list[int] | None:
        def refuse(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        try:
            return list(map(ord, self._template.render(messages=messages, tools=tools, refuse=refuse, **variables)))
        except jinja2.TemplateError:
            return None

    def _at(self, effort: str, messages: Any, tools: Any = None) -> list[int] | None:
        return self._prompt(messages, tools, reasoning_effort=effort, enable_thinking=effort != "none")

    def _chosen_effort(self) -> str:
        hi = [{"role": "user", "content": "Hi"}]
        none, *others = [self._at(effort, hi) for effort in EFFORTS]
        return "low" if none is None or none in others else "none"

    def tokenize(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids = self._prompt(body["messages"], body.get("tools"), **body.get("chat_template_kwargs", {}))
        return (400, {"error": {}}) if ids is None else (200, {"count": len(ids), "max_model_len": 9, "tokens": ids})

    def count(self, body: dict[str, Any]) -> tuple[int, Any]:
        messages, tools = body["messages"], body.get("tools")
        inline = [message["content"] for message in messages if message["role"] == "system"]
        system = body.get("system", "") + ("".join(inline) if self._merges else "")
        if self._merges:
            messages = [message for message in messages if message["role"] != "system"]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        disabled = body.get("thinking") == {"type": "disabled"}
        ids = self._at(self._effort, messages, tools) if disabled else self._prompt(messages, tools)
        if ids is None or (tools is not None and not self._parses_tools):
            return 400, {"type": "error", "error": {}}
        return 200, {"input_tokens": len(ids)}

    def into(self, fake: FakeVllm) -> None:
        fake.renderers = {"/tokenize": self.tokenize, "/v1/messages/count_tokens": self.count}


def rules_of(fake: FakeVllm) -> ChatRules:
    async def run() -> ChatRules:
        upstream = Upstream(fake.url + "/v1", 10)
        try:
            return await probe_chat_rules(upstream, "starter@v0")
        finally:
            await upstream.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("renderer", "rules"),
    [
        (Renderer(PLAIN), ChatRules(False, "low", True)),
        (Renderer(SYSTEM_FIRST), ChatRules(True, "low", True)),
        (Renderer(IN_TURN), ChatRules(True, "low", True)),
        (Renderer(NO_SYSTEM), ChatRules(None, "low", True)),
        (Renderer(NO_FRAME), ChatRules(None, "low", True)),
        (Renderer(THINKS), ChatRules(False, "none", True)),
        (Renderer(THINKS, effort="high"), ChatRules(False, "low", True)),
        (Renderer(ALWAYS_THINKS), ChatRules(False, "low", True)),
        (Renderer(ALWAYS_THINKS, effort="medium"), ChatRules(False, "medium", True)),
        (Renderer(NAMES_EFFORT), ChatRules(False, None, True)),
        (Renderer(NAMES_EFFORT, effort="xhigh"), ChatRules(False, "xhigh", True)),
        (Renderer(LISTS_TOOLS), ChatRules(False, "low", False)),
        (Renderer(PLAIN, parses_tools=False), ChatRules(False, "low", False)),
    ],
)
def test_each_rule_is_the_servers_or_not_known(fake_vllm: FakeVllm, renderer: Renderer, rules: ChatRules) -> None:
    renderer.into(fake_vllm)
    assert rules_of(fake_vllm) == rules


def test_a_server_without_these_routes_has_no_known_rules(fake_vllm: FakeVllm) -> None:
    assert rules_of(fake_vllm) == ChatRules()
    assert fake_vllm.requests == []


@pytest.mark.parametrize("answer", [(200, []), (200, b"\xff"), (200, {"tokens": "x", "input_tokens": "x"}), (500, {})])
def test_an_answer_of_another_kind_says_nothing(fake_vllm: FakeVllm, answer: tuple[int, Any]) -> None:
    def respond(_: dict[str, Any]) -> tuple[int, Any]:
        return answer

    fake_vllm.renderers = {"/tokenize": respond, "/v1/messages/count_tokens": respond}
    assert rules_of(fake_vllm) == ChatRules()


def test_a_server_is_asked_when_it_comes_up_and_when_it_comes_back(fake_vllm: FakeVllm) -> None:
    async def run() -> None:
        replica = Replica(fake_vllm.url, Upstream(fake_vllm.url + "/v1", 10))
        replicas = Replicas([replica], 1, 20)
        reconciler = Reconciler(replica, replicas, Tables(), ("starter",), 0.0, shares_device=False)
        try:
            Renderer(PLAIN).into(fake_vllm)
            await reconciler.look()
            assert replicas.chat_rules == ChatRules(False, "low", True)
            Renderer(SYSTEM_FIRST).into(fake_vllm)
            await reconciler.look()
            assert replicas.chat_rules.merges_system is False
            fake_vllm.well = False
            await reconciler.look()
            assert replicas.chat_rules.merges_system is False, "calls that wait for it are read with its last rules"
            fake_vllm.well = True
            await reconciler.look()
            assert replicas.chat_rules == replica.chat_rules == ChatRules(True, "low", True)
        finally:
            await replica.upstream.close()

    asyncio.run(run())


def test_servers_that_differ_have_no_rules_in_common() -> None:
    one, other = ChatRules(True, "low", True), ChatRules(False, "low", True)
    assert common_rules([one, one]) == one
    assert common_rules([one, other]) == common_rules([]) == ChatRules()
