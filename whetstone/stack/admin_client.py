"""Where the stack on a data folder runs, by its `up.json`, and calls of its proxy's admin routes.

A caller must know whether the proxy may have done the work: only `StackNotRunning` means that no proxy could have.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from whetstone.config.settings import API_KEY_VARIABLE, Settings, SettingsError
from whetstone.database.engine import without_password
from whetstone.errors import WhetstoneError
from whetstone.stack.data_lock import is_locked

TIMEOUT_S = 60.0


class StackNotRunning(WhetstoneError):
    """No stack runs; the message says where it was looked for, and what to do."""


class ProxyUnreachable(WhetstoneError):
    """A stack runs, but its proxy could not be called, so nothing was done; the message says what to do."""


class RefusedByProxy(WhetstoneError):
    """The proxy refused, or it is unknown whether it did the work; the message says why."""

    exit_code = 1


class _ErrorBody(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


class Addresses(msgspec.Struct):
    """The fields of `<data>/up.json` that the command line uses."""

    proxy: str
    replicas: tuple[str, ...]
    database: str
    policy: str
    pids: dict[str, int]


def addresses(data: Path) -> Addresses | None:
    """Return the addresses of the stack that runs on the data folder; None if none runs.

    Raises:
        ProxyUnreachable: up.json is damaged.
    """
    try:
        return msgspec.json.decode((data / "up.json").read_bytes(), type=Addresses)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ProxyUnreachable(_unreadable(data, error)) from error


def proxy_url(data: Path) -> str:
    """Return the address of the proxy of the stack that runs on the data folder.

    Raises:
        StackNotRunning: no stack runs there.
        ProxyUnreachable: up.json is damaged.
    """
    up = addresses(data)
    if up is None:
        raise StackNotRunning(f"no stack runs on {data}: start it with `whetstone up`, or name its folder with --data")
    return up.proxy


def of_running(settings: Settings) -> Settings:
    """Return the settings with the addresses of the stack that runs on the data folder; unchanged if none runs.

    Raises:
        ProxyUnreachable: up.json is damaged.
        SettingsError: the stack's database has a password that these settings do not have.
    """
    up = addresses(settings.data)
    if up is None:
        return settings
    is_same = up.database == without_password(settings.database_url)
    if "***" in up.database and not is_same:
        raise SettingsError(
            f"the stack that runs on {settings.data} has its tables at {up.database}: tell the command line that "
            "address too, with its password, in whetstone.toml or WHETSTONE_DATABASE"
        )
    return settings.model_copy(
        update={
            "database": settings.database_url if is_same else up.database,
            "policy": up.policy,
            "vllm": settings.vllm.model_copy(update={"urls": up.replicas}),
        }
    )


def launch_arguments(data: Path) -> list[str]:
    """Return the arguments with which the stack on the folder started its vLLM; empty if it started none.

    Raises:
        ProxyUnreachable: up.json is damaged.
    """
    up = addresses(data)
    pids = [] if up is None else [pid for name, pid in up.pids.items() if name.startswith("vllm")]
    try:
        return Path(f"/proc/{pids[0]}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, IndexError):
        return []


def ask(data: Path, policy: str, action: str, fields: dict[str, Any], *, look: str) -> bytes:
    """Post a request about a policy to the proxy of the stack on `data`, without fields that are None, and return its
    answer. `look`: how the user can check whether it was done, if no answer comes.

    Raises:
        StackNotRunning: no stack runs there.
        ProxyUnreachable: a stack runs, but its proxy accepts no connection or requires another key, or its address
            cannot be read.
        RefusedByProxy: the proxy refuses, or it is unknown whether it did the work.
    """
    url = proxy_url(data)
    path = f"/admin/policies/{quote(policy, safe='')}/{action}"
    body = {name: value for name, value in fields.items() if value is not None}
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
        raise ProxyUnreachable(_unreadable(data, error)) from error
    except httpx.TransportError as error:
        raise RefusedByProxy(
            f"the proxy at {url} was sent the request and did not answer ({error!r}); whether it was done is unknown: "
            f"{look} shows it"
        ) from error
    if answer.is_success:
        return answer.content
    why = error_message(answer, url)
    if answer.status_code in (401, 403):
        raise ProxyUnreachable(
            f"{why}. The command line asks with the key in {API_KEY_VARIABLE}, which needs the scope admin"
        )
    raise RefusedByProxy(why)


def error_message(answer: httpx.Response, url: str) -> str:
    """Return the message of an error that the proxy at `url` answered; what else answers is no proxy of ours."""
    try:
        return msgspec.json.decode(answer.content, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        return not_ours(answer, url)


def not_ours(answer: httpx.Response, url: str) -> str:
    """Return what to say of an answer that no proxy gives."""
    return f"what answers at {url} is no proxy of ours (status {answer.status_code})"


def key() -> dict[bytes, bytes]:
    """Return the authorization header, if the environment has a key."""
    api_key = os.environ.get(API_KEY_VARIABLE)
    return {b"authorization": b"Bearer " + api_key.encode()} if api_key else {}


def _unreadable(data: Path, error: Exception) -> str:
    return f"{data / 'up.json'} cannot be read ({error}); stop the stack and start it again"
