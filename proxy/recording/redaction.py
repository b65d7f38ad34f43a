"""Redact a call before it is written: remove what the patterns match in its texts, and the token ids of these texts.

What the app and the model get is not changed. The same text always gets the same redaction, so that a conversation's
prefix stays equal to what was stored.
"""

import asyncio
import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import regex

from proxy.domain.call import Call, Choice
from proxy.recording.media import hashed
from proxy.recording.redaction_presets import PRESETS, Rule
from whetstone.config.privacy import PrivacySettings, pseudonym

AT_ONCE_BYTES = 64 * 2**10
"""Calls with more text are redacted in a thread, not on the event loop."""
LEAST_S, S_PER_BYTE, MOST_S = 0.5, 8 / 2**20, 20.0
"""Processor time for the texts of one call: minimum, per byte of text, maximum."""
TIMED_OUT = "[redaction timed out]"
FAILED = "[redaction failed]"
FEEDBACK = ("comment", "metadata", "demonstration", "judge")
"""Columns of feedback with text written by people and apps."""
LEAST_DIGITS = 7
"""Integers with at least this many digits are checked like texts, because they may be card numbers. Token ids have
fewer."""
STRUCTURE = frozenset({"role", "type"})
WORD = re.compile(r"[a-z_.]{1,40}")
"""A value of the keys in STRUCTURE is not checked if it matches WORD."""
NOT_FOR_MODEL = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields of a request that no model reads."""
REDACTED = {"redacted": True}
"""What is stored of an answer that is not to be given again by its id: it is not what the model wrote."""

log = logging.getLogger(__name__)


class Redactor:
    """Redacts a project's calls.

    Raises:
        ValueError: a function of the settings cannot be imported.
    """

    def __init__(self, settings: PrivacySettings) -> None:
        own = [Rule(regex.compile(pattern), f"[{name}]") for name, pattern in settings.redact_patterns.items()]
        self._rules = [*(rule for name in PRESETS if name in settings.redact for rule in PRESETS[name]), *own]
        self._functions = [(name, _function(name)) for name in settings.redact_functions]
        self._is_slow = bool(own or self._functions)
        self._keeps_ids = settings.keep_redacted_ids
        self._hashes_media = settings.media == "hash"
        self.timed_out = 0
        """Texts that were dropped because a pattern or the whole call took too long."""
        self.failed = 0
        """Texts that were dropped because a function failed."""

    def calls(self, calls: Sequence[Call]) -> list[Call]:
        """Return the redacted calls."""
        return [self._call(one) for one in calls]

    async def calls_off_loop(self, calls: Sequence[Call]) -> list[Call]:
        """Return the redacted calls; runs in a thread if it may take long: for long texts, and with patterns or
        functions of the settings."""
        slow = self._is_slow or sum(map(_bytes, calls)) > AT_ONCE_BYTES
        return await asyncio.to_thread(self.calls, calls) if slow else self.calls(calls)

    async def feedback(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return redacted rows of feedback: comments, metadata, demonstrations, rubrics."""
        length = len(msgspec.json.encode([[row[name] for name in FEEDBACK] for row in rows]))

        def redacted() -> list[dict[str, Any]]:
            text = _Text(self, length)
            return [{**row, **{name: text.inside(row[name]) for name in FEEDBACK}} for row in rows]

        slow = self._is_slow or length > AT_ONCE_BYTES
        return await asyncio.to_thread(redacted) if slow else redacted()

    def _call(self, call: Call) -> Call:
        hashes = 0
        if self._hashes_media:
            messages, hashes = hashed(call.messages)
            if hashes:  # a conversation without its images cannot be continued by the id of an answer
                stored = None if call.stored is None else REDACTED
                call = msgspec.structs.replace(call, messages=messages, stored=stored)
        text = _Text(self, _bytes(call))
        address, end_user, sampling = call.address, call.end_user, msgspec.json.decode(call.sampling)
        about = {name: text.inside(value) for name, value in sampling.items() if name in NOT_FOR_MODEL}
        metadata, task = text.inside(address.metadata), text.inside(address.task)
        if end_user is not None and text.inside(end_user) != end_user:
            # The pseudonym is still unique, so this user's records can be selected.
            end_user = pseudonym(end_user)
            about |= {"user": end_user} if sampling.get("user") == call.end_user else {}
        pieces_before = text.pieces
        messages = [text.json(message) for message in call.messages]
        tools = text.json(call.tools_or_null)
        for_model = {
            name: text.inside(value, numbers=False) for name, value in sampling.items() if name not in NOT_FOR_MODEL
        }
        choices = tuple(text.choice(choice) for choice in call.choices)
        error = text.inside(call.error)
        spelled = text.pieces > pieces_before
        if not text.pieces:
            return msgspec.structs.replace(call, redactions=hashes)
        fields = about | for_model
        redacted = msgspec.structs.replace(
            call,
            address=msgspec.structs.replace(address, metadata=metadata, task=task),
            end_user=end_user,
            messages=messages,
            tools_or_null=tools,
            sampling=msgspec.Raw(msgspec.json.encode({name: fields[name] for name in sampling})),
            choices=choices,
            error=error,
            # The answer as it was sent contains the removed text, in pieces.
            reply=None,
            stored=REDACTED if spelled and call.stored is not None else call.stored,
            redactions=text.pieces + hashes,
        )
        return self._without_ids(redacted) if spelled else redacted

    def _without_ids(self, call: Call) -> Call:
        """Return the call without token ids that would reveal the removed text, unless the settings keep them."""
        has_ids = call.prompt_token_ids is not None and all(one.token_ids is not None for one in call.choices)
        if self._keeps_ids:
            return call if has_ids else msgspec.structs.replace(call, withheld=True)
        return msgspec.structs.replace(
            call,
            prompt_tokens=call.prompt_tokens if call.prompt_token_ids is None else len(call.prompt_token_ids),
            prompt_token_ids=None,
            choices=tuple(
                msgspec.structs.replace(one, sampled=one.tokens, token_ids=None, logprobs=None) for one in call.choices
            ),
            withheld=True,
        )


class _Text:
    """The texts of one call, redacted within a common time limit."""

    def __init__(self, redactor: Redactor, length: int) -> None:
        self._redactor = redactor
        # Python functions cannot be interrupted, but their time counts too.
        self._until = time.thread_time() + min(LEAST_S + S_PER_BYTE * length, MOST_S)
        self.pieces = 0
        """Number of pieces removed."""

    def json(self, value: msgspec.Raw) -> msgspec.Raw:
        """Return a redacted piece of JSON; the same object if nothing was removed."""
        before = self.pieces
        redacted = self.inside(msgspec.json.decode(value))
        return value if self.pieces == before else msgspec.Raw(msgspec.json.encode(redacted))

    def choice(self, choice: Choice) -> Choice:
        """Return a redacted choice; its text, which is in the message too, counts once."""
        before = self.pieces
        message = self.inside(choice.message)
        in_message = self.pieces
        text = self.inside(choice.text_of_parts)
        if in_message > before:
            self.pieces = in_message
        return msgspec.structs.replace(choice, message=message, text_of_parts=text)

    def inside(self, value: Any, *, numbers: bool = True, keys: bool = False) -> Any:
        """Return a value with all its texts redacted. `numbers`: long integers too; `keys`: keys of objects too."""
        match value:
            case str():
                return self._text(value)
            case list():
                return [self.inside(one, numbers=numbers, keys=keys) for one in value]
            case dict():
                return {
                    self._text(name) if keys else name: (
                        one
                        if name in STRUCTURE and isinstance(one, str) and WORD.fullmatch(one)
                        else self.inside(one, numbers=numbers, keys=keys)
                    )
                    for name, one in value.items()
                }
            case int() if numbers and abs(value) >= 10 ** (LEAST_DIGITS - 1):
                before = self.pieces
                text = self._plain(str(value))
                return value if self.pieces == before else text
        return value

    def _text(self, text: str) -> str:
        """Redact a text. If it is JSON, redact the decoded value first: in JSON text a line break is two characters,
        the second one a letter."""
        if text[:1] in ("{", "[") or text.lstrip()[:1] in ("{", "["):
            before = self.pieces
            try:
                redacted = self.inside(msgspec.json.decode(text), keys=True)
                if self.pieces > before:
                    text = msgspec.json.encode(redacted).decode()
            except (msgspec.DecodeError, RecursionError, UnicodeError):
                self.pieces = before
        return self._plain(text)

    def _plain(self, text: str) -> str:
        try:
            for rule in self._redactor._rules:
                if rule.may_match(text):
                    text = self._without(text, rule)
        except TimeoutError:
            self._redactor.timed_out += 1
            log.warning("a text of %d characters was dropped: redacting it took too long", len(text))
            self.pieces += 1
            return TIMED_OUT
        for name, function in self._redactor._functions:
            try:
                result = function(text)
                if not isinstance(result, str):
                    raise TypeError(f"it returned {type(result).__name__}, no text")
            except Exception as error:
                # Do not log the message, which may quote the text.
                self._redactor.failed += 1
                log.error("a text was dropped: %s failed with %s", name, type(error).__name__)
                self.pieces += 1
                return FAILED
            self.pieces += result != text
            text = result
        return text

    def _without(self, text: str, rule: Rule) -> str:
        """Return the text without what the rule matches.

        Raises:
            TimeoutError: the time limit is reached.
        """
        parts, at, place = [], 0, 0
        while match := rule.pattern.search(text, place, timeout=self._left_s(), concurrent=True):
            start, end = match.span()
            if start == end or (rule.counts is not None and not rule.counts(match[0])):
                # Another match may begin within the rejected one.
                place = start + 1
                while place < end and text[place].isdigit():
                    place += 1
                continue
            parts += [text[at:start], rule.mark]
            at = place = end
            self.pieces += 1
        return "".join((*parts, text[at:])) if parts else text

    def _left_s(self) -> float:
        left_s = self._until - time.thread_time()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _bytes(call: Call) -> int:
    return sum(map(len, (*call.messages, call.tools_or_null, call.sampling, *(one.text or "" for one in call.choices))))


def _function(name: str) -> Callable[[str], Any]:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"redact_functions: {name} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"redact_functions: {name} is no function")
    checked: Callable[[str], Any] = function
    return checked
