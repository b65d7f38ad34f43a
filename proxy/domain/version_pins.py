"""Record which versions have answered in a trajectory, and since when. Pure.

Whether such a version may still answer is decided in `policies`.
"""

import msgspec


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
