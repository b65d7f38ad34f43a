"""Decide whether vLLM serves the adapter that was trained. Pure.

Server and trainer compute the same logprobs by sums in another order. In 16 bits a token is off by hundredths of a nat,
and a rare one by half a nat. The parent's tokens have that noise too, so the parent's own k3 says how much is allowed.

k3 alone is blind to an adapter of the wrong scale, of the wrong layers or of too small a rank, as long as it changes
little. What such a server lacks goes with what the adapter does; noise does not. So that is measured as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.domain.figures import mean_k3

NOISE = 4.0
"""A candidate's k3 may be this many times its parent's."""
SMALLEST_K3, LARGEST_K3 = 1e-3, 0.1
"""Nats a token. Below the first no difference matters; above the second the servers compute another model."""
SHARE_OFF = 0.32
"""By how much the served share of an adapter may be off 1 ... In 16 bits a layer's output is rounded before the
adapter's small change is added and rounded again, which loses part of the change, and in two programs not the same:
0.71 to 0.91 for SmolLM2's first versions, served rightly (docs/log/learning.md). Half the scale or half the rank read
as at most 0.66 (tests/unit/trainer/domain/gate/test_parity.py)."""
ERRORS = 4.0
"""... and by how many of its standard errors: with fewer, it cannot be told from noise."""
LARGE_EFFECT = 50.0
"""An adapter whose effect, squared, is this many times the noise's k3 needs no second reading: noise that trained and
served share of an adapter have in common then draws the share down by 2 % at most.
"""

_REMEDIES = {
    "nf4": ". trainer.quantisation is nf4, which vLLM does not serve, and small models suffer: set it to int8 or none",
    "int8": ". trainer.quantisation is int8, which vLLM does not serve: set it to none",
}

Logprobs = Sequence[float]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far server and trainer agree about a candidate."""

    k3: float
    """Of server to trainer, mean over the candidate's tokens, in nats."""
    parent_k3: float
    """The same for the parent and its tokens: the noise of the two programs."""
    share: float
    """How much of what the adapter does to the logprobs vLLM serves: 1 where it serves what was trained."""
    error: float
    """Standard error of `share`; infinite where the adapter does nothing."""

    def why_not(self, max_k3: float | None, quantisation: str = "none") -> str | None:
        """Return why vLLM does not serve what was trained; None where it does.

        `max_k3` is the setting of the gate. Where it is set, it alone decides. `quantisation` is that of the trainer.
        """
        bound = min(max(NOISE * self.parent_k3, SMALLEST_K3), LARGEST_K3) if max_k3 is None else max_k3
        if not self.k3 <= bound:
            return (
                f"vLLM and trainer disagree: k3 {self.k3:.3g} nats a token, allowed are {bound:.3g} "
                f"(its parent's is {self.parent_k3:.3g}){_REMEDIES.get(quantisation, '')}"
            )
        if max_k3 is None and abs(self.share - 1) > max(SHARE_OFF, ERRORS * self.error):
            return (
                f"vLLM serves another adapter than was trained: of what that one does to the logprobs it serves "
                f"{self.share:.0%} ± {self.error:.0%}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Readings:
    """Logprobs in nats of the tokens that vLLM sampled under the candidate."""

    served: Logprobs
    """vLLM's."""
    trained: Logprobs
    """The trainer's, with the candidate; so are the next two, with other weights."""
    base: Logprobs
    """With the base model."""
    doubled: Logprobs | None = None
    """With twice the candidate's LoRA; not needed where the effect is large."""
    contexts: Sequence[int] | None = None
    """For each token, a number of what stands before it; None: no two tokens have the same before them."""

    def is_effect_large(self, parent_k3: float) -> bool:
        """Return whether what the adapter does is far above the noise of server and trainer."""
        effect_T = np.asarray(self.trained, dtype=np.float64) - np.asarray(self.base, dtype=np.float64)
        return bool(np.mean(effect_T**2) > LARGE_EFFECT * parent_k3)


def parity(own: Readings, parent_k3: float) -> Parity:
    """Compare server and trainer on the candidate's tokens, with its parent's k3 beside."""
    share, error = served_share(own)
    return Parity(mean_k3(own.served, own.trained), parent_k3, share, error)


def parity_without_share(own: Readings, parent_k3: float) -> Parity:
    """Compare them where nothing can be read a second time, and what the adapter does is not far above the noise.

    Its share is NaN, which rejects nothing.
    """
    return Parity(mean_k3(own.served, own.trained), parent_k3, share=math.nan, error=math.nan)


def served_share(own: Readings) -> tuple[float, float]:
    """Return how much of what the adapter does the server serves, and the standard error of that.

    With d = served - trained and the direction z = doubled - base, less its mean:

        share = 1 + Σ d·z / Σ x·z with x = trained - base,   error² = K/(K-1) Σ_k (Σ_k u·z)² / (Σ x·z)²

    with the residual u = d - (share - 1)·x and sums over the tokens of each of K contexts. z is read twice by the
    trainer, and has no noise in common with d: an estimate by instruments, which unlike plain regression is not drawn
    to one side by noise (Durbin, Review of the International Statistical Institute 22 (1954), 23). Where the effect is
    far above the noise, z = trained - base does as well. The error holds for tokens of unequal noise (White,
    Econometrica 48 (1980), 817), and for noise that tokens with the same before them have in common, as equal short
    answers do (Liang and Zeger, Biometrika 73 (1986), 13). With few contexts it is larger, so that ERRORS of it are as
    rare as with many: Student's t at ERRORS by its first term (Abramowitz and Stegun, 26.7.5).
    """
    served_T, trained_T, base_T = (np.asarray(each, dtype=np.float64) for each in (own.served, own.trained, own.base))
    far_T = trained_T if own.doubled is None else np.asarray(own.doubled, dtype=np.float64)
    off_T, direction_T = served_T - trained_T, far_T - base_T
    direction_T = direction_T - direction_T.mean()
    change_T = trained_T - base_T
    effect = abs(float(change_T @ direction_T))
    if not effect > 0:
        return 1.0, float("inf")
    off = float(off_T @ direction_T) / effect
    left_T = (off_T - off * change_T) * direction_T
    left_K = left_T if own.contexts is None else np.bincount(own.contexts, left_T)
    if len(left_K) == 1:
        return 1 + off, float("inf")
    freedom = len(left_K) - 1
    error = float(np.linalg.norm(left_K)) * math.sqrt((freedom + 1) / freedom) / effect
    return 1 + off, error * (1 + (ERRORS**2 + 1) / (4 * freedom))
