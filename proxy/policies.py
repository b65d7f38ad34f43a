"""Which version speaks: the policies as the database last told. Knows names and versions; no vLLM, no request."""

import re
from collections.abc import Mapping

import msgspec

from proxy.errors import UnknownModel
from whetstone.ids import version_id

_NAMED_VERSION = re.compile(r"(?P<policy>.+)@v(?P<version>0|[1-9][0-9]{0,8})")


class Policy(msgspec.Struct, frozen=True):
    """A policy as apps may ask for it."""

    name: str
    live_version: int
    served_versions: frozenset[int]
    """The versions vLLM keeps loaded, the live one among them."""
    created_at_s: int


class Speaker(msgspec.Struct, frozen=True):
    """The version that answers a call."""

    policy: str
    version: int

    @property
    def served_name(self) -> str:
        """What vLLM calls it."""
        return version_id(self.policy, self.version)


def names_of(policy: Policy) -> list[str]:
    """Every name an app may ask for: the policy's own, then its served versions."""
    return [policy.name, *(version_id(policy.name, version) for version in sorted(policy.served_versions))]


def resolve(policies: Mapping[str, Policy], model: str) -> Speaker:
    """Find the version that `model` means: a policy's live one, or `policy@vN`.

    Raises:
        UnknownModel: nobody has that name; the message lists those that exist.
    """
    if policy := policies.get(model):
        return Speaker(policy.name, policy.live_version)
    if named := _NAMED_VERSION.fullmatch(model):
        policy = policies.get(named["policy"])
        if policy and int(named["version"]) in policy.served_versions:
            return Speaker(policy.name, int(named["version"]))
    known = [name for policy in policies.values() for name in names_of(policy)]
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more (GET /v1/models)" if len(known) > 20 else "")
    raise UnknownModel(f"the model {model[:200]!r} does not exist; there are: {listed or 'none yet'}", param="model")
