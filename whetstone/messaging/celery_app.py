"""Configure Celery: messages are hints, and each worker also looks for work by itself.

A lost message delays work until the next sweep and never loses it. So nothing here waits for the broker, retries for
long or stores a result. The database determines which work is due and who does it.
"""

import logging
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from celery import Celery, signals

from whetstone.config.settings import Settings, SettingsError
from whetstone.messaging import task_names
from whetstone.observability import log_setup, tracing

HINT_EVERY_S = 0.25
"""Shortest time between two sends of hints by one process; hints in between become one message."""

LOST_AFTER_SWEEPS = 10
"""A sweep message that no worker received after this many periods counts as lost, and is sent again."""

HINT_EXPIRES_S = 60.0
"""A hint that waited longer is dropped unread: by then a sweep has done its work."""

_CONNECT_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


def celery_app(program: str, settings: Settings) -> Celery:
    """Return the Celery app of a program; `judge` and `trainer` consume the queue of their name, others only send.

    Raises:
        SettingsError: no broker is set.
    """
    if not settings.broker:
        raise SettingsError(
            "no broker: set `broker` in whetstone.toml or WHETSTONE_BROKER, for example redis://127.0.0.1:6379/0; "
            "`whetstone up` starts one of its own"
        )
    app = Celery(program)

    def observe(**_: Any) -> None:
        """Handle the signal that a worker sends when it starts; it switches off Celery's own logging setup."""
        log_setup.set_up(settings.log)
        tracing.start(settings.log, program)

    signals.setup_logging.connect(observe, weak=False, dispatch_uid=__name__)
    app.conf.update(
        broker_url=settings.broker,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=_transport_options(settings.broker),
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_routes={name: {"queue": queue} for name, queue in task_names.QUEUES.items()},
        task_acks_late=True,
        task_publish_retry=False,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
    )
    if program in task_names.QUEUES.values():
        app.conf.task_default_queue = program
        # Otherwise, in older Celery, a worker that sent to another queue would consume that queue too after its next
        # reconnect.
        app.amqp.queues.select([program])
    return app


def hint(app: Celery, task_name: str) -> None:
    """Notify the workers of `task_name` that there is work: immediately, from another thread, without a guarantee.

    Never raises and never waits. Hints that come faster than they can be sent are merged into one.
    """
    _senders.setdefault(os.getpid(), _Sender()).add(app, task_name)


def sweep_every(app: Celery, task_name: str, seconds: float) -> None:
    """Make the worker of `app` send `task_name` to itself every `seconds` while it runs.

    At most one such message waits at a time: the next one is sent when a worker has received the last one, or when that
    one counts as lost.
    """
    sweeper = _Sweeper(app, task_name, seconds)
    signals.worker_ready.connect(sweeper.start, weak=False)
    signals.worker_shutting_down.connect(sweeper.stop, weak=False)
    signals.task_received.connect(sweeper.received, weak=False)
    signals.task_revoked.connect(sweeper.received, weak=False)


def _transport_options(broker: str) -> dict[str, Any]:
    # By default kombu would retry an absent broker for ever, inside the call that sends.
    options = {"max_retries": 0, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}
    is_redis = urlsplit(broker).scheme.startswith(("redis", "unix", "sentinel"))
    return options | ({"socket_connect_timeout": _CONNECT_TIMEOUT_S, "socket_keepalive": True} if is_redis else {})


def _send(app: Celery, task_name: str, expires_s: float) -> bool:
    try:
        app.send_task(task_name, expires=expires_s, retry=False, ignore_result=True)
    # Each transport raises its own errors when its server is away.
    except Exception as error:
        log.debug("no message to %s: %s", task_name, error)
        return False
    return True


class _Sender:
    """Sends the pending hints of one process from a thread."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[int, str], Celery] = {}
        self._any = threading.Condition()
        self._runs = False

    def add(self, app: Celery, task_name: str) -> None:
        with self._any:
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="hints", daemon=True).start()
            self._wanted[id(app), task_name] = app
            self._any.notify()

    def _run(self) -> None:
        while True:
            with self._any:
                self._any.wait_for(lambda: self._wanted)
                wanted, self._wanted = self._wanted, {}
            for (_, task_name), app in wanted.items():
                # The first attempt may use a connection that the broker has closed meanwhile; the second opens a new
                # one.
                _ = _send(app, task_name, HINT_EXPIRES_S) or _send(app, task_name, HINT_EXPIRES_S)
            time.sleep(HINT_EVERY_S)


_senders: dict[int, _Sender] = {}
"""By process: threads do not survive a fork."""


def _lost() -> None:
    raise ConnectionResetError("the broker died before messages were acknowledged")


class _Sweeper:
    """A thread that sends sweep messages to a worker, and tracks whether the last one is still pending."""

    def __init__(self, app: Celery, task_name: str, seconds: float) -> None:
        self._app = app
        self._task_name = task_name
        self._seconds = seconds
        self._sent_at: float | None = None
        self._stopped = threading.Event()
        self._consumer: Any = None
        self._state: Any = None
        """Celery's state of the worker: the requests it works on."""
        self._full = False
        """At the last check it could accept no message although it was idle."""

    def start(self, sender: Any = None, **_: Any) -> None:
        """Start the thread; handles the signal `worker_ready`, which the worker's consumer sends."""
        # Imported here because a program that only sends does not need the worker modules.
        from celery.worker import state

        self._consumer, self._state = sender, state
        self._stopped.clear()
        threading.Thread(target=self._run, name=f"sweep {self._task_name}", daemon=True).start()

    def stop(self, **_: Any) -> None:
        """Stop the thread; handles the signal `worker_shutting_down`."""
        self._stopped.set()

    def received(self, request: Any = None, **_: Any) -> None:
        """Note that a message arrived, even if it is dropped; handles `task_received` and `task_revoked`."""
        if self._task_name in (getattr(request, "name", None), getattr(request, "task", None)):
            self._sent_at = None

    def _look(self) -> None:
        """Make the consumer reconnect if it would never accept a message again.

        A message counts as in progress until it is acknowledged. If the broker dies just before that, kombu (5.7)
        counts the message for ever; once the limit is reached, kombu does not even notice that its connection is gone.
        """
        channel = getattr(getattr(self._consumer, "task_consumer", None), "channel", None)
        qos: Any = getattr(channel, "qos", None)
        idle = qos is not None and not self._state.active_requests and not self._state.reserved_requests
        before, self._full = self._full, idle and not qos.can_consume()
        if before and self._full:
            self._full = False
            self._consumer.call_soon(_lost)

    def _run(self) -> None:
        while True:
            self._look()
            sent_at = self._sent_at
            if sent_at is None or time.monotonic() - sent_at > LOST_AFTER_SWEEPS * self._seconds:
                self._sent_at = time.monotonic()
                if not _send(self._app, self._task_name, self._seconds):
                    self._sent_at = None
            if self._stopped.wait(self._seconds):
                return
