"""Send chat completions to the proxy of the stack on a data folder, as an app does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from whetstone.config.settings import API_KEY_VARIABLE
from whetstone.stack.admin_client import ProxyUnreachable, RefusedByProxy, error_message, key, not_ours, proxy_url

TIMEOUT_S = 600.0


class ChatClient:
    """The proxy of the stack on a folder."""

    def __init__(self, data: Path) -> None:
        """Find the proxy.

        Raises:
            StackNotRunning: no stack runs there.
            ProxyUnreachable: up.json is damaged.
        """
        self._url = proxy_url(data)

    def complete(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer to a chat completion, which is not streamed.

        Raises:
            ProxyUnreachable: the proxy cannot be called, or requires another key.
            RefusedByProxy: the proxy answers with an error, or with no JSON.
        """
        named = {name.encode(): value.encode() for name, value in headers.items()} | key()
        try:
            answer = httpx.post(
                f"{self._url}/v1/chat/completions", json=body, headers=named, timeout=TIMEOUT_S, trust_env=False
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ProxyUnreachable(f"the proxy at {self._url} does not answer: {error!r}") from error
        if answer.is_success:
            try:
                return msgspec.json.decode(answer.content, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise RefusedByProxy(not_ours(answer, self._url)) from error
        why = error_message(answer, self._url)
        if answer.status_code in (401, 403):
            raise ProxyUnreachable(f"{why}. The command line sends the key in {API_KEY_VARIABLE}; it needs inference")
        raise RefusedByProxy(why)
