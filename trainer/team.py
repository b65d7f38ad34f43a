"""The training worker as several processes: `accelerate launch ... -m trainer.team worker ...` (`up` does it).

The first process is the Celery worker, with the arguments that Celery takes, or a job (`trainer.job`). The others
follow it, step by step. When one dies, accelerate ends them all, and what started that restarts it.
"""

import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from whetstone.config.settings import Settings, SettingsError, load
from whetstone.observability import log_setup
from whetstone.stack.supervisor import die_with_parent

if TYPE_CHECKING:
    from trainer.learner.processes.team import Team


def main() -> None:
    """Run this process until the first one is stopped; that one then stops the others."""
    # Launched processes have sessions of their own: a signal that kills the launcher would not reach them.
    die_with_parent(signal.SIGKILL)
    # Imported here because it takes seconds.
    from trainer.errors import PeersMissing
    from trainer.learner.processes.remote import follow
    from trainer.learner.processes.team import Team

    try:
        settings = load()
        team = Team(settings.trainer)
    except (SettingsError, PeersMissing) as error:
        raise SystemExit(str(error)) from error
    if not team.leads:
        log_setup.set_up(settings.log)
        # All processes get SIGTERM at once; the first one may finish what it is doing, so the others wait for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with log_setup.about(process=team.rank):
            follow(team, {})
    else:
        _lead(team, settings)
    team.leave()


def _lead(team: "Team", settings: Settings) -> None:
    from trainer import job
    from trainer.learner.processes.remote import Leader
    from trainer.worker import Worker

    if sys.argv[1:] == [job.ARGUMENT]:
        worker = Worker(settings)
        work = partial(job.run, settings, worker)
    else:
        from trainer import tasks

        worker = tasks.worker
        work = partial(tasks.app.worker_main, sys.argv[1:])
    leader = worker.learners.makes = Leader(team)
    try:
        work()
    finally:
        leader.dismiss()


if __name__ == "__main__":
    main()
