"""Know whether the day's money is spent, for requests that would cost some. A request reads memory only.

The sum is read from the database in the background. What was answered since the last reading, or is in flight, is not
in it: that may exceed the cap. While the database is away, the last sum stays.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Engine

from proxy.errors import SpendingCapReached
from whetstone.config.settings import Settings
from whetstone.registry.spending import Spending, day_of, next_day, read_spending

READ_EVERY_S = 2.0


class SpendingCap:
    """The cap of all projects, and what they have spent today."""

    def __init__(self, engine: Engine, settings: Settings, clock: Callable[[], datetime] | None = None) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._settings = settings
        self._prices = settings.upstream_prices
        self._clock = clock or (lambda: datetime.now(UTC))
        self.usd_per_day = settings.spending.usd_per_day
        """None: there is no cap."""
        self.last: Spending | None = None
        """The last reading; None before the first one."""

    @property
    def is_counted(self) -> bool:
        """Return whether anything is to be read: there is a cap, or another server has a price."""
        return self.usd_per_day is not None or bool(self._prices)

    async def refresh(self) -> None:
        """Read what was spent today.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        self.last = await asyncio.to_thread(self._read)

    def is_priced(self, project: str, policy: str) -> bool:
        """Return whether answers of this policy, which another server gives, cost money."""
        price = self._prices.get((project, policy))
        return price is not None and not price.is_free

    def refuses(self, project: str, policy: str) -> bool:
        """Return whether this policy, which another server answers, must not be called any more today."""
        last, cap = self.last, self.usd_per_day
        if cap is None or last is None or last.usd < cap or not self.is_priced(project, policy):
            return False
        return last.day == day_of(self._clock())

    def check(self, project: str, policy: str) -> None:
        """Let a call of this policy pass, which another server answers.

        Raises:
            SpendingCapReached: the day's money is spent.
        """
        if self.refuses(project, policy):
            now = self._clock()
            raise SpendingCapReached(
                f"the spending cap of ${self.usd_per_day:,.2f} a day is reached, and {policy!r} is answered by another "
                "server, which costs money. It answers again from midnight UTC, or once an operator raises "
                "spending.usd_per_day and starts the proxy again",
                int((next_day(now) - now).total_seconds()) + 1,
            )

    def _read(self) -> Spending:
        with self._engine.connect() as connection:
            return read_spending(connection, self._settings, self._clock())
