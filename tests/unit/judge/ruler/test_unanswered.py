"""litellm against servers that refuse and misbehave: every outcome says whom to ask, and when."""

import inspect
import socket
import time
from types import SimpleNamespace

import httpx
import pytest

from judge.ruler.errors import KINDS, JudgeRefused, JudgeUnavailable, Kind, TooLarge, kind_of, translated
from tests.unit.judge.ruler.speaker import GOOD, completion, failure, judged, never
from whetstone.config.rewards import JudgeSettings

# litellm alone takes seconds to import.
pytestmark = pytest.mark.slow


@pytest.fixture
def strong():
    with judged() as strong:
        yield strong


OPENAI_LENGTH = failure(
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
    "invalid_request_error",
    "context_length_exceeded",
)
VLLM_LENGTH = (
    "This model's maximum context length is 64 tokens. However, your prompt contains 99 input tokens, which exceeds"
    " this limit even without any output tokens. Please reduce the length of the input prompt."
)
VLLM_BOTH = (
    "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 2048 tokens"
    " and your request has 10 input tokens (4096 > 2048 - 10). (parameter=max_tokens, value=4096)"
)
VLLM_PROMPT = (
    "The decoder prompt (length 99) is longer than the maximum model length of 64. Make sure that `max_model_len`"
)


CASES = [
    ((400, OPENAI_LENGTH), TooLarge, "8192"),
    ((400, failure(VLLM_LENGTH, "BadRequestError", 400)), TooLarge, "64 tokens"),
    ((400, failure(VLLM_BOTH, "BadRequestError", 400)), TooLarge, "too large"),
    ((400, failure(VLLM_PROMPT, "BadRequestError", 400)), TooLarge, "maximum model length"),
    ((413, failure()), TooLarge, ""),
    ((429, failure("Request too large for gpt-4 on tokens per min (TPM): Limit 9, Requested 99")), TooLarge, "TPM"),
    ((429, failure("the maximum number of tokens per minute is reached")), JudgeUnavailable, "per minute"),
    ((400, failure("what is this?")), JudgeRefused, "judges.strong"),
    ((400, failure("no", "invalid_request_error", "content_policy_violation")), JudgeRefused, "judges.strong"),
    ((401, failure()), JudgeRefused, "the environment variable JUDGE_KEY of judges.strong"),
    ((402, failure()), JudgeRefused, "balance"),
    ((403, failure()), JudgeRefused, "the environment variable JUDGE_KEY of judges.strong"),
    ((404, failure()), JudgeRefused, "judges.strong.model"),
    ((405, failure()), JudgeRefused, "judges.strong"),
    ((408, failure()), JudgeUnavailable, ""),
    ((409, failure()), JudgeUnavailable, ""),
    ((422, failure()), JudgeRefused, "judges.strong"),
    ((422, {"error": {"message": '{"detail": [{"loc": ["body", "x"]}]}'}}), JudgeRefused, "judges.strong"),
    ((429, failure()), JudgeUnavailable, ""),
    ((429, failure("You exceeded your quota.", "insufficient_quota", "insufficient_quota")), JudgeRefused, "balance"),
    ((500, failure()), JudgeUnavailable, ""),
    ((502, b"<html>Bad gateway</html>", {"content-type": "text/html"}), JudgeUnavailable, "Bad gateway"),
    ((503, failure()), JudgeUnavailable, ""),
    ((504, failure()), JudgeUnavailable, ""),
    ((529, failure()), JudgeUnavailable, ""),
    ((200, b"<html>Welcome</html>", {"content-type": "text/html"}), JudgeUnavailable, "Welcome"),
    ((200, b"<html>Welcome</html>"), JudgeUnavailable, ""),
    ((200, b""), JudgeUnavailable, ""),
    ((200, completion(choices=[])), JudgeUnavailable, ""),
    ((200, completion(choices=None)), JudgeUnavailable, ""),
    ((200, completion(choices=[None])), JudgeUnavailable, ""),
    ((200, {"ok": True}), JudgeUnavailable, ""),
    ((200, [1]), JudgeUnavailable, ""),
    ((200, failure("overloaded")), JudgeUnavailable, ""),
]


@pytest.mark.parametrize(("line", "kind", "hint"), CASES, ids=[f"{line[0]} {str(line[1])[:50]}" for line, *_ in CASES])
def test_what_a_server_says_instead_of_an_answer_says_whom_to_ask_when(strong, monkeypatch, line, kind, hint):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    error = strong.says(line).refused(api_key_env="JUDGE_KEY")
    assert type(error) is kind
    assert hint in str(error)
    assert len(strong.bodies) == 1
    assert error.__cause__ is not None


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_says_when_to_come_back_is_believed(strong, status):
    error = strong.says((status, failure(), {"Retry-After": "7"})).refused()
    assert (type(error), error.after_s) == (JudgeUnavailable, 7)
    error = strong.says((status, failure())).refused()
    assert (type(error), error.after_s) == (JudgeUnavailable, None)


def test_a_limit_that_is_fresh_again_in_a_while_is_waited_for(strong):
    headers = {"x-ratelimit-reset-requests": "1s", "x-ratelimit-reset-tokens": "1m5s"}
    assert strong.says((429, failure(), headers)).refused().after_s == 65


def test_a_key_that_the_server_repeats_is_not_in_the_message(strong, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-of-mine")
    error = strong.says((401, failure("Incorrect API key provided: s3cret-of-mine."))).refused(api_key_env="JUDGE_KEY")
    assert "[key]" in str(error)
    assert "s3cret" not in str(error)


def trickle(handler):
    """Some bytes of an answer, one at a time, for ever."""
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    try:
        while not handler.server.gone.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()
    except OSError:
        handler.server.gone.set()
    handler.close_connection = True


def hang_up(handler):
    handler.close_connection = True


def break_off(handler):
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"id": ')
    handler.close_connection = True


@pytest.mark.parametrize("manner", [never, trickle])
def test_a_judge_has_its_time_however_busy_it_looks(strong, manner):
    strong.says(GOOD).asked()
    began = time.monotonic()
    error = strong.says(manner).refused(timeout_s=0.6)
    assert time.monotonic() - began < 15
    assert (type(error), error.after_s) == (JudgeUnavailable, None)
    # The connection is gone with the question: the server finds nobody to trickle to.
    assert manner is never or strong.server.gone.wait(5)


@pytest.mark.parametrize("manner", [hang_up, break_off])
def test_a_server_that_hangs_up_is_asked_later(strong, manner):
    assert type(strong.says(manner).refused()) is JudgeUnavailable
    assert len(strong.bodies) == 1


def test_a_server_that_is_not_there_is_asked_later(strong):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert type(strong.refused(url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")) is JudgeUnavailable


def test_a_provider_that_nobody_knows_will_never_answer(strong):
    error = strong.says(GOOD).refused(model="nobodys/m")
    assert type(error) is JudgeRefused
    assert "judges.strong.model" in str(error)
    assert strong.bodies == []


def test_no_error_class_of_litellm_or_openai_is_without_a_meaning():
    import litellm.exceptions
    import openai

    def named(module, package):
        classes = [value for _, value in inspect.getmembers(module, inspect.isclass)]
        return {f"{package}.{one.__name__}" for one in classes if issubclass(one, Exception) and of(one) == package}

    def of(one):
        return one.__module__.partition(".")[0]

    theirs = named(litellm.exceptions, "litellm") | named(openai._exceptions, "openai")
    ours = {name for name in KINDS if not name.startswith("builtins.")}
    assert (theirs - ours, ours - theirs) == (set(), set())


def made(one):
    """An instance of an error class, its arguments guessed from their names."""
    request = httpx.Request("POST", "http://judge/v1")
    values = {
        "response": httpx.Response(418, request=request),
        "request": request,
        "status_code": 418,
        "body": None,
        "current_cost": 1.0,
        "max_budget": 1.0,
        "failures": [],
        "is_pre_first_chunk": True,
        "completion": SimpleNamespace(usage=None),
        "request_data": {},
        "event_type": None,
    }
    try:
        wanted = inspect.signature(one).parameters.values()
    except ValueError:  # Exception's own, which takes anything
        return one("said")
    required = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return one(**{name: values.get(name, "said") for name in required})


MEANT = {
    Kind.LATER: JudgeUnavailable,
    Kind.TOO_LARGE: TooLarge,
    # 418
    Kind.BY_STATUS: JudgeRefused,
}


@pytest.mark.parametrize("name", sorted(name for name in KINDS if not name.startswith("builtins.")))
def test_every_error_means_what_the_table_says(name):
    import litellm.exceptions
    import openai

    package, _, one = name.partition(".")
    error = made(getattr(litellm.exceptions if package == "litellm" else openai._exceptions, one))
    unanswered = translated(error, "strong", JudgeSettings(model="openai/m"))
    assert type(unanswered) is MEANT.get(KINDS[name], JudgeRefused)
    assert KINDS[name] is Kind.BY_STATUS or kind_of(error) is KINDS[name]
    assert 0 < len(str(unanswered)) <= 320
    assert type(unanswered) is not JudgeRefused or "judges.strong" in str(unanswered)
