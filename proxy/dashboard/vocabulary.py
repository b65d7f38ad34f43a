"""Spell token ids with the base model's vocabulary, if its file is on this machine.

The proxy never encodes text. Only the dashboard reads vocabularies, and works without them. Nothing is fetched from a
model hub. The `tokenizers` library would block the whole process, with all answers in flight, for a third of a second
while it reads a large file. This module reads only the vocabulary and its decoder type, in 60 ms.
"""

import codecs
import logging
import os
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

FILE = "tokenizer.json"
MOST_CACHED = 2
"""Vocabularies in memory; a large one takes about 20 MB."""
SPACE = "▁"
"""SentencePiece's spelling of a space (U+2581)."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's spelling of a byte of a letter that it has no piece for."""

_reading = threading.Lock()

log = logging.getLogger(__name__)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(msgspec.Struct):
    """The parts of a tokenizer.json that define what ids spell."""

    model: _Model
    decoder: Any = None
    added_tokens: list[_AddedToken] = []


class Vocabulary:
    """The bytes that each token id of one model spells."""

    def __init__(self, file: _File) -> None:
        """Read the pieces of a tokenizer file.

        Raises:
            ValueError: its decoder is not supported.
        """
        kinds = _kinds(file.decoder)
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"}:
            raise ValueError(f"a decoder of the kinds {sorted(kinds)}")
        self._bytes_of = _of_bytes if "ByteLevel" in kinds else _of_words
        vocab = file.model.vocab
        named = vocab.items() if isinstance(vocab, dict) else ((name, place) for place, (name, _) in enumerate(vocab))
        self._pieces = {place: name for name, place in named}
        self._added = {one.id: one.content.encode() for one in file.added_tokens}

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """Return what each id adds to the text, special tokens included; a letter of several tokens is at its last
        token. None if an id is not in this vocabulary."""
        decoder, texts = codecs.getincrementaldecoder("utf-8")("replace"), []
        for token_id in token_ids:
            if token_id in self._added:
                spelled = self._added[token_id]
            elif token_id in self._pieces:
                spelled = self._bytes_of(self._pieces[token_id])
            else:
                return None
            texts.append(decoder.decode(spelled))
        return texts


def texts(model_path: str, token_ids: Sequence[int]) -> list[str] | None:
    """Return what each id spells; None if the model's vocabulary is not on this machine, or lacks one of the ids. May
    be called from several threads."""
    with _reading:  # several pages at once must not read the same file
        vocabulary = _vocabulary(model_path)
    return None if vocabulary is None else vocabulary.texts(token_ids)


@lru_cache(MOST_CACHED)
def _vocabulary(model_path: str) -> Vocabulary | None:
    path = _file(model_path)
    try:
        return None if path is None else Vocabulary(msgspec.json.decode(path.read_bytes(), type=_File))
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.warning("the vocabulary in %s cannot be read: %s", path, error)
        return None


def _file(model_path: str) -> Path | None:
    """Return the model's tokenizer file: in its folder, or in the cache of the hub's own client."""
    in_folder = Path(model_path) / FILE
    if in_folder.is_file():
        return in_folder
    if model_path.count("/") != 1:
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--{model_path.replace('/', '--')}" / "snapshots"
    files = sorted(snapshots.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    return files[-1] if files else None


def _kinds(decoder: Any) -> set[str]:
    """Return the types of a decoder and of its parts."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders") or ()))


def _of_bytes(piece: str) -> bytes:
    """Decode a piece in which each letter stands for a byte, as in GPT-2 (`bytes_to_unicode`)."""
    return bytes(_BYTES[letter] for letter in piece) if all(one in _BYTES for one in piece) else piece.encode()


def _of_words(piece: str) -> bytes:
    match = _BYTE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else piece.replace(SPACE, " ").encode()


def _letters() -> dict[str, int]:
    """Map letters to bytes: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _letters()
