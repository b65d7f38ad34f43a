"""The training worker as several processes: `accelerate launch ... -m trainer.team worker ...` (`up` does it).

The first one is the Celery worker, with the arguments that Celery takes; the others follow it, step by step. Where one
dies, its launcher ends them all, and whoever watches the launcher starts it again.
"""

import signal
import sys
from typing import TYPE_CHECKING

from whetstone import logs
from whetstone.settings import SettingsError, load
from whetstone.supervisor import die_with_parent

if TYPE_CHECKING:
    from trainer.learner.team import Team


def main() -> None:
    """Run this process until Celery is told to stop; the others are stopped by it."""
    # Launched processes have sessions of their own: whoever kills the launcher would not reach them.
    die_with_parent(signal.SIGKILL)
    # Only now: this takes seconds.
    from trainer.errors import PeersMissing
    from trainer.learner.leading import follow
    from trainer.learner.team import Team

    try:
        settings = load()
        team = Team(settings.trainer)
    except (SettingsError, PeersMissing) as error:
        raise SystemExit(str(error)) from error
    if not team.leads:
        logs.set_up(settings.log)
        # All processes are told to stop at once; what the first one is in the middle of, it may finish.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with logs.about(process=team.rank):
            follow(team, {})
    else:
        _lead(team)
    team.leave()


def _lead(team: "Team") -> None:
    from trainer import tasks
    from trainer.learner.leading import Leader

    leader = tasks.learners.makes = Leader(team)
    try:
        tasks.app.worker_main(sys.argv[1:])
    finally:
        leader.dismiss()


if __name__ == "__main__":
    main()
