"""`whetstone puller`: pull adapters from the adapter store beside a vLLM server."""

import signal
import threading
from typing import Annotated

import typer

from whetstone.cli.options import ConfigOption, DataOption, console
from whetstone.config.settings import SettingsError, load
from whetstone.observability.log_setup import set_up
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import store_of
from whetstone.registry.remote.puller import running
from whetstone.registry.remote.sources import cache_folder


def puller(
    data: DataOption = None,
    config: ConfigOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0: all of this machine")] = "0.0.0.0",
) -> None:
    """Pull adapters from `adapters.store` into `<data>/pulled`, for the vLLM servers of this machine.

    Proxy and trainer say what a server is about to load; it is loaded once it is complete and verified here. It takes
    the settings `adapters.store`, `adapters.puller_port` and `data` alone, and no database. It asks for no key: keep
    its port as private as vLLM's. Stop it with Ctrl-C or SIGTERM.

    Example:

        whetstone puller --host 10.0.0.7
    """
    settings = load(config, data=data)
    store, port = store_of(settings.adapters), settings.adapters.puller_port
    if store is None or port is None:
        raise SettingsError(
            "a puller needs adapters.store, an address such as s3://bucket/prefix, and adapters.puller_port"
        )
    set_up(settings.log)
    folder = cache_folder(settings.data)
    folder.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with running(AdapterCache(folder, store), host, port):
            console.print(f"pulls adapters from {store.address} into {folder}; port {port}", soft_wrap=True)
            stopped.wait()
    except OSError as error:
        raise SettingsError(f"{host}:{port} cannot be listened at: {error.strerror or error}") from error
