"""Pick a stable share of trajectories or groups without a list: the same name is always picked. Pure."""

import hashlib


def in_share(name: str, share: float) -> bool:
    """Return whether this name belongs to the share."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") < share * 2**64
