"""The training worker as several processes: `accelerate launch ... -m trainer.team worker ...` (`up` does it).

The first process is the Celery worker, with the arguments that Celery takes; the others follow it, step by step. When
one dies, its launcher ends them all, and the launcher's supervisor restarts it.
"""

import signal
import sys
from typing import TYPE_CHECKING

from whetstone.config.settings import SettingsError, load
from whetstone.observability import log_setup
from whetstone.stack.supervisor import die_with_parent

if TYPE_CHECKING:
    from trainer.learner.processes.team import Team


def main() -> None:
    """Run this process until Celery is stopped; Celery's process then stops the others."""
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
        _lead(team)
    team.leave()


def _lead(team: "Team") -> None:
    from trainer import tasks
    from trainer.learner.processes.remote import Leader

    leader = tasks.learners.makes = Leader(team)
    try:
        tasks.app.worker_main(sys.argv[1:])
    finally:
        leader.dismiss()


if __name__ == "__main__":
    main()
