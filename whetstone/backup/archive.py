"""Write and read a backup's file: a tar of plain files, whose last member is a manifest with all sizes and hashes.

- The file gets its name when it is complete and on the disk; until then its name begins with a dot.
- Its mode is 0600: it contains what people wrote.
- What is extracted is compared with the manifest, file by file, before anything else reads it.
"""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from whetstone.errors import WhetstoneError

FORMAT = 1
"""Version of the layout; readers refuse others."""
MANIFEST = "manifest.json"
SQLITE_FILE, POSTGRESQL_DUMP = "whetstone.db", "postgresql.dump"
CONFIG, FEEDBACK_SECRETS = "whetstone.toml", "feedback_secrets"
ADAPTERS, JOURNAL = "adapters", "journal"
_PIECE_BYTES = 2**20
_NAME = re.compile(
    rf"{MANIFEST}|{SQLITE_FILE}|{POSTGRESQL_DUMP}|{CONFIG}|{FEEDBACK_SECRETS}"
    rf"|{JOURNAL}/[^/.][^/]*|{ADAPTERS}/[^/.][^/]*/[^/.][^/]*"
)

Kind = Literal["sqlite", "postgresql"]


class BackupError(WhetstoneError):
    """A backup cannot be made or restored; the message says why and what to do."""


class NotABackup(BackupError):
    """The file is no backup of ours, is incomplete, or was altered."""


class FileFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the backup."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a backup contains."""

    format: int
    whetstone: str
    """Version that made it."""
    created_at: str
    database: Kind
    revision: str
    """Of the schema."""
    rows: dict[str, int]
    """Rows of each table."""
    adapters: dict[str, str]
    """Name of an adapter's folder -> the path that the database has for it."""
    missing: dict[str, str]
    """Versions whose adapter was not there: name -> path."""
    secrets: bool
    """Whether passwords and the secret of feedback tokens are in it."""
    files: dict[str, FileFacts]


class Writer:
    """Adds files to an archive."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.files: dict[str, FileFacts] = {}

    def add(self, name: str, source: Path) -> None:
        """Add a copy of a file as it is now; a program may go on writing to it.

        Raises:
            FileNotFoundError: it is gone; nothing was added.
        """
        with source.open("rb") as file:
            status = os.fstat(file.fileno())
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = status.st_size, status.st_mtime, 0o600
            piece = _Hashing(file, status.st_size)
            self._tar.addfile(info, piece)  # type: ignore[arg-type]
        self.files[name] = FileFacts(status.st_size, piece.sha256.hexdigest())

    def add_text(self, name: str, text: bytes) -> None:
        """Add a file with this content."""
        _add_bytes(self._tar, name, text)
        self.files[name] = FileFacts(len(text), hashlib.sha256(text).hexdigest())


class _Hashing:
    """Reads `size` bytes of a file and hashes them; zeros follow where the file has become shorter."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size
        self.sha256 = hashlib.sha256()

    def read(self, most: int) -> bytes:
        wanted = min(most, self._left)
        piece = self._file.read(wanted)
        piece += bytes(wanted - len(piece))
        self._left -= wanted
        self.sha256.update(piece)
        return piece


@contextmanager
def written(path: Path) -> Iterator[tuple[Writer, Path, tarfile.TarFile]]:
    """Yield a writer, a free path beside the file for a temporary copy, and the tar for `finish`.

    The file gets its name at the end, unless an error occurs.

    Raises:
        BackupError: it exists, its folder does not, or the disk refuses. No part of it remains.
    """
    if os.path.lexists(path):
        raise BackupError(f"{path} is there already: name another file, or a folder")
    if not path.parent.is_dir():
        raise BackupError(f"there is no folder {path.parent}: make it first")
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    staged = path.with_name(f".{path.name}.{os.getpid()}.database")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield Writer(tar), staged, tar
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error.strerror or error}; no part of it is left") from error
    finally:
        for left in (new, staged, *staged.parent.glob(f"{staged.name}-*")):
            left.unlink(missing_ok=True)


def finish(tar: tarfile.TarFile, manifest: Manifest) -> None:
    """Add the manifest, as the last file."""
    _add_bytes(tar, MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def extract(path: Path, folder: Path) -> Manifest:
    """Extract a backup into an empty folder, and compare every file with the manifest.

    Raises:
        NotABackup: the message names what is wrong.
        BackupError: the file cannot be read, or the disk refuses.
    """
    try:
        with path.open("rb") as file:
            facts = _extract(path, file, folder)
    except tarfile.TarError as error:
        raise NotABackup(f"{path} is no backup, or was cut off: {error}") from error
    except OSError as error:
        raise BackupError(f"{error.filename or path}: {error.strerror or error}") from error
    content = folder / MANIFEST
    if facts.pop(MANIFEST, None) is None:
        raise NotABackup(f"{path} has no {MANIFEST}: it is no backup, or was cut off")
    manifest = _manifest(path, content.read_bytes())
    content.unlink()
    _compare(path, facts, manifest.files)
    return manifest


def _manifest(path: Path, content: bytes) -> Manifest:
    try:
        number = msgspec.json.decode(content)["format"]
        if number != FORMAT:
            raise NotABackup(f"{path} has format {number}, this version of Whetstone reads {FORMAT}: use a later one")
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise NotABackup(f"{path}: its {MANIFEST} is not one of ours ({error})") from error


def _extract(path: Path, file: BinaryIO, folder: Path) -> dict[str, FileFacts]:
    facts: dict[str, FileFacts] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            # Nothing is written outside of the folder, and nothing that is no plain file.
            if not member.isreg() or not _NAME.fullmatch(member.name) or member.name in facts:
                raise NotABackup(f"{path} contains {member.name!r}, which is no file of a backup")
            target, source = folder / member.name, tar.extractfile(member)
            assert source is not None
            target.parent.mkdir(parents=True, exist_ok=True)
            sha256, size = hashlib.sha256(), 0
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                while piece := source.read(_PIECE_BYTES):
                    out.write(piece)
                    sha256.update(piece)
                    size += len(piece)
                out.flush()
                os.fsync(out.fileno())
            # A journal is read process by process in the order of these times.
            os.utime(target, (member.mtime, member.mtime))
            facts[member.name] = FileFacts(size, sha256.hexdigest())
    return facts


def _compare(path: Path, facts: Mapping[str, FileFacts], expected: Mapping[str, FileFacts]) -> None:
    for name in sorted(facts.keys() | expected.keys()):
        if name not in facts:
            raise NotABackup(f"{path}: {name} is missing")
        if name not in expected:
            raise NotABackup(f"{path}: {name} is not in its {MANIFEST}")
        if facts[name] != expected[name]:
            raise NotABackup(f"{path}: {name} was altered: its size or SHA-256 is not the one in its {MANIFEST}")


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    tar.addfile(info, io.BytesIO(content))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
