"""Which version speaks: the policies as the database last told, and the choice for a call of a trajectory.

Knows names, versions and what spoke before; no server, no request.
"""

import re
from collections.abc import Iterable, Iterator, Set

import msgspec

from proxy.errors import UnknownModel
from proxy.pins import Pin
from proxy.shares import chosen
from whetstone.ids import version_id

_NAMED_VERSION = re.compile(r"(?P<policy>.+)@v(?P<version>0|[1-9][0-9]{0,8})")
MAX_LISTED = 20
"""Names an error lists."""


class Canary(msgspec.Struct, frozen=True):
    """A candidate that is tried out on apps."""

    version: int
    share: float
    """Of new trajectories, from 0 to 1: those that it answers."""


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
    pinnable_versions: frozenset[int] = frozenset()
    """Of the served versions those that a trajectory may stay on: live, or retired."""
    canary: Canary | None = None

    @property
    def names(self) -> list[str]:
        """Every name an app may ask for: its own, the others, then its served versions."""
        versions = [] if self.upstream else sorted(self.served_versions)
        return [self.name, *self.aliases, *(version_id(self.name, version) for version in versions)]

    def without(self, versions: Set[int]) -> "Policy":
        """The policy where nobody stays on these versions, or is given to them, unless they are asked for by name."""
        if not versions:
            return self
        canary = self.canary if self.canary is not None and self.canary.version not in versions else None
        return msgspec.structs.replace(self, pinnable_versions=self.pinnable_versions - versions, canary=canary)

    def version_for(self, trajectory_id: str, pin: Pin | None, now_s: float, pin_lifetime_s: float) -> int:
        """The version that answers a call of this trajectory. `pin`: the one of this policy that it goes on from.

        A trajectory without a pin gets the live version, or is of the canary's share. One with a pin stays: on the
        candidate as long as the canary lasts, on any other version until its lifetime is over or it is rejected,
        rolled back or no longer served. Then the live version answers.
        """
        if self.canary is not None and self._of_canary(self.canary, trajectory_id, pin):
            return self.canary.version
        if pin is None or pin.version not in self.pinnable_versions:
            return self.live_version
        return pin.version if now_s - pin.since_s < pin_lifetime_s else self.live_version

    def _of_canary(self, canary: Canary, trajectory_id: str, pin: Pin | None) -> bool:
        if pin is not None:
            return pin.version == canary.version
        # With the candidate's name: an id that an app uses again and again is not of every canary.
        return chosen(f"{trajectory_id} {version_id(self.name, canary.version)}", canary.share)


class Speaker(msgspec.Struct, frozen=True):
    """The version that answers a call."""

    policy: str
    version: int
    upstream: str | None = None
    upstream_model: str | None = None
    served_name: str = ""
    """What the server that answers calls it."""

    def __post_init__(self) -> None:
        name = self.upstream_model or version_id(self.policy, self.version)
        msgspec.structs.force_setattr(self, "served_name", name)


class Policies:
    """All policies of a project."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._policies = tuple(policies)
        self._by_name = {alias: policy for policy in self._policies for alias in policy.aliases}
        self._by_name |= {policy.name: policy for policy in self._policies}
        self._live = {
            name: Speaker(policy.name, policy.live_version, policy.upstream, policy.upstream_model)
            for name, policy in self._by_name.items()
        }
        self._settled = {
            name: self._live[name]
            for name, policy in self._by_name.items()
            if policy.canary is None or policy.upstream is not None
        }

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies)

    def __bool__(self) -> bool:
        return bool(self._policies)

    def settled(self, model: str, pin: Pin | None) -> Speaker | None:
        """Find the version that `choose` would, where neither trajectory nor time has a say in it; None: they may.

        `pin`: as for `choose`.
        """
        speaker = self._settled.get(model)
        return speaker if speaker is None or pin is None or pin.version == speaker.version else None

    def choose(self, model: str, trajectory_id: str, pin: Pin | None, now_s: float, pin_lifetime_s: float) -> Speaker:
        """Find the version that answers `model` in this trajectory; a version that is asked for by name always does.

        `pin`: the version of that policy which the call goes on from; a lifetime of 0 holds none.

        Raises:
            UnknownModel: as `resolve`.
        """
        policy = self._by_name.get(model)
        if policy is None or policy.upstream is not None:
            return self.resolve(model)
        version = policy.version_for(trajectory_id, pin, now_s, pin_lifetime_s)
        return self._live[model] if version == policy.live_version else Speaker(policy.name, version)

    def resolve(self, model: str) -> Speaker:
        """Find the version that `model` means: a policy's live one, by its name or an alias, or `policy@vN`.

        Raises:
            UnknownModel: nobody has that name; the message lists those that exist.
        """
        if speaker := self._live.get(model):
            return speaker
        if named := _NAMED_VERSION.fullmatch(model):
            policy = self._by_name.get(named["policy"])
            if policy and not policy.upstream and int(named["version"]) in policy.served_versions:
                return Speaker(policy.name, int(named["version"]))
        known = [name for policy in self._policies for name in policy.names]
        listed = ", ".join(known[:MAX_LISTED]) or "none yet"
        if len(known) > MAX_LISTED:
            listed += f" and {len(known) - MAX_LISTED} more (GET /v1/models)"
        raise UnknownModel(f"the model {model[:200]!r} does not exist; there are: {listed}", param="model")


def live_names(policies: Iterable[Policy]) -> list[str]:
    """What vLLM is to answer under: the live version of each policy that is its."""
    return [version_id(one.name, one.live_version) for one in policies if one.upstream is None]
