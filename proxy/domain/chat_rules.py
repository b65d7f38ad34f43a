"""Hold how vLLM makes a chat of an Anthropic request, as far as its servers differ in that. Pure."""

from collections.abc import Iterable

import msgspec


class ChatRules(msgspec.Struct, frozen=True):
    """The rules of one server. They depend on its chat template and its command line."""

    merges_system: bool | None = None
    """Whether it moves system messages within the conversation to the front, as it does if the chat template accepts
    them only there. None: not known."""
    disabled_effort: str | None = None
    """The `reasoning_effort` that it makes of thinking `disabled`. None: not known."""
    ignores_empty_tools: bool = False
    """Whether an empty list of tools is to it as no tools. False where it is not known."""


def common_rules(servers: Iterable[ChatRules]) -> ChatRules:
    """Return the rules that all servers have; nothing is known if they differ, or if there is no server."""
    distinct = set(servers)
    return distinct.pop() if len(distinct) == 1 else ChatRules()
