"""Classify why a judge gave no answer, by the names and texts of litellm's errors. Imports neither litellm nor openai.

    CallFailed
    ├── JudgeUnavailable  the judge is busy, down, slow or unintelligible: ask again later
    ├── TooLarge          the prompt exceeds the model's limit: a shorter one may pass
    └── JudgeRefused      this judge will never answer this: ask another one

The messages go into the database: they have a maximum length, and do not contain the judge's API key.
"""

import contextlib
import email.utils
import enum
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from judge.errors import JudgeError
from whetstone.config.rewards import JudgeSettings

MAX_AFTER_S = 3600.0
"""Longest wait that a provider may request."""
MESSAGE_CHARS = 200
"""Longest quotation from an error; with its remedy a message has about 300 characters."""
READ_CHARS = 2000
"""Only this much of an error is searched for its meaning. What follows, if anything, is the echoed prompt."""


class CallFailed(JudgeError):
    """A judge gave no answer; the message gives the reason, for admins and in SQL."""


class JudgeUnavailable(CallFailed):
    """Ask again later: after `after_s` seconds where the provider gave a time."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class TooLarge(CallFailed):
    """The prompt exceeds the model's context, or the limit of one request."""


class JudgeRefused(CallFailed):
    """This judge will not answer this; the message ends with what an admin can do."""


class Kind(enum.Enum):
    """The meaning of an error. For those that mean `JudgeRefused`, the value is the remedy."""

    LATER = enum.auto()
    TOO_LARGE = enum.auto()
    BY_STATUS = enum.auto()
    KEY = "check {key}"
    MODEL = "check judges.{name}.model and judges.{name}.url"
    MONEY = "check the account's balance and limits at the provider of judges.{name}"
    REFUSED = "see whether another model suits judges.{name} better"


KINDS = {
    "litellm.APIConnectionError": Kind.LATER,
    "litellm.APIError": Kind.BY_STATUS,
    "litellm.APIResponseValidationError": Kind.LATER,
    "litellm.AuthenticationError": Kind.KEY,
    "litellm.BadGatewayError": Kind.LATER,
    "litellm.BadRequestError": Kind.REFUSED,
    "litellm.BlockedPiiEntityError": Kind.REFUSED,
    "litellm.BudgetExceededError": Kind.MONEY,
    "litellm.ContentPolicyViolationError": Kind.REFUSED,
    "litellm.ContextWindowExceededError": Kind.TOO_LARGE,
    "litellm.GuardrailRaisedException": Kind.REFUSED,
    "litellm.ImageFetchError": Kind.REFUSED,
    "litellm.InternalServerError": Kind.LATER,
    "litellm.InvalidRequestError": Kind.REFUSED,
    "litellm.JSONSchemaValidationError": Kind.LATER,
    "litellm.LiteLLMUnknownProvider": Kind.MODEL,
    "litellm.MidStreamFallbackError": Kind.LATER,
    "litellm.MockException": Kind.BY_STATUS,
    "litellm.ModelNotMappedError": Kind.MODEL,
    "litellm.ModifyResponseException": Kind.REFUSED,
    "litellm.NotFoundError": Kind.MODEL,
    "litellm.OpenAIError": Kind.LATER,
    "litellm.PaymentRequiredError": Kind.MONEY,
    "litellm.PermissionDeniedError": Kind.KEY,
    "litellm.RateLimitError": Kind.LATER,
    "litellm.RejectedRequestError": Kind.REFUSED,
    "litellm.SensitiveDataRouteException": Kind.REFUSED,
    "litellm.ServiceUnavailableError": Kind.LATER,
    "litellm.Timeout": Kind.LATER,
    "litellm.UnprocessableEntityError": Kind.REFUSED,
    "litellm.UnsupportedParamsError": Kind.REFUSED,
    "litellm.VectorStoreSearchError": Kind.REFUSED,
    # Errors that litellm has not translated.
    "openai.APIConnectionError": Kind.LATER,
    "openai.APIError": Kind.LATER,
    "openai.APIResponseValidationError": Kind.LATER,
    "openai.APIStatusError": Kind.BY_STATUS,
    "openai.APITimeoutError": Kind.LATER,
    "openai.AuthenticationError": Kind.KEY,
    "openai.BadRequestError": Kind.REFUSED,
    "openai.ConflictError": Kind.LATER,
    "openai.ContentFilterFinishReasonError": Kind.REFUSED,
    "openai.InternalServerError": Kind.LATER,
    "openai.InvalidWebhookSignatureError": Kind.LATER,
    "openai.LengthFinishReasonError": Kind.LATER,
    "openai.NotFoundError": Kind.MODEL,
    "openai.OAuthError": Kind.KEY,
    "openai.OpenAIError": Kind.LATER,
    "openai.PermissionDeniedError": Kind.KEY,
    "openai.RateLimitError": Kind.LATER,
    "openai.SubjectTokenProviderError": Kind.KEY,
    "openai.UnprocessableEntityError": Kind.REFUSED,
    "openai.WebSocketConnectionClosedError": Kind.LATER,
    "openai.WebSocketQueueFullError": Kind.LATER,
    # A provider's own package that litellm needs and that is not installed.
    "builtins.ImportError": Kind.MODEL,
    "builtins.ModuleNotFoundError": Kind.MODEL,
}
"""The meaning of each error class, by exact class: others are `LATER`, and a test fails when litellm adds a class."""

STATUSES = {
    401: Kind.KEY,
    402: Kind.MONEY,
    403: Kind.KEY,
    404: Kind.MODEL,
    408: Kind.LATER,
    409: Kind.LATER,
    413: Kind.TOO_LARGE,
    425: Kind.LATER,
    429: Kind.LATER,
}
"""The meaning of a status where the class has none; any other 4xx is `REFUSED`, all else `LATER`."""

TOO_LARGE = re.compile(
    r"context[ _](?:length|window|limit|size)|maximum model length|prompt is too long|input is too long"
    r"|too many (?:input )?tokens|maximum number of (?:input )?tokens|request too large",
    re.IGNORECASE,
)
"""Providers' wordings, including vLLM's and OpenAI's; litellm recognizes only some of them."""
TOO_LARGE_EVER = re.compile(r"request too large", re.IGNORECASE)
"""With 429: one request exceeds the limit of a minute. The other wordings then mean all requests of a minute together.
"""
NO_MONEY = re.compile(r"insufficient_quota|credit balance is too low|insufficient (?:balance|credits|funds)", re.I)
"""Errors for which waiting does not help, although OpenAI sends them with 429."""
NO_PROVIDER = re.compile("LLM Provider NOT provided")
"""litellm's text; it does not raise the class that it has for this."""
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:([\d.]+)ms)?")
"""As in OpenAI's headers: 1s, 6m0s, 120ms."""
RESETS = re.compile(r"x-ratelimit-reset(?:-requests|-tokens)?|anthropic-ratelimit-[a-z-]+-reset")


def translated(error: Exception, name: str, judge: JudgeSettings) -> CallFailed:
    """Return the CallFailed for an error that litellm raised for judge `name`; the caller raises it from that."""
    kind, text = kind_of(error), _message(error, judge)
    if kind is Kind.LATER:
        return JudgeUnavailable(text, after_s(_headers(error), time.time()))
    if kind is Kind.TOO_LARGE:
        return TooLarge(text)
    unnamed = f"judges.{name}.api_key_env: it is to name the environment variable that holds the key"
    key = f"the environment variable {judge.api_key_env} of judges.{name}" if judge.api_key_env is not None else unnamed
    return JudgeRefused(f"{text}; {str(kind.value).format(name=name, key=key)}")


def kind_of(error: Exception) -> Kind:
    """Return the meaning of the error's class or, for a class with several meanings, of its status and text."""
    kind = KINDS.get(f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}", Kind.LATER)
    status = getattr(error, "status_code", None)
    if kind is Kind.BY_STATUS:
        is_4xx = isinstance(status, int) and 400 <= status < 500
        kind = STATUSES.get(status or 0, Kind.REFUSED if is_4xx else Kind.LATER)
    if status in (400, 402, 413, 422, 429):
        message = message_of(error)
        too_large = TOO_LARGE_EVER if status == 429 else TOO_LARGE
        wordings = ((NO_PROVIDER, Kind.MODEL), (NO_MONEY, Kind.MONEY), (too_large, Kind.TOO_LARGE))
        return next((meaning for wording, meaning in wordings if wording.search(message)), kind)
    return kind


def message_of(error: Exception) -> str:
    """Return a provider's error text to search: its message, and the codes that come with it."""
    body = getattr(error, "body", None)
    codes = [str(body.get(key)) for key in ("type", "code", "param")] if isinstance(body, dict) else []
    return " ".join([*codes, str(error)])[:READ_CHARS]


def _message(error: Exception, judge: JudgeSettings) -> str:
    text = str(error)
    if judge.api_key_env and (key := os.environ.get(judge.api_key_env)):
        text = text.replace(key, "[key]")
    text = text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    # litellm itself adds the class once or twice.
    text = re.sub(r"^(?:(?:litellm\.)?\w+: )+", "", " ".join(text.split()))
    whole = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return whole if len(whole) <= MESSAGE_CHARS else f"{whole[: MESSAGE_CHARS - 1]}…"


def _headers(error: Exception) -> dict[str, str]:
    holders = (getattr(error, "litellm_response_headers", None), getattr(error, "response", None))
    sources = [getattr(holder, "headers", holder) for holder in holders]
    pairs = (pair for source in sources if isinstance(source, Mapping) for pair in source.items())
    return {str(key).lower(): str(value) for key, value in pairs}


def after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds from `now` (Unix time) after which headers allow another request, at most `MAX_AFTER_S`.

    Names are in lower case. `retry-after` gives it directly, in seconds or as a date (RFC 9110, 10.2.3); without it,
    the wait ends when all of the provider's limits have been reset. None where no header gives a time.
    """
    readings: tuple[tuple[str, Callable[[str], float]], ...] = (
        ("retry-after-ms", lambda value: _finite(value) / 1000),
        ("retry-after", _finite),
        ("retry-after", lambda value: _timestamp(email.utils.parsedate_to_datetime(value)) - now),
    )
    for name, reading in readings:
        with contextlib.suppress(KeyError, ValueError):
            return _bounded(reading(headers[name]))
    resets = [_reset_s(value, now) for key, value in headers.items() if RESETS.fullmatch(key)]
    return max((_bounded(reset) for reset in resets if reset is not None), default=None)


def _reset_s(value: str, now: float) -> float | None:
    """Return the seconds until a limit is reset, from a duration, a number of seconds, a date or Unix time."""
    with contextlib.suppress(ValueError):
        number = _finite(value)
        # No limit lasts for decades: such a number is a point in time, in milliseconds where it is too far away.
        return number if number < 1e9 else (number if number < 1e12 else number / 1000) - now
    with contextlib.suppress(ValueError):
        return _timestamp(datetime.fromisoformat(value)) - now
    if value and (match := DURATION.fullmatch(value)):
        with contextlib.suppress(ValueError):
            units = zip(match.groups(default="0"), (86400, 3600, 60, 1, 0.001), strict=True)
            return sum(_finite(number) * unit_s for number, unit_s in units)
    return None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _timestamp(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, 0.0), MAX_AFTER_S)
