"""Which versions spoke in a trajectory, and since when. Pure; knows no server, and not which of them may speak on."""

import msgspec


class Pin(msgspec.Struct, frozen=True, gc=False):
    """A version that spoke in a trajectory."""

    policy: str
    version: int
    since_s: float
    """Its first turn there; seconds since the epoch."""


Pins = tuple[Pin, ...]
"""All that spoke in a trajectory, each once; what spoke last stands last."""


def and_then(pins: Pins, policy: str, version: int, at_s: float) -> Pins:
    """The pins when this version has spoken too. One that spoke before keeps its first turn."""
    if not pins:
        return (Pin(policy, version, at_s),)
    if (pins[-1].policy, pins[-1].version) == (policy, version):
        return pins
    known = next((pin for pin in pins if (pin.policy, pin.version) == (policy, version)), None)
    return (*(pin for pin in pins if pin is not known), known or Pin(policy, version, at_s))


def pin_of(pins: Pins, policy: str) -> Pin | None:
    """The version of this policy that spoke last; None where none of it did."""
    return next((pin for pin in reversed(pins) if pin.policy == policy), None) if pins else None
