"""Call the admin routes of the running stack's proxy, for the command line.

A caller must know whether the proxy may have done the work: only `StackNotRunning` means that no proxy could have.
"""

import os
from pathlib import Path
from typing import Any

import httpx
import msgspec

from whetstone.config.settings import API_KEY_VARIABLE
from whetstone.errors import WhetstoneError
from whetstone.stack.data_lock import is_locked

TIMEOUT_S = 60.0


class StackNotRunning(WhetstoneError):
    """No stack runs; the message says where it was looked for, and what to do."""


class ProxyUnreachable(WhetstoneError):
    """A stack runs, but its proxy could not be called, so nothing was done; the message says what to do."""


class RefusedByProxy(WhetstoneError):
    """The proxy refused, or it is unknown whether it did the work; the message says why."""


class _ErrorBody(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


class _Running(msgspec.Struct):
    proxy: str


def ask(data: Path, path: str, body: dict[str, Any], *, look: str) -> bytes:
    """Post a request to the proxy of the stack on `data` and return its answer. `look`: how the user can check whether
    it was done, if no answer comes.

    Raises:
        StackNotRunning: no stack runs there.
        ProxyUnreachable: a stack runs, but its proxy accepts no connection or requires another key, or its address
            cannot be read.
        RefusedByProxy: the proxy refuses, or it is unknown whether it did the work.
    """
    url = _proxy(data)
    try:
        answer = httpx.post(url + path, json=body, headers=key(), timeout=TIMEOUT_S, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if is_locked(data):
            raise ProxyUnreachable(
                f"a stack runs on {data}, but its proxy takes no connection at {url} ({error}); nothing was done. "
                f"`up` starts it again: ask again in a moment, {data / 'logs' / 'proxy.log'} says what it does"
            ) from error
        raise StackNotRunning(
            f"no proxy answers at {url}: start the stack again with `whetstone up` ({error})"
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ProxyUnreachable(_unreadable(data / "up.json", error)) from error
    except httpx.TransportError as error:
        raise RefusedByProxy(
            f"the proxy at {url} was sent the request and did not answer ({error!r}); whether it was done is unknown: "
            f"{look} shows it"
        ) from error
    if answer.is_success:
        return answer.content
    try:
        why = msgspec.json.decode(answer.content, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        why = f"what answers at {url} is no proxy of ours (status {answer.status_code})"
    if answer.status_code in (401, 403):
        raise ProxyUnreachable(
            f"{why}. The command line asks with the key in {API_KEY_VARIABLE}, which needs the scope admin"
        )
    raise RefusedByProxy(why)


def key() -> dict[bytes, bytes]:
    """Return the authorization header, if the environment has a key."""
    api_key = os.environ.get(API_KEY_VARIABLE)
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}


def _proxy(data: Path) -> str:
    path = data / "up.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Running).proxy
    except FileNotFoundError:
        raise StackNotRunning(
            f"no stack runs on {data}: start it with `whetstone up`, or name its folder with --data"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ProxyUnreachable(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read ({error}); stop the stack and start it again"
