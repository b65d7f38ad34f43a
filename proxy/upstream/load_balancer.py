"""Balance requests over the vLLM servers; requests wait while no server can answer.

It uses each server's health, loaded adapters and number of requests in flight. `reconciler` checks the health.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b

from proxy.domain.chat_rules import ChatRules, common_rules
from proxy.errors import AdapterLoading, NotReached, TooManyWaiting, Training, UpstreamDown
from proxy.http.client_response import Response
from proxy.upstream.server import Request, Ts, Upstream, engine_died, lacks_model, why

LOAD_FACTOR = 1.25
"""Most requests of one server, as a factor of its even share."""
MOST_MISLED = 3
"""Tries of a request, beyond one for each server, where a server turns out not to have the model or cannot be reached:
what a server lists may differ from what it answers."""
MISLEADING = (404, 500)
"""Statuses that may mean that a server does not have the model, or that its engine is dead."""
MAX_ERROR_BYTES = 2**20
"""Most bytes read of such an answer."""


class Replica:
    """One vLLM server, as this process knows it."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self.url = url
        self.upstream = upstream
        self.healthy = False
        self.asleep = False
        self.why_away: str | None = "not checked yet"
        self.names: frozenset[str] = frozenset()
        """Names that it serves: the base model's names and the loaded adapters', as it last listed them."""
        self.missing: dict[str, str] = {}
        """Names that it should serve and does not, with the reason."""
        self.refused: frozenset[str] = frozenset()
        """Those of `missing` that failed to load."""
        self.max_model_len: int | None = None
        """Most tokens of prompt and answer together; None until the server has reported it."""
        self.chat_rules: ChatRules | None = None
        """How it makes a chat of Anthropic messages; None until it was asked."""
        self.in_flight = 0
        """Calls that it is answering for this process, including control calls that use the accelerator."""
        self.using: dict[str, int] = {}
        """Requests in flight, by name; the count of a name may be 0."""
        self.look_now = asyncio.Event()
        """Set to check the server's health at once."""
        self.bring_now = asyncio.Event()
        """Set when the server has changed: something may have to be loaded."""

    @property
    def state(self) -> str:
        """Return its state: serving | behind | away | asleep."""
        if not self.healthy:
            return "away"
        if self.asleep:
            return "asleep"
        return "behind" if self.missing else "serving"

    @property
    def reason(self) -> str | None:
        """Return why it does not serve."""
        missing = "; ".join(f"{name}: {why}" for name, why in sorted(self.missing.items()))
        return missing or None if self.healthy else self.why_away

    def has(self, name: str) -> bool:
        """Return whether it can answer under this name."""
        return self.healthy and not self.asleep and name in self.names

    def take(self, name: str) -> None:
        """Count a request under this name that is sent to this server."""
        self.in_flight += 1
        try:
            self.using[name] += 1
        except KeyError:
            # Only names that it serves, and those still in use, stay in the dict.
            self.using = {one: count for one, count in self.using.items() if count or one in self.names} | {name: 1}

    def is_through(self, name: str, broken: bool = False) -> None:
        """Count a request under this name as ended. `broken`: the server did not answer, or did not finish its
        answer."""
        self.in_flight -= 1
        self.using[name] -= 1
        if broken:
            self.look_now.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count work that uses the accelerator, so that a pause waits for its end."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def choose(trajectory_id: str, among: Sequence[Replica]) -> Replica | None:
    """Return the server that answers a trajectory's next request; None if `among` is empty.

    It is the same server in every process, and also when other servers come and go (rendezvous hashing), so that it has
    the prefix cached. Exception: a server that already has ceil(1.25 · (m + 1) / n) of all m requests on n servers;
    then it is the trajectory's next choice (bounded loads, arXiv 1608.01350).
    """
    if len(among) < 2:
        return among[0] if among else None
    bound = math.ceil(LOAD_FACTOR * (sum(one.in_flight for one in among) + 1) / len(among))
    # Not all servers can be at the bound: together they would have more requests than there are.
    return max(
        (one for one in among if one.in_flight < bound),
        key=lambda one: blake2b(f"{one.url} {trajectory_id}".encode(), digest_size=8).digest(),
    )


class Replicas:
    """All vLLM servers. A request goes to a server that has its model; if none has it, the request waits."""

    def __init__(self, replicas: Sequence[Replica], max_waiting: int, max_wait_s: float) -> None:
        self._replicas = tuple(replicas)
        self._only = self._replicas[0] if len(self._replicas) == 1 else None
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._changed = asyncio.Event()
        self.chat_rules = ChatRules()
        """How all servers make a chat of Anthropic messages, as far as it is known."""
        self.pause_id: str | None = None
        """Id of the current pause, during which no new request is sent."""
        self.waiting = 0
        """Number of waiting requests."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    @property
    def in_flight(self) -> int:
        """Return the number of calls that the servers are answering for this process."""
        return sum(replica.in_flight for replica in self._replicas)

    def max_model_len(self) -> int | None:
        """Return the most tokens of prompt and answer together, on any server; None until a server has reported it."""
        least: int | None = None
        for replica in self._replicas:
            length = replica.max_model_len
            if length is not None and (least is None or length < least):
                least = length
        return least

    def learn_rules(self, replica: Replica, rules: ChatRules) -> None:
        """Note how a server makes a chat of Anthropic messages."""
        replica.chat_rules = rules
        self.chat_rules = common_rules(one.chat_rules for one in self._replicas if one.chat_rules is not None)

    def ready(self, names: Sequence[str]) -> bool:
        """Return whether one server answers under each of these names, or will when it wakes."""
        return any(replica.healthy and replica.names.issuperset(names) for replica in self._replicas)

    def sees(self, names: Sequence[str]) -> bool:
        """Return whether a healthy server has these names, or no server is healthy; else start a check of all
        servers."""
        if self.ready(names) or not any(replica.healthy for replica in self._replicas):
            return True
        self._look_now()
        return False

    def failed_everywhere(self, name: str) -> bool:
        """Return whether every healthy server failed to load this adapter."""
        well = [replica for replica in self._replicas if replica.healthy and not replica.asleep]
        return bool(well) and all(name in replica.refused and name not in replica.names for replica in well)

    def hold(self, pause_id: str | None) -> None:
        """Hold back new requests for this pause; None ends the pause."""
        if pause_id != self.pause_id:
            self.pause_id = pause_id
            self._look_now()
            self.changed()

    def changed(self) -> None:
        """Wake the waiting requests: a server's health or names have changed."""
        self._changed.set()
        self._changed.clear()

    async def ask(self, asking: Callable[[*Ts], Request], *arguments: *Ts) -> Response:
        """Send a request to a server and return the response, headers read (`server.Answering`).

        The request is sent to another server if nothing was sent, or if the server does not have the model after all.

        Raises:
            UpstreamDown: the server broke off, no server became available in time, or too many requests wait.
        """
        until_s: float | None = None
        misled = 0
        while misled < MOST_MISLED + len(self._replicas):
            request = asking(*arguments)
            replica = self._take(request)
            if replica is None:
                if until_s is None:
                    until_s = asyncio.get_running_loop().time() + self._max_wait_s
                    self._look_now()
                replica, request = await self._wait(partial(asking, *arguments), request, until_s)
            response: Response | None = None
            try:
                # Same as `Upstream.ask`, without a coroutine for each layer.
                response = replica.upstream.begin(request) or await replica.upstream.connect(request)
                response.counting, response.name = replica, request.model
                if request.meanwhile is not None:
                    request.meanwhile()
                while not response.status:
                    await response.wait_more()
            except NotReached as down:
                replica.is_through(request.model)
                misled += 1
                self._lost(replica, why(down))
                continue
            except BaseException as error:
                broken = isinstance(error, UpstreamDown)
                if response is None:
                    replica.is_through(request.model, broken)
                else:
                    response.release(broken=broken)
                raise
            if response.status not in MISLEADING or not await self._is_elsewhere(replica, request, response):
                return response
            misled += 1
        raise self._why_not(request.model)

    def _take(self, request: Request) -> Replica | None:
        """Choose a server and count the request; None if no server is available."""
        if self.pause_id is not None:
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
        """Wait until a server is available; return it and the request, which is counted already.

        Raises:
            UpstreamDown: no server became available until `until_s`, or too many requests wait already.
        """
        if self.waiting >= self._max_waiting:
            raise TooManyWaiting(f"{self.waiting} requests wait already; {self._why_not(request.model).message}")
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until_s):
                while True:
                    await self._changed.wait()
                    if self.pause_id is not None or not any(replica.healthy for replica in self._replicas):
                        continue
                    request = asking()
                    if (replica := self._take(request)) is not None:
                        return replica, request
        except TimeoutError:
            raise self._why_not(request.model) from None
        finally:
            self.waiting -= 1

    def _why_not(self, model: str) -> UpstreamDown:
        if self.pause_id is not None:
            return Training("the model server's accelerator is at a training step; try again soon")
        if any(replica.healthy for replica in self._replicas):
            return AdapterLoading(f"{model} is being loaded; try again soon")
        return UpstreamDown("the model server does not answer; it may be starting, try again soon")

    def _look_now(self) -> None:
        for replica in self._replicas:
            replica.look_now.set()

    async def _is_elsewhere(self, replica: Replica, request: Request, response: Response) -> bool:
        """Return whether the server does not have this model. Also marks a server as unhealthy if its engine has
        died."""
        try:
            body = await response.read(MAX_ERROR_BYTES)
        except BaseException as error:
            response.release(broken=isinstance(error, UpstreamDown))
            raise
        if engine_died(response.status, body):
            self._lost(replica, "its engine has stopped")
        if not lacks_model(response.status, body, request.model):
            return False
        response.release()
        replica.names -= {request.model}
        return True

    def _lost(self, replica: Replica, reason: str) -> None:
        """Mark a server as unhealthy until the next check succeeds."""
        replica.healthy, replica.why_away = False, reason
        replica.look_now.set()
