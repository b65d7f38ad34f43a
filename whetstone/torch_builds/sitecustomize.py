"""Hide packages of another build than torch from this process; it is imported by Python's start, and never by us."""

import sys

# An import of them fails as if they were not installed.
sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))  # type: ignore[arg-type]
