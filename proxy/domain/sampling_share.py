"""Pick a stable share of all trajectories without a list: the same name is always picked. Pure."""

import hashlib


def chosen(name: str, share: float) -> bool:
    """Return whether this name belongs to the share."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64
