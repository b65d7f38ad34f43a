"""The proxy of the stack that runs, asked by the command line. Knows where its address stands and how it refuses.

Who asks must know whether the proxy may have done it: only `NoStack` says that nobody is there who could have.
"""

import os
from pathlib import Path
from typing import Any

import httpx
import msgspec

from whetstone.alone import in_use
from whetstone.settings import API_KEY_VARIABLE

TIMEOUT_S = 60.0


class NoStack(Exception):
    """No stack runs that could be asked; the message says where it was looked for, and what to do."""


class NotAsked(Exception):
    """A stack is there that could not be asked, so nothing was done; the message says what to do."""


class NotDone(Exception):
    """What was asked for is refused, or nobody knows whether it was done; the message says why."""


class _Refused(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


class _Running(msgspec.Struct):
    proxy: str


def ask(data: Path, path: str, body: dict[str, Any], *, look: str) -> bytes:
    """What the proxy of the stack on `data` answers. `look`: where is seen whether it was done, if it stays silent.

    Raises:
        NoStack: none runs there.
        NotAsked: one does, but its proxy takes no connection or wants another key, or its address cannot be read.
        NotDone: the proxy refuses it, or nobody knows whether it was done.
    """
    url = _proxy(data)
    try:
        answer = httpx.post(url + path, json=body, headers=key(), timeout=TIMEOUT_S, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if in_use(data):
            raise NotAsked(
                f"a stack runs on {data}, but its proxy takes no connection at {url} ({error}); nothing was done. "
                f"`up` starts it again: ask again in a moment, {data / 'logs' / 'proxy.log'} says what it does"
            ) from error
        raise NoStack(f"no proxy answers at {url}: start the stack again with `whetstone up` ({error})") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise NotAsked(_unreadable(data / "up.json", error)) from error
    except httpx.TransportError as error:
        raise NotDone(
            f"the proxy at {url} was asked and has not answered ({error!r}); whether it was done is not known: "
            f"{look} shows it"
        ) from error
    if answer.is_success:
        return answer.content
    try:
        why = msgspec.json.decode(answer.content, type=_Refused).error.message
    except msgspec.DecodeError:
        why = f"what answers at {url} is no proxy of ours (status {answer.status_code})"
    if answer.status_code in (401, 403):
        raise NotAsked(f"{why}. The command line asks with the key in {API_KEY_VARIABLE}, which needs the scope admin")
    raise NotDone(why)


def key() -> dict[bytes, bytes]:
    """The header that opens the proxy, if the environment has a key."""
    found = os.environ.get(API_KEY_VARIABLE)
    return {b"authorization": b"Bearer " + found.encode()} if found else {}


def _proxy(data: Path) -> str:
    path = data / "up.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Running).proxy
    except FileNotFoundError:
        raise NoStack(
            f"no stack runs on {data}: start it with `whetstone up`, or name its folder with --data"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise NotAsked(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read ({error}); stop the stack and start it again"
