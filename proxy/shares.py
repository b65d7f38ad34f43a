"""A share of all trajectories, without a list: always the same ones, whoever asks. Pure; knows not what it is for."""

import hashlib


def chosen(name: str, share: float) -> bool:
    """Whether what is called so is of the share."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number < share * 2**64
