"""Describe the vLLM servers that `up` starts as parts, one each: command, readiness and liveness."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from sqlalchemy.exc import DBAPIError

from whetstone import torch_builds
from whetstone.config.settings import Settings
from whetstone.memory.devices import visible_to
from whetstone.registry import adapters
from whetstone.registry.projects import Store
from whetstone.stack.supervisor import Part, StartFailed
from whetstone.vllm import client


def names(urls: Sequence[str]) -> list[str]:
    """Return the names of the servers' parts: `vllm` if there is one, else `vllm-1` and so on."""
    return ["vllm"] if len(urls) == 1 else [f"vllm-{number}" for number in range(1, len(urls) + 1)]


def command(settings: Settings, url: str) -> list[str]:
    """Return the command line of the server at this address."""
    port = urlsplit(url).port
    assert port is not None, url
    return client.command(settings, port)


def parts(settings: Settings, store: Store) -> list[Part]:
    """Return a part for each address in `vllm.urls`: each is checked, restarted and given its adapters separately."""
    urls = settings.vllm.urls
    each = settings.vllm.devices_each if settings.vllm.devices else ((),) * len(urls)
    return [
        _part(name, url, settings, store, visible_to(gpus))
        for name, url, gpus in zip(names(urls), urls, each, strict=True)
    ]


def _part(part_name: str, url: str, settings: Settings, store: Store, gpus: Mapping[str, str]) -> Part:
    control = client.Vllm(url)

    def ready() -> bool:
        """Whether it has its adapters: a start loses them all, and no request should wait for them.

        Those that have to be pulled are left to the proxy: a slow store must not stop the check of other parts.
        """
        try:
            if not control.healthy():
                return False
            if settings.adapters.is_remote:
                return True
            for own in settings.of_projects():
                adapters.load_missing(control, store.served(own.project, own.trained), control.models())
        except (client.VllmError, DBAPIError):
            return False
        return True

    def alive() -> bool | None:
        before = control.probed_tokens
        lives = control.alive(settings.served_name)
        if sampled := control.probed_tokens - before:
            store.count_probe(settings, sampled)
        return lives

    return Part(
        part_name,
        command(settings, url),
        {**client.environment(settings), **torch_builds.environment(), **gpus},
        ready,
        timeout_s=settings.vllm.start_timeout_s,
        silence_s=settings.vllm.silence_s,
        alive=alive,
    )


def await_loaded(
    name: str, urls: Sequence[str], timeout_s: float, meanwhile: Callable[[], object], *, enough: int
) -> None:
    """Wait until `enough` of the servers have the version loaded; `meanwhile` is called between two checks.

    Raises:
        StartFailed: they have not in time; the message says which, and what they answer.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        controls = {url: stack.enter_context(contextlib.closing(client.Vllm(url))) for url in urls}
        while True:
            lacking = {url: why for url, control in controls.items() if (why := _lacks(control, name))}
            if len(urls) - len(lacking) >= enough:
                return
            if time.monotonic() > deadline:
                raise StartFailed("; ".join(f"vLLM at {url}: {why}" for url, why in lacking.items()))
            meanwhile()
            time.sleep(0.2)


def _lacks(control: client.Vllm, name: str) -> str | None:
    """Return why it does not serve this version yet; None if it does."""
    try:
        return None if name in control.models() else f"{name} is not loaded"
    except client.VllmError as error:
        return str(error)
