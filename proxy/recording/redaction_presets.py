"""Patterns for private data: e-mail addresses, phone numbers, card numbers, keys. Pure; uses the `regex` package.

Each pattern runs in linear time: unbounded repeats are possessive. Most texts contain no such data and are skipped by a
hint: a text without an @ has no e-mail address. The patterns find the usual spellings; docs/privacy.md lists what they
miss.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex

from whetstone.config.privacy import Preset

ENOUGH_DIGITS = re.compile(r"[0-9](?:[^\w\n]{0,2}[0-9]){6}")
"""Part of every phone and card number. `re` is ten times as fast here, and this pattern cannot backtrack without
bound."""


def is_card(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others (Luhn 1960, US patent 2,950,048)."""
    values = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in values) % 10 == 0


def _card(text: str) -> bool:
    digits = "".join(one for one in text if one.isdigit())
    return 13 <= len(digits) <= 19 and is_card(digits)


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern, and the mark that replaces its matches."""

    pattern: Any
    """A pattern of `regex`, which has no types."""
    mark: str
    hints: tuple[str, ...] = ()
    """The pattern is skipped if the text contains none of these; no hints: it always runs."""
    digits: bool = False
    """The pattern is skipped if the text has no `ENOUGH_DIGITS`."""
    counts: Callable[[str], bool] | None = None
    """Decides which matches count; None: all."""

    def may_match(self, text: str) -> bool:
        """Return whether the pattern may match, so that it must run."""
        if self.digits:
            return ENOUGH_DIGITS.search(text) is not None
        return not self.hints or any(hint in text for hint in self.hints)


_EMAIL = (
    # Letters after a dot: `lodash@4.17.21` is a version. %40 is an @ within a URL.
    r"(?<![\w.+-])[\w.+-]++(?:@|%40)(?=[\w.-]{0,252}\.[^\W\d_]{2})[\w-]++(?:\.[\w-]++)++"
)
_PHONE = (
    r"(?<![\w+])\+[1-9](?:[ ().\/-]{0,2}[0-9]){6,14}(?![0-9])"  # +49 (0)171 123-4567
    r"|(?<![\w.+-])\(?[2-9][0-9]{2}\)?[ .-][0-9]{3}[ .-][0-9]{4}(?![\w-])"  # (555) 123-4567
    r"|(?<![\w.+-])\(?0[0-9]{2,4}\)?[ \/-]"  # 030 1234567
    r"(?=(?:[ -]?[0-9]){6})[0-9]{3,12}+(?:[ -][0-9]{2,6}+){0,5}+(?!\w)"
)
_CARD = (
    r"(?<![A-Za-z0-9])(?:[2-6][0-9]{12,18}"
    r"|[2-6][0-9]{3}([ .-])[0-9]{4}\1[0-9]{4}\1[0-9]{1,7}"
    r"|3[0-9]{3}([ .-])[0-9]{6}\2[0-9]{4,5})(?![A-Za-z0-9])"
)
_PRIVATE_KEY = r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
_TOKEN = (
    r"(?<![\w-])(?:"
    # OpenAI's and Anthropic's; a digit is required, because words are joined by dashes too
    r"sk-(?=[\w-]*[0-9])[\w-]{16,}+"
    r"|gh[opsur]_[A-Za-z0-9]{20,}+|github_pat_\w{20,}+|glpat-[\w-]{16,}+"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}+|xox[abeoprs]-[\w-]{10,}+|hf_[A-Za-z0-9]{20,}+"
    r"|wsk_[a-z0-9]++_[\w-]++"
    r"|eyJ[\w-]++\.eyJ[\w-]++\.[\w-]*+"  # a JSON web token
    r")"
)
_TOKEN_HINTS = ("sk-", "gh", "glpat-", "AKIA", "ASIA", "AIza", "xox", "hf_", "wsk_", "eyJ")
_BEARER = r"\b[Bb][Ee][Aa][Rr][Ee][Rr][ \t]{1,4}\K(?=[\w.~+\/-]*[0-9])[\w.~+\/-]{16,}+=*+"

PRESETS: dict[Preset, tuple[Rule, ...]] = {
    "key": (
        Rule(regex.compile(_PRIVATE_KEY, regex.DOTALL), "[key]", ("PRIVATE KEY-----",)),
        Rule(regex.compile(_TOKEN), "[key]", _TOKEN_HINTS),
        Rule(regex.compile(_BEARER), "[key]", ("earer", "EARER")),
    ),
    "email": (Rule(regex.compile(_EMAIL), "[email]", ("@", "%40")),),
    "card": (Rule(regex.compile(_CARD), "[card]", digits=True, counts=_card),),
    "phone": (Rule(regex.compile(_PHONE), "[phone]", digits=True),),
}
"""In the order in which they are applied."""
