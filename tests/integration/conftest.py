"""Whole programs before real servers: a proxy as it runs, vLLM's CPU build, PostgreSQL."""

from tests.unit.proxy.conftest import (  # noqa: F401
    direct,
    door,
    fake_vllm,
    plain_proxy,
    proxy,
    real,
    real_proxy,
    settings,
    sqlite_url,
    start,
)
