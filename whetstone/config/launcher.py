"""Settings of the launcher: what starts a training machine when a step is due, and what such a machine costs."""

from pydantic import Field

from whetstone.config.rewards import Section


class LauncherSettings(Section):
    """A command that takes the steps elsewhere, on a machine that exists only while there are some. While it runs, the
    launcher starts no second one."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, without a shell. It has `python -m trainer.job` run on the machine that trains, and ends
    when that ends: `["ray", "job", "submit", …]`, `["sky", "launch", "--down", …]`, a script of yours."""
    idle_s: float = Field(300, gt=0)
    """`python -m trainer.job` ends after so many seconds without a step."""
    usd_per_hour: float | None = Field(None, ge=0)
    """Price of the machine. With it, `admin_launches` says what each launch cost, its start included."""
