"""The training worker, `celery -A trainer.tasks worker`: one task at a time. Knows Celery; the step is `step`'s."""

import logging
from functools import cache

from celery.signals import celeryd_init
from sqlalchemy.exc import DBAPIError

from migrations.database import connect
from trainer import adapter, sinks
from trainer.errors import LeaseLost, PeersMissing, SinkMissing, TrainerError
from trainer.learner import team
from trainer.step import Learners, reconcile, take_step
from trainer.store import Store
from whetstone.adapters import AdapterDamaged
from whetstone.broker import celery_app, sweep_every
from whetstone.settings import load
from whetstone.tasks import STEP
from whetstone.vllm import Vllm, VllmError

log = logging.getLogger(__name__)
# A line for every look at vLLM says nothing.
logging.getLogger("httpx").setLevel(logging.WARNING)
settings = load()
app = celery_app("trainer", settings)
sweep_every(app, STEP, settings.sweep_s)
learners = Learners(settings)


@cache
def _store() -> Store:
    return Store(connect(settings.database_url), settings.project)


@cache
def _vllm() -> Vllm:
    return Vllm(str(settings.vllm.url))


@cache
def _sinks() -> sinks.Sinks:
    return sinks.Sinks(settings.trainer.sinks, settings.data.resolve())


@celeryd_init.connect
def _prepare(**_: object) -> None:
    try:
        team.require(settings.trainer)
        sinks.require(settings.trainer.sinks)
    except (PeersMissing, SinkMissing) as error:
        # Celery would log an exception of a signal's receiver and go on.
        raise SystemExit(str(error)) from error
    adapter.sweep(settings.data.resolve() / "adapters")


@app.task(name=STEP)
def step() -> None:
    """Bring vLLM to what the database says, then take every step that is due."""
    try:
        reconcile(_store(), _vllm())
        for policy in sorted(_store().policies()):
            before = _store().ended(policy)
            went_on = True
            while went_on:
                went_on = take_step(policy, _store(), learners, _vllm(), settings)
                # A claim ends steps too: those that nothing was there for, and those given up.
                ended = _store().ended(policy)
                if ended is not None and ended != before:
                    _sinks().tell(ended)
                    before = ended
                if went_on:
                    reconcile(_store(), _vllm())
    except (VllmError, LeaseLost) as error:
        log.warning("%s", error)
    except DBAPIError as error:
        # A step in the middle is taken over when its lease ends.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
    except (TrainerError, AdapterDamaged):
        log.exception("the step could not be taken")
