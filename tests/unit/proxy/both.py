"""Asks the proxy and the vLLM behind it the same, until their answers can be compared. Knows no test."""

from typing import Any

import httpx

from tests.unit.proxy.conftest import RunningProxy
from tests.unit.proxy.same import masked, same

MODELS = ("starter", "starter@v0")
SERVED = "starter@v0"
"""As vLLM alone names it."""

ATTEMPTS = 10
"""How often both are asked until they say the same: a busy vLLM joins the tokens of an event as it comes."""

REFUSED = ("request_id", "cache_salt", "priority")
"""Of the fields that the proxy refuses those that are harmless alone."""
MAX_CHOICES = 256
"""How many the proxy serves at once by default."""


class Both:
    """The proxy, and the vLLM behind it."""

    def __init__(self, proxy: RunningProxy, vllm_url: str) -> None:
        self.proxy = proxy
        # A connection each: where vLLM fails it closes one without a word.
        self._alone = httpx.Client(
            base_url=vllm_url, timeout=120, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask both; their answers are the same, or the proxy refuses what it promises to refuse. Returns its answer."""
        if _is_refused(body):
            response = self.proxy.client.post(path, json=body)
            assert response.status_code in (400, 404)
            return response
        for _ in range(ATTEMPTS):
            response = self.proxy.client.post(path, json=body)
            alone = self._alone.post(path, json=body | {"model": SERVED})
            through, expected = masked(response, body["model"]), masked(alone, SERVED)
            if prompts(body) > 1:
                # vLLM serves each prompt on its own: whose token comes first is a matter of chance.
                through, expected = through.by_choice(), expected.by_choice()
            if same(through, expected):
                return response
        if choices(body) > 1:  # on a busy machine vLLM begins them in different steps: by chance again
            through, expected = through.by_choice(), expected.by_choice()
        assert same(through, expected), f"through the proxy {through}, from vLLM alone {expected}"
        return response

    def close(self) -> None:
        """Leave vLLM; the proxy is whose it was."""
        self._alone.close()


def choices(body: dict[str, Any]) -> int:
    """How many answers a request asks for; 1 where it does not ask as it should."""
    n = body.get("n")
    return int(n) if isinstance(n, int | float) else 1


def prompts(body: dict[str, Any]) -> int:
    """How many prompts a request asks to complete; a conversation counts as one."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _is_refused(body: dict[str, Any]) -> bool:
    n = body.get("n")
    too_many = isinstance(n, int) and n > MAX_CHOICES
    return body.get("model") not in MODELS or any(name in body for name in REFUSED) or too_many
