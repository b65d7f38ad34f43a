"""Before a proxy listens, store the environment's key, and require a key when listening off loopback."""

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime

from sqlalchemy import Engine

from whetstone.config.settings import BOOTSTRAP_VARIABLE, Settings, SettingsError
from whetstone.domain.api_keys import LEAST_BOOTSTRAP, hash_of
from whetstone.registry import api_key_store

log = logging.getLogger(__name__)


def ensure(engine: Engine, settings: Settings, environment: Mapping[str, str] | None = None) -> None:
    """Store the environment's key, and check that the proxy may listen on the configured address.

    Raises:
        SettingsError: that key is too short; or other machines could reach the proxy, and there is no key.
    """
    environment, now = os.environ if environment is None else environment, datetime.now(UTC)
    first = environment.get(BOOTSTRAP_VARIABLE, "").strip()
    if 0 < len(first) < LEAST_BOOTSTRAP:
        raise SettingsError(
            f"{BOOTSTRAP_VARIABLE} has {len(first)} characters; it needs {LEAST_BOOTSTRAP} at least, of chance: "
            "`openssl rand -hex 32`"
        )
    projects = [one.project for one in settings.of_projects()]
    with engine.begin() as connection:
        if first and api_key_store.bootstrap(connection, settings.home, hash_of(first.encode()), now):
            log.info("the hash of the key of %s is stored", BOOTSTRAP_VARIABLE)
        keys = api_key_store.living(connection, projects, now)
    if settings.proxy.on_loopback:
        return
    where = f"proxy.host is {settings.proxy.host}, which is not loopback"
    if not keys:
        raise SettingsError(
            f"{where}: anyone who reaches it could send requests. Create a key first, "
            f"`whetstone keys create --project {settings.home} --name admin --scope admin`, or bring one in "
            f"{BOOTSTRAP_VARIABLE}; or listen on 127.0.0.1"
        )
    log.warning(
        "%s, and the proxy uses plain HTTP: keys and conversations can be read on the way. Put TLS in front of it "
        "(docs/keys.md)",
        where,
    )
