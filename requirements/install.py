"""Install a locked environment: `install.py ENV LOCK [--sees ENV] [--ours]`. Run by install.sh; standard library only.

- PyTorch is looked for before anything else is installed, by its exact version and build: no other build can come in
  its place. Sources: TORCH_INDEX (an index, a page of links or a folder) if set; else what pip and uv have configured,
  then, for the CPU build, PyTorch's own index of it. If none has it, the environment that this run created is removed
  again. Where the lock has the CUDA build, the driver's version is checked first, and said.
- Every package is checked against the lock's hashes, with uv as with pip. uv does the work; pip where uv cannot be had
  or fails. uv gets pip's settings where it has none of its own.
- `--sees` makes the packages of another environment visible in this one. `--ours` adds this repository, editable.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import driver

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12), (3, 13))
"""What the locks are for, the preferred one first."""
PYTORCH = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 8
"""While torch is looked for: an index that does not answer must not cost minutes."""
ABSENT = re.compile(r"No matching distribution|there is no version of|not found in the package registry|no wheels with")
TIMED_OUT = re.compile(r"[Tt]imed ?out|[Tt]imeout")
UNREACHABLE = re.compile(TIMED_OUT.pattern + r"|dns error|Connect|Failed to fetch|Request failed")


class Stop(Exception):
    """The installation cannot go on; the message says why and what to do."""


def say(text: str) -> None:
    """Print one line at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# The lock


def blocks(lock: str) -> list[str]:
    """Return the requirements in a lock's text, each with its hashes."""
    return [one for one in re.split(r"\n(?=\S)", lock.strip()) if not one.startswith("#")]


def on(requirements: list[str], name: str) -> list[str]:
    """Return the requirements on one package."""
    return [one for one in requirements if one.startswith(f"{name}==")]


def is_cpu_build(torch: list[str]) -> bool:
    """Say whether a lock's requirement on PyTorch is its build for machines without a GPU."""
    return "+cpu" in torch[0].split()[0]


# What pip and uv have configured


def pip_settings(listing: str) -> dict[str, str]:
    """Return pip's settings from what `pip config list` prints: the environment wins over [install] over [global]."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(section):
                settings[key[len(section) :]] = str(ast.literal_eval(value))
    return settings


def uv_variables(pip: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return the variables that give pip's settings to uv. What the environment `own` already says to uv wins."""
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: all indexes are equal; the hashes choose the file
    for setting, names, separator in (
        ("index-url", ("UV_DEFAULT_INDEX", "UV_INDEX_URL"), " "),
        ("extra-index-url", ("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
        ("find-links", ("UV_FIND_LINKS",), ","),
        ("trusted-host", ("UV_INSECURE_HOST",), " "),
        ("cert", ("SSL_CERT_FILE",), " "),
        ("proxy", ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), " "),
    ):
        if setting in pip and not any(name in own for name in names):
            variables[names[0]] = separator.join(pip[setting].split())
    return {name: value for name, value in variables.items() if name not in own}


def source_options(source: str, tool: str) -> list[str]:
    """Return the options that make pip or uv look in `source` alone; "" is what they have configured."""
    if not source:
        return []
    if Path(source).is_dir():
        return ["--no-index", "--find-links", str(Path(source).resolve())]
    options = ["--default-index" if tool == "uv" else "--index-url", source]
    if source != PYTORCH:
        options += ["--find-links", source]  # whichever of the two it is
    plain = re.match(r"http://(?:[^@/]*@)?([^/]+)", source)
    if plain and tool == "pip":
        options += ["--trusted-host", plain[1]]  # the hash says whether the file is right
    return options


# Python


def probe(python: str) -> tuple[tuple[int, int], bool] | None:
    """Return a Python's version and whether it can make environments with pip; None if it does not run."""
    program = "import sys, importlib.util as u; print(*sys.version_info[:2], int(u.find_spec('ensurepip') is not None))"
    try:
        done = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor, makes = done.stdout.split()
    return (int(major), int(minor)), makes == b"1"


def choose_python(named: str, path: str) -> str | None:
    """Return the named Python, else the first of 3.11, 3.12 and 3.13 on the path; None if there is none.

    Raises Stop if the named one cannot be used.
    """
    if named:
        found = probe(named)
        if found is None or found[0] not in PYTHONS:
            what = "does not run" if found is None else f"is Python {found[0][0]}.{found[0][1]}"
            raise Stop(f"PYTHON={named} {what}: name Python 3.11, 3.12 or 3.13.")
        return named
    names = [f"python{major}.{minor}" for major, minor in PYTHONS] + ["python3", "python"]
    there = [str(Path(folder, name)) for name in names for folder in path.split(os.pathsep)]
    usable = [(one, found[1]) for one in there if (found := probe(one)) is not None and found[0] in PYTHONS]
    usable.sort(key=lambda pair: not pair[1])  # one that cannot make environments needs uv
    return usable[0][0] if usable else None


def ran(command: list[str]) -> bool:
    """Run a command in silence; say whether it succeeded."""
    return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def create(folder: Path, named: str) -> bool:
    """Make an environment with the Python `named`, or the one that is chosen; return False if there is one already."""
    there = probe(str(folder / "bin" / "python"))
    if there is not None and there[0] in PYTHONS:
        wanted = probe(named)
        if named and (wanted is None or wanted[0] != there[0]):
            raise Stop(f"{folder} is not made with PYTHON={named}: run make clean first, or leave PYTHON out.")
        return False
    base = choose_python(named, os.environ.get("PATH", ""))
    if base and ran([base, "-m", "venv", "--clear", str(folder)]):
        return True
    with tempfile.TemporaryDirectory() as spare:
        uv = shutil.which("uv")
        if uv is None and ran([sys.executable, "-m", "venv", spare]):
            ran([f"{spare}/bin/pip", "install", "--timeout", str(TIMEOUT_S), "--retries", "1", "uv"])
            uv = shutil.which("uv", path=f"{spare}/bin")
        if uv and not base:
            say("There is no Python 3.11, 3.12 or 3.13 here: uv fetches one.")
        if uv and ran([uv, "venv", "--seed", "--clear", "--python", base or "3.11", str(folder)]):
            return True
    if base:
        raise Stop(f"{base} cannot make an environment: install its venv module (Debian: python3-venv), or uv.")
    raise Stop(
        "There is no Python 3.11, 3.12 or 3.13, and uv cannot fetch one: install one, or name it with PYTHON=..."
    )


# Installing


def progress(line: str) -> str:
    """Return what to show of a line that pip or uv prints: large downloads and sums, or nothing."""
    large = re.match(r"\s*Downloading (?:\S*/)?(\S+) \((\d+(?:\.\d+)?) ?([MG]i?B)\)", line)
    if large and (large[3][0] == "G" or float(large[2]) >= 5):
        return f"downloading {large[1].replace('%2B', '+')} ({large[2]} {large[3]})"
    if re.match(r"(Prepared|Installed) \d+ packages? ", line):
        return line.strip().lower()
    return "installing" if line.startswith("Installing collected packages") else ""


class Installer:
    """Installs into one environment, with uv where it can be had."""

    def __init__(self, folder: Path, locked_uv: list[str]) -> None:
        self.python = str(folder / "bin" / "python")
        self.variables: dict[str, str] = {}
        there = [one for one in (folder / "bin" / "uv", ROOT / ".venv" / "bin" / "uv") if one.is_file()]
        self.uv = str(there[0]) if there else shutil.which("uv")
        if self.uv is None and locked_uv and self.install("pip", locked_uv, hurry=True)[0] == 0:
            self.uv = str(folder / "bin" / "uv")
        if self.uv is None:
            say("uv cannot be had here: pip does the work, which takes longer.")
            return
        listing = [self.python, "-m", "pip", "config", "list"]
        done = subprocess.run(listing, stdout=subprocess.PIPE, text=True, check=True)
        self.variables = uv_variables(pip_settings(done.stdout), dict(os.environ))

    def tools(self) -> list[str]:
        """Return what can install here, the preferred one first."""
        return ["uv", "pip"] if self.uv else ["pip"]

    def install(self, tool: str, requirements: list[str], source: str = "", *, hurry: bool = False) -> tuple[int, str]:
        """Install requirements by their hashes, from `source` alone if it is named.

        With `hurry` an index that does not answer is given up soon. Return as `run` does.
        """
        with tempfile.TemporaryDirectory() as folder:
            listed = Path(folder) / "requirements.txt"
            listed.write_text("\n".join(requirements) + "\n", encoding="utf-8")
            arguments = ["--require-hashes", "-r", str(listed), *source_options(source, tool)]
            variables = {}
            if hurry and tool == "uv":
                variables = {
                    "UV_HTTP_CONNECT_TIMEOUT": str(TIMEOUT_S),
                    "UV_HTTP_TIMEOUT": str(TIMEOUT_S),
                    "UV_HTTP_RETRIES": "1",
                }
            elif hurry:
                retries = 0 if self.uv else 1  # uv has tried before
                arguments += ["--timeout", str(TIMEOUT_S), "--retries", str(retries)]
            return self.run(tool, arguments, variables)

    def run(self, tool: str, arguments: list[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
        """Run one tool's `install` and show its progress; return the status and the rest of what it printed."""
        environment = {**os.environ, **(self.variables if tool == "uv" else {}), **(variables or {})}
        with_uv = [str(self.uv), "pip", "install", "--python", self.python]
        with_pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
        rest = []
        with subprocess.Popen(
            [*(with_uv if tool == "uv" else with_pip), "--no-deps", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            text=True,
        ) as process:
            for line in process.stdout or ():
                if shown := progress(line):
                    say(f"  {shown}")
                else:
                    rest.append(line)
        return process.returncode, "".join(rest)

    def install_torch(self, torch: list[str], named: str) -> None:
        """Install PyTorch in the build of the lock. Raises Stop if no source has it."""
        version = torch[0].split()[0].partition("==")[2]
        found = probe(self.python)
        build = f"{version} for Python {'.'.join(map(str, found[0] if found else ()))}"
        kind = "CPU" if is_cpu_build(torch) else "CUDA"
        # By `==2.13.0` uv would take 2.13.0+cpu where a source has both, and then refuse its hash.
        exact = [torch[0].replace("==", "===", 1)]
        reasons = []
        for source in [named] if named else ["", *[PYTORCH] * (kind == "CPU")]:
            say(f"PyTorch {version}: looking in {source or 'the configured package sources'}")
            reason = ""
            for tool in self.tools():
                status, printed = self.install(tool, exact, source, hurry=True)
                if status == 0:
                    return
                if UNREACHABLE.search(printed):
                    reason = reason or "did not answer"
                    if TIMED_OUT.search(printed):
                        break  # another tool would wait as long
                elif ABSENT.search(printed):
                    reason = reason or ("lack it" if not source else "lacks it")
                else:
                    say(printed)
                    raise Stop(f"PyTorch {version} could not be installed: {tool} says why above.")
            reasons.append(f"{source or 'the configured package sources'} {reason}")
        raise Stop(
            f"PyTorch's {kind} build ({build}) is not to be had: {' and '.join(reasons)}. Name an index, a page of "
            "links or a folder that has its wheel: make install TORCH_INDEX=..."
        )

    def install_all(self, requirements: list[str]) -> None:
        """Install the other requirements. Raises Stop if some cannot be."""
        for tool in self.tools():
            say(f"{len(requirements)} packages with {tool}: some minutes, most of them downloads")
            status, printed = self.install(tool, requirements)
            if status == 0:
                return
            say(printed)
        raise Stop("Not every package could be installed: the lines above say why. The next run goes on from here.")

    def install_ours(self) -> None:
        """Add this repository, editable. Raises Stop if it cannot be built."""
        for tool in self.tools():
            status, printed = self.run(tool, ["--no-build-isolation", "-e", str(ROOT)])
            if status == 0:
                return
        raise Stop(f"{printed}\nThis repository could not be installed: the lines above say why.")


def see(folder: Path, other: Path) -> None:
    """Make the packages of another environment visible in this one."""
    (inside,) = (folder / "lib").glob("python3.*/site-packages")
    packages = other / inside.relative_to(folder)
    (inside / "whetstone.pth").write_text(f"{os.path.relpath(packages, inside)}\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Install; raises Stop with one message if it cannot be done."""
    parser = argparse.ArgumentParser(description="Install a locked environment.")
    parser.add_argument("environment", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--sees", type=Path)
    parser.add_argument("--ours", action="store_true")
    given = parser.parse_args(arguments)
    folder = given.environment.absolute()
    named = str(given.sees / "bin" / "python") if given.sees else os.environ.get("PYTHON", "")
    requirements = blocks(given.lock.read_text(encoding="utf-8"))
    torch = on(requirements, "torch")
    if torch and not is_cpu_build(torch):
        version = driver.branch()
        say(f"Mind: {why}." if (why := driver.unfit(version)) else f"NVIDIA's driver is {version}.")
        if why := driver.without_compiler():
            say(f"Mind: {why}.")
    created = create(folder, named)
    try:
        installer = Installer(folder, on(requirements, "uv"))
        if torch:
            installer.install_torch(torch, os.environ.get("TORCH_INDEX", ""))
    except BaseException:
        if created:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if given.sees:
        see(folder, given.sees.absolute())
    installer.install_all([one for one in requirements if one not in torch])
    if given.ours:
        installer.install_ours()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Stop as stop:
        sys.exit(str(stop))
    except KeyboardInterrupt:
        sys.exit(130)
