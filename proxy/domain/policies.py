"""Choose the version that answers a call, from the policies as last read from the database. Pure.

A pin records that a version has answered in a trajectory, and since when, so that the trajectory may stay on it.
"""

import re
from collections.abc import Iterable, Iterator, Set

import msgspec

from proxy.errors import UnknownModel
from whetstone.domain.ids import version_id
from whetstone.domain.sampling_share import in_share

_NAMED_VERSION = re.compile(r"(?P<policy>.+)@v(?P<version>0|[1-9][0-9]{0,8})")
MAX_LISTED = 20
"""Most names in an error message."""


def is_fixed_version(model: str) -> bool:
    """Return whether an app that requests this name wants one version, whichever is live."""
    return _NAMED_VERSION.fullmatch(model) is not None


class Pin(msgspec.Struct, frozen=True, gc=False):
    """A version that has answered in a trajectory."""

    policy: str
    version: int
    since_s: float
    """Its first turn there; seconds since the epoch."""


Pins = tuple[Pin, ...]
"""All versions that have answered in a trajectory, each once; the last one to answer stands last."""


def and_then(pins: Pins, policy: str, version: int, at_s: float) -> Pins:
    """Return the pins after this version has answered too. A version that answered before keeps the time of its first
    turn."""
    if not pins:
        return (Pin(policy, version, at_s),)
    if (pins[-1].policy, pins[-1].version) == (policy, version):
        return pins
    known = next((pin for pin in pins if (pin.policy, pin.version) == (policy, version)), None)
    return (*(pin for pin in pins if pin is not known), known or Pin(policy, version, at_s))


def pin_of(pins: Pins, policy: str) -> Pin | None:
    """Return the version of this policy that answered last, or None if none did."""
    return next((pin for pin in reversed(pins) if pin.policy == policy), None) if pins else None


class Canary(msgspec.Struct, frozen=True):
    """A candidate version that is tried out on real traffic."""

    version: int
    share: float
    """Share of new trajectories that it answers, from 0 to 1."""


class Handover(msgspec.Struct, frozen=True):
    """A policy that takes over from another server's model, the teacher."""

    policy: str
    teacher: str
    """The policy that the other server answers."""
    share: float
    """Share of new trajectories that the policy answers itself, from 0 to 1."""

    def teacher_answers(self, trajectory_id: str, group_id: str | None, pins: Pins) -> bool:
        """Return whether the teacher answers a call of this trajectory.

        `pins`: the versions that have answered in it. A trajectory stays with whom it began with. All attempts of a
        group that the app names go to the same one, so that the policy's groups are whole.
        """
        for pin in reversed(pins):
            if pin.policy in (self.policy, self.teacher):
                return pin.policy == self.teacher
        # The policy's name makes it another share than a canary's.
        return not in_share(f"{group_id or trajectory_id} {self.policy} handover", self.share)


class Policy(msgspec.Struct, frozen=True):
    """A policy as apps may request it."""

    name: str
    live_version: int
    served_versions: frozenset[int]
    """The versions that vLLM has loaded, including the live one."""
    created_at_s: int
    aliases: tuple[str, ...] = ()
    """Other names of its live version."""
    upstream: str | None = None
    """Another server that answers; None if vLLM does."""
    upstream_model: str | None = None
    """The policy's name at that server."""
    pinnable_versions: frozenset[int] = frozenset()
    """The served versions that a trajectory may stay on: live, or retired."""
    canary: Canary | None = None
    handover: Handover | None = None

    @property
    def names(self) -> list[str]:
        """Every name that an app may request: its own, its aliases, then its served versions."""
        versions = () if self.upstream else sorted(self.served_versions)
        return [self.name, *self.aliases, *(version_id(self.name, version) for version in versions)]

    def without(self, versions: Set[int]) -> "Policy":
        """Return the policy with these versions neither pinnable nor canary. They still answer if requested by name."""
        canary = self.canary if self.canary is not None and self.canary.version not in versions else None
        return msgspec.structs.replace(self, pinnable_versions=self.pinnable_versions - versions, canary=canary)

    def version_for(self, trajectory_id: str, pin: Pin | None, now_s: float, pin_lifetime_s: float) -> int:
        """Return the version that answers a call of this trajectory. `pin`: the version of this policy that it
        continues.

        A trajectory without a pin gets the live version, or the canary if it falls into its share. A trajectory with a
        pin stays: on the candidate as long as the canary lasts, on any other version until the pin's lifetime is over
        or the version is rejected, rolled back or no longer served. Then the live version answers.
        """
        canary = self.canary
        if pin is None:
            # Hash with the candidate's name: an id that an app uses repeatedly must not fall into every canary.
            if canary and in_share(f"{trajectory_id} {version_id(self.name, canary.version)}", canary.share):
                return canary.version
            return self.live_version
        if canary is not None and pin.version == canary.version:
            return canary.version
        stays = pin.version in self.pinnable_versions and now_s - pin.since_s < pin_lifetime_s
        return pin.version if stays else self.live_version


class ServedVersion(msgspec.Struct, frozen=True):
    """The version that answers a call."""

    policy: str
    version: int
    upstream: str | None = None
    upstream_model: str | None = None
    served_name: str = ""
    """Its name at the server that answers."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "served_name", self.upstream_model or version_id(self.policy, self.version))


class Policies:
    """All policies of a project."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._policies = tuple(policies)
        self._by_name = {alias: policy for policy in self._policies for alias in policy.aliases}
        self._by_name |= {policy.name: policy for policy in self._policies}
        self._live = {
            name: ServedVersion(policy.name, policy.live_version, policy.upstream, policy.upstream_model)
            for name, policy in self._by_name.items()
        }
        self._handovers = {
            name: policy.handover
            for name, policy in self._by_name.items()
            if policy.handover is not None and policy.handover.teacher in self._live
        }
        self._fixed = {
            name: self._live[name]
            for name, policy in self._by_name.items()
            if policy.canary is None or policy.upstream is not None
        }

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies)

    def __bool__(self) -> bool:
        return bool(self._policies)

    def handover(self, model: str) -> Handover | None:
        """Return the handover of the policy that `model` means; None without one, or if it means one version."""
        return self._handovers.get(model)

    def resolve_fixed(self, model: str, pin: Pin | None) -> ServedVersion | None:
        """Return the version that `choose` would, if that depends on neither trajectory nor time. None if it may depend
        on them.

        `pin`: as for `choose`.
        """
        served = self._fixed.get(model)
        return served if served is None or pin is None or pin.version == served.version else None

    def choose_version(
        self, model: str, trajectory_id: str, pin: Pin | None, now_s: float, pin_lifetime_s: float
    ) -> ServedVersion:
        """Return the version that answers `model` in this trajectory. A version requested by name is always chosen.

        `pin` is the version of that policy that the call continues; with a lifetime of 0 pins have no effect.

        Raises:
            UnknownModel: as `resolve`.
        """
        policy = self._by_name.get(model)
        if policy is None or policy.upstream is not None:
            return self.resolve(model)
        version = policy.version_for(trajectory_id, pin, now_s, pin_lifetime_s)
        return self._live[model] if version == policy.live_version else ServedVersion(policy.name, version)

    def resolve(self, model: str) -> ServedVersion:
        """Return the version that `model` means: a policy's live one, by its name or an alias, or `policy@vN`.

        Raises:
            UnknownModel: no policy or version has that name; the message lists those that exist.
        """
        if served := self._live.get(model):
            return served
        remedy = ""
        if named := _NAMED_VERSION.fullmatch(model):
            policy, version = self._by_name.get(named["policy"]), int(named["version"])
            if policy and not policy.upstream:
                if version in policy.served_versions:
                    return ServedVersion(policy.name, version)
                loads = f"`whetstone versions pin {policy.name} {version}` loads what is on the disk"
                remedy = f" or is not loaded: {loads}"
        known = [name for policy in self._policies for name in policy.names]
        listed = ", ".join(known[:MAX_LISTED]) or "none yet"
        if len(known) > MAX_LISTED:
            listed += f" and {len(known) - MAX_LISTED} more (GET /v1/models)"
        raise UnknownModel(f"the model {model[:200]!r} does not exist{remedy}; there are: {listed}", param="model")


def live_names(policies: Iterable[Policy]) -> list[str]:
    """Return the names that vLLM must answer under: the live version of each policy that vLLM serves."""
    return [version_id(one.name, one.live_version) for one in policies if one.upstream is None]
