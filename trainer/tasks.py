"""The training worker under Celery, `celery -A trainer.tasks worker`: one task at a time."""

from celery.signals import celeryd_init

from trainer.worker import Worker
from whetstone.config.settings import load
from whetstone.messaging.celery_app import celery_app, sweep_every
from whetstone.messaging.task_names import STEP

settings = load()
app = celery_app("trainer", settings)
sweep_every(app, STEP, settings.sweep_s)
worker = Worker(settings)


@celeryd_init.connect
def _prepare(**_: object) -> None:
    worker.prepare()


@app.task(name=STEP)
def step() -> None:
    """Continue candidates that are in tests, remove old adapters, take every step that is due."""
    worker.sweep()
