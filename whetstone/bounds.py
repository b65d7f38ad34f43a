"""What a reward, a part and a part's name may be, whoever gives them: feedback, reward functions or a judge."""

import re

MAX_REWARD = 1e9
"""Largest size of a reward or part; a number beyond it is taken for a mistake. What is squared and summed on the way
must stay finite in float32, and sums of larger numbers lose what distinguishes attempts."""
MAX_PARTS = 64
"""Named numbers that one giver may give at once."""
PART = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a part may be called."""
