"""Keep the learner of each policy between its steps."""

from collections import Counter
from collections.abc import Callable

from trainer.domain.claims import Claim
from trainer.domain.timing import Device
from trainer.learner.engine import Engine, EngineFactory
from trainer.learner.learner import Learner
from trainer.learner.service.learner import Services
from whetstone.config.settings import Settings


class Learners:
    """The learner of each policy, in memory between steps; otherwise loaded from the adapter's folder."""

    def __init__(self, settings: Settings, makes: EngineFactory | None = None) -> None:
        """`makes`: what makes learners; unset: the training service of the settings, else this process."""
        service = settings.training_service
        self.makes: EngineFactory = makes or (Learner if service is None else Services(service))
        trainer = settings.trainer
        offload = settings.vllm.shares_device if trainer.offload is None else trainer.offload
        self._settings = settings.model_copy(update={"trainer": trainer.model_copy(update={"offload": offload})})
        self._warm: dict[str, tuple[int, Engine]] = {}
        self.device = Device() if trainer.policies_at_once > 1 else None
        """What the steps share that are taken at the same time; None: one after the other."""
        self.denied: Counter[str] = Counter()
        """How often in a row a policy did not get the accelerator, enough of its memory, or a training service."""
        self.unreadable: set[str] = set()
        """Versions that could not be read and have already been reported."""

    def renewed_by(self, renew: Callable[[], None]) -> None:
        """Have `renew` called where a training service is waited for, as for a whole update or in the gate."""
        if isinstance(self.makes, Services):
            self.makes.renew = renew

    def take(self, claim: Claim) -> Engine:
        """Return the learner at the claim's version_in. It belongs to the step until `keep` takes it back."""
        warm = self._warm.pop(claim.policy, None)
        if warm is not None and warm[0] == claim.version_in:
            return warm[1]
        del warm  # the next learner needs its memory
        settings = self._settings
        if claim.adapter_in is None:
            return self.makes.fresh(settings.model, settings.trainer, settings.seed)
        return self.makes.resume(settings.model, claim.adapter_in, settings.trainer)

    def keep(self, claim: Claim, learner: Engine) -> None:
        """Store a learner that made the now live version."""
        self._warm[claim.policy] = (claim.version_out, learner)

    def put_back(self, claim: Claim, learner: Engine) -> None:
        """Store a learner whose weights have not moved."""
        self._warm[claim.policy] = (claim.version_in, learner)
