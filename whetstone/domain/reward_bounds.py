"""Bounds of rewards, parts and part names, for feedback, reward functions and judges alike."""

import re

MAX_REWARD = 1e9
"""Largest absolute value of a reward or part; a larger number is treated as a mistake. Squares and sums must stay
finite in float32, and sums of larger numbers lose the differences between attempts."""
MAX_PARTS = 64
"""Most named numbers that one source may give at once."""
PART = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Pattern of a part's name."""
