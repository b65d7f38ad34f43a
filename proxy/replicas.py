"""The vLLM servers as one: which of them answers a request, and requests that wait until one can.

Knows who is well, what each has loaded and how much each is doing here; asks nobody how it is (`reconcile` does).
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Protocol, TypeVar

from proxy.client_response import Response
from proxy.errors import AdapterLoading, NotReached, TooManyWaiting, Training, UpstreamDown
from proxy.upstream import Request, Ts, Upstream, engine_died, lacks_model, why

LOAD_FACTOR = 1.25
"""Most requests of one server, over its even share."""
MOST_MISLED = 3
"""How often a request is tried beyond once for each server, where its model turns out not to be, or nobody: a server
may tell otherwise than it answers."""
MISLEADING = (404, 500)
"""Answers that may mean that a server has not the model, or is no more."""
MAX_ERROR_BYTES = 2**20
"""Of such an answer."""


class Loaded(Protocol):
    """A server among others."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    @property
    def in_flight(self) -> int:
        """How many requests it is answering."""
        ...


L = TypeVar("L", bound=Loaded)


def choose(trajectory_id: str, among: Sequence[L]) -> L | None:
    """The server that answers a trajectory's next request; None of none.

    Always the same one, whoever asks and whatever others come and go (rendezvous hashing), so that it has the prefix
    cached, unless that one has ceil(1.25 · (m + 1) / n) of all m requests on n servers already: then the
    trajectory's next choice (bounded loads, arXiv 1608.01350).
    """
    if len(among) < 2:
        return among[0] if among else None
    bound = math.ceil(LOAD_FACTOR * (sum(one.in_flight for one in among) + 1) / len(among))
    # Not all can be at the bound: together they would have more than there are.
    return max((one for one in among if one.in_flight < bound), key=lambda one: _weight(trajectory_id, one.url))


def _weight(trajectory_id: str, url: str) -> bytes:
    return blake2b(f"{url} {trajectory_id}".encode(), digest_size=8).digest()


class Replica:
    """One vLLM server, as this process knows it."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self.url = url
        self.upstream = upstream
        self.healthy = False
        self.asleep = False
        self.why_away: str | None = "nobody has looked yet"
        self.names: frozenset[str] = frozenset()
        """What it serves: the base model's names and the loaded adapters', as it last told."""
        self.missing: dict[str, str] = {}
        """What it is to serve and does not, and why."""
        self.refused: frozenset[str] = frozenset()
        """Of that, what it was given and did not take."""
        self.max_model_len: int | None = None
        """Tokens that prompt and answer may have together; None until it has told."""
        self.in_flight = 0
        """Calls that it is answering for this process, control calls that take the accelerator among them."""
        self.using: dict[str, int] = {}
        """Requests in flight, by name; some names have none."""
        self.look_now = asyncio.Event()
        """Somebody needs to know at once how it is."""
        self.bring_now = asyncio.Event()
        """It has changed: perhaps something is to be loaded."""

    @property
    def state(self) -> str:
        """serving | behind | away | asleep."""
        if not self.healthy:
            return "away"
        if self.asleep:
            return "asleep"
        return "behind" if self.missing else "serving"

    @property
    def reason(self) -> str | None:
        """Why it does not serve."""
        if self.state == "away":
            return self.why_away
        return "; ".join(f"{name}: {why}" for name, why in sorted(self.missing.items())) or None

    def has(self, name: str) -> bool:
        """Whether it can answer under this name."""
        return self.healthy and not self.asleep and name in self.names

    def take(self, name: str) -> None:
        """Count a request under this name, which goes to it."""
        self.in_flight += 1
        try:
            self.using[name] += 1
        except KeyError:
            # No more names than it has, and those still in use.
            self.using = {one: count for one, count in self.using.items() if count or one in self.names} | {name: 1}

    def is_through(self, name: str, broken: bool = False) -> None:
        """A request under this name is over; `broken`: the server did not answer it, or not to the end."""
        self.in_flight -= 1
        self.using[name] -= 1
        if broken:
            self.look_now.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count what uses the accelerator, for whoever waits until nothing does."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Replicas:
    """All of them. A request goes to one that has its model; where none has, it waits."""

    def __init__(self, replicas: Sequence[Replica], max_waiting: int, max_wait_s: float) -> None:
        self._replicas = tuple(replicas)
        self._only = self._replicas[0] if len(self._replicas) == 1 else None
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._changed = asyncio.Event()
        self.held_by: str | None = None
        """The pause that lasts: nothing new goes out."""
        self.waiting = 0
        """Requests that wait."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    @property
    def in_flight(self) -> int:
        """Calls that the servers are answering for this process."""
        return sum(replica.in_flight for replica in self._replicas)

    @property
    def max_model_len(self) -> int | None:
        """Tokens that prompt and answer may have together, wherever it is answered; None until somebody has told."""
        least: int | None = None
        for replica in self._replicas:
            length = replica.max_model_len
            if length is not None and (least is None or length < least):
                least = length
        return least

    def ready(self, names: Sequence[str]) -> bool:
        """Whether one of them answers under each of these names, or will when it wakes."""
        return any(replica.healthy and replica.names.issuperset(names) for replica in self._replicas)

    def sees(self, names: Sequence[str]) -> bool:
        """Whether one of them that is well is known to have these names, or none is well; else all are looked at again
        at once."""
        if self.ready(names) or not any(replica.healthy for replica in self._replicas):
            return True
        self._look_now()
        return False

    def nobody_takes(self, name: str) -> bool:
        """Whether an adapter was refused by every server that is well."""
        well = [replica for replica in self._replicas if replica.healthy and not replica.asleep]
        return bool(well) and all(name in replica.refused and name not in replica.names for replica in well)

    def hold(self, pause_id: str | None) -> None:
        """From now on let nothing new out, for this pause; None ends that."""
        if pause_id != self.held_by:
            self.held_by = pause_id
            self._look_now()
            self.changed()

    def changed(self) -> None:
        """Who waits shall look again: a server's health or names are others."""
        self._changed.set()
        self._changed.clear()

    async def ask(self, asking: Callable[[*Ts], Request], *told: *Ts) -> Response:
        """Have a request answered and give its response, headers read (`upstream.Answering`).

        It is sent elsewhere where nothing was sent, or the server has not the model that it was thought to have.

        Raises:
            UpstreamDown: who was asked broke off; or nobody could be asked in time, or so many wait already.
        """
        until_s: float | None = None
        misled = 0
        while misled < MOST_MISLED + len(self._replicas):
            request = asking(*told)
            replica = self._take(request)
            if replica is None:
                if until_s is None:
                    until_s = asyncio.get_running_loop().time() + self._max_wait_s
                    self._look_now()
                replica, request = await self._wait(partial(asking, *told), request, until_s)
            response: Response | None = None
            try:
                # As `Upstream.send`, without a coroutine for each layer.
                response = replica.upstream.begin(request) or await replica.upstream.connect(request)
                response.counting, response.name = replica, request.model
                if request.meanwhile is not None:
                    request.meanwhile()
                while not response.status:
                    await response.news()
            except NotReached as down:
                replica.is_through(request.model)
                misled += 1
                self._lost(replica, why(down))
                continue
            except BaseException as error:
                self._failed(replica, request, response, broken=isinstance(error, UpstreamDown))
                raise
            if response.status not in MISLEADING or not await self._is_elsewhere(replica, request, response):
                return response
            misled += 1
        raise self._why_not(request.model)

    def _take(self, request: Request) -> Replica | None:
        """Choose one and count the request; None where nobody can be asked."""
        if self.held_by is not None:
            return None
        model, replica = request.model, self._only
        if replica is None:
            replica = choose(request.trajectory_id, [one for one in self._replicas if one.has(model)])
        elif not replica.has(model):
            return None
        if replica is not None:
            replica.take(model)
        return replica

    async def _wait(self, asking: Callable[[], Request], request: Request, until_s: float) -> tuple[Replica, Request]:
        """Wait until somebody can be asked: whom, and what, counted already.

        Raises:
            UpstreamDown: nobody could until then, or so many wait already.
        """
        if self.waiting >= self._max_waiting:
            raise TooManyWaiting(f"{self.waiting} requests wait already; {self._why_not(request.model).message}")
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until_s):
                while True:
                    await self._changed.wait()
                    if self.held_by is not None or not any(replica.healthy for replica in self._replicas):
                        continue
                    request = asking()
                    if (replica := self._take(request)) is not None:
                        return replica, request
        except TimeoutError:
            raise self._why_not(request.model) from None
        finally:
            self.waiting -= 1

    def _why_not(self, model: str) -> UpstreamDown:
        if self.held_by is not None:
            return Training("the model server's accelerator is at a training step; try again soon")
        if any(replica.healthy for replica in self._replicas):
            return AdapterLoading(f"{model} is being loaded; try again soon")
        return UpstreamDown("the model server does not answer; it may be starting, try again soon")

    def _look_now(self) -> None:
        for replica in self._replicas:
            replica.look_now.set()

    @staticmethod
    def _failed(replica: Replica, request: Request, response: Response | None, *, broken: bool) -> None:
        """Count a request as over that came to no answer's headers."""
        if response is None:
            replica.is_through(request.model, broken)
        else:
            response.leave(broken=broken)

    async def _is_elsewhere(self, replica: Replica, request: Request, response: Response) -> bool:
        """Whether the server has not this model; also takes one whose engine has died out of the rotation."""
        try:
            body = await response.read(MAX_ERROR_BYTES)
        except BaseException as error:
            response.leave(broken=isinstance(error, UpstreamDown))
            raise
        if engine_died(response.status, body):
            self._lost(replica, "its engine has stopped")
        if not lacks_model(response.status, body, request.model):
            return False
        response.leave()
        replica.names -= {request.model}
        return True

    def _lost(self, replica: Replica, reason: str) -> None:
        """Out of the rotation until the next look finds it well."""
        replica.healthy, replica.why_away = False, reason
        replica.look_now.set()
