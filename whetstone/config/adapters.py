"""Settings of the adapter store: where finished versions lie, and how vLLM's machines get them."""

from typing import Annotated

from pydantic import AfterValidator, Field

from whetstone.config.rewards import Section

SHARED = "file"
FILES = 3
"""Of a published adapter: weights, config and manifest."""
EXTRAS = {"s3": "s3", "gs": "gs", "az": "az", "file": None}
"""Schemes of a store's URL, and the extra of our package that reads each; None: nothing more is needed."""


def store_address(text: str) -> str:
    """Return the address of a store, without a slash at the end.

    Raises:
        ValueError: it is no address of a store.
    """
    if text == SHARED:
        return text
    scheme, separator, path = text.partition("://")
    if not separator or scheme not in EXTRAS or not path.strip("/"):
        raise ValueError(
            f"{text!r} is no adapter store: `file`, or s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
            "file:///folder"
        )
    if "@" in path or "?" in path:
        raise ValueError("the address of a store contains no key: the provider's own variables hold it")
    return text.rstrip("/")


class AdapterSettings(Section):
    """How finished versions reach vLLM."""

    store: Annotated[str, AfterValidator(store_address)] = SHARED
    """Where the trainer publishes finished versions. `file`: it does not, because vLLM's machines see `<data>/adapters`
    under the same path. An address (`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or
    `file:///folder` for a mounted folder): no machine needs to see another's files. Each database needs a prefix of its
    own, because what no version needs is removed there."""
    puller_port: int | None = Field(None, ge=1, le=65535)
    """With a store: the port of `whetstone puller` on each vLLM server's machine. Unset: proxy and trainer share a
    machine with vLLM, and pull into `<data>/pulled` themselves."""
    timeout_s: float = Field(30, gt=0)
    """With a store: longest time for one file, in seconds; after it the store counts as unreachable. An adapter has
    three files, which together must take less than `trainer.lease_s`."""

    @property
    def is_remote(self) -> bool:
        """Whether versions travel by a store."""
        return self.store != SHARED
