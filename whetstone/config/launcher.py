"""Settings of the launcher: what starts a training machine when a step is due, and what such a machine costs."""

from pydantic import Field

from whetstone.config.rewards import Section

LAUNCHER_STOPS_S = 40.0
"""How long the launcher may take to end; it gives what it started half of that."""


class LauncherSettings(Section):
    """A command that has steps taken elsewhere, on a machine that exists only while there are some. While it runs, the
    launcher starts no second one."""

    command: tuple[str, ...] = ()
    """Program and arguments, without a shell. It has `python -m trainer.job` run on the machine that trains, and ends
    when that ends: `["ray", "job", "submit", …]`, `["sky", "launch", "--down", …]`, a script of yours. Empty: no
    launcher, but a training worker that always runs."""
    idle_s: float = Field(300, gt=0)
    """`python -m trainer.job` ends after it has waited for so many seconds without a step; it reads this on its own
    machine."""
    longest_s: float = Field(86_400, gt=0)
    """A command that runs longer is ended, so that one that hangs does not keep later launches waiting."""
    usd_per_hour: float | None = Field(None, ge=0)
    """Price of the machine. With it, `admin_launches` says what each launch cost, its start included."""
