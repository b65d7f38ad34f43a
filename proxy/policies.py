"""Which version speaks: the policies as the database last told. Knows names and versions; no server, no request."""

import re
from collections.abc import Iterable, Iterator

import msgspec

from proxy.errors import UnknownModel
from whetstone.ids import version_id

_NAMED_VERSION = re.compile(r"(?P<policy>.+)@v(?P<version>0|[1-9][0-9]{0,8})")
MAX_LISTED = 20
"""Names an error lists."""


class Policy(msgspec.Struct, frozen=True):
    """A policy as apps may ask for it."""

    name: str
    live_version: int
    served_versions: frozenset[int]
    """The versions vLLM keeps loaded, the live one among them."""
    created_at_s: int
    aliases: tuple[str, ...] = ()
    """Other names of its live version."""
    upstream: str | None = None
    """Another server that answers; None where vLLM does."""
    upstream_model: str | None = None
    """What that server calls it."""

    @property
    def names(self) -> list[str]:
        """Every name an app may ask for: its own, the others, then its served versions."""
        versions = [] if self.upstream else sorted(self.served_versions)
        return [self.name, *self.aliases, *(version_id(self.name, version) for version in versions)]


class Speaker(msgspec.Struct, frozen=True):
    """The version that answers a call."""

    policy: str
    version: int
    upstream: str | None = None
    upstream_model: str | None = None

    @property
    def served_name(self) -> str:
        """What the server that answers calls it."""
        return self.upstream_model or version_id(self.policy, self.version)


class Policies:
    """All policies of a project."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._policies = tuple(policies)
        self._by_name = {alias: policy for policy in self._policies for alias in policy.aliases}
        self._by_name |= {policy.name: policy for policy in self._policies}

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies)

    def __bool__(self) -> bool:
        return bool(self._policies)

    def resolve(self, model: str) -> Speaker:
        """Find the version that `model` means: a policy's live one, by its name or an alias, or `policy@vN`.

        Raises:
            UnknownModel: nobody has that name; the message lists those that exist.
        """
        if policy := self._by_name.get(model):
            return Speaker(policy.name, policy.live_version, policy.upstream, policy.upstream_model)
        if named := _NAMED_VERSION.fullmatch(model):
            policy = self._by_name.get(named["policy"])
            if policy and not policy.upstream and int(named["version"]) in policy.served_versions:
                return Speaker(policy.name, int(named["version"]))
        known = [name for policy in self._policies for name in policy.names]
        listed = ", ".join(known[:MAX_LISTED]) or "none yet"
        if len(known) > MAX_LISTED:
            listed += f" and {len(known) - MAX_LISTED} more (GET /v1/models)"
        raise UnknownModel(f"the model {model[:200]!r} does not exist; there are: {listed}", param="model")
