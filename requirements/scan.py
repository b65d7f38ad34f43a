"""Looks for keys and passwords in what the repository holds: `scan.py [--known] [FILE ...]`. Exit 1 if it finds any.

Run by `make audit` in an environment of its own (detect-secrets). What was found and is none stands in
not_secrets.txt, as a hash and a path; `--known` writes that list anew from what is found now.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from detect_secrets.core.scan import scan_file
from detect_secrets.settings import default_settings

KNOWN = Path(__file__).with_name("not_secrets.txt")
OURS = re.compile(r"wsk_[A-Za-z0-9]+_[A-Za-z0-9_-]{20,}")
"""A key that `whetstone keys create` has made."""
HASHES = (".hashes", ".lock", ".safetensors", KNOWN.name)
"""Ends of names of files that are all hashes and numbers."""


def tracked() -> list[str]:
    """What git holds, or would hold with the next `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [path for path in told.splitlines() if Path(path).is_file() and not path.endswith(HASHES)]


def found(path: str) -> Iterator[tuple[int, str, str]]:
    """Line, kind and hash of each thing in a file that looks like a secret."""
    for secret in scan_file(path):
        yield secret.line_number, secret.type, secret.secret_hash
    text = Path(path).read_bytes().decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), 1):
        for key in OURS.findall(line):
            yield number, "Whetstone key", hashlib.sha1(key.encode()).hexdigest()


def works() -> bool:
    """Whether keys of three kinds are found in a file that has them. They are put together here, or they were found."""
    planted = ("AKIA" + "QWERTYUIOPASDFGH", "wsk_" + "0a1b_" + "Zx9" * 12, "-----BEGIN RSA " + "PRIVATE KEY-----")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "planted.txt"
        path.write_text("\n".join(planted), encoding="utf-8")
        return {line for line, _, _ in found(str(path))} == {1, 2, 3}


def main(arguments: list[str]) -> int:
    """Scan; return 1 if anything is found that is not known to be none, 2 if a planted key is not found."""
    with default_settings():
        if not works():
            sys.stdout.write("a planted key was not found: the scan cannot be relied on\n")
            return 2
    files = [one for one in arguments if not one.startswith("--")] or tracked()
    with default_settings():
        there = [(path, *one) for path in files for one in found(path)]
    if "--known" in arguments:
        KNOWN.write_text("".join(sorted({f"{secret} {path}\n" for path, _, _, secret in there})), encoding="utf-8")
        return 0
    known = set(KNOWN.read_text(encoding="utf-8").splitlines()) if KNOWN.is_file() else set()
    new = [one for one in there if f"{one[3]} {one[0]}" not in known]
    for path, number, kind, _ in new:
        sys.stdout.write(f"{path}:{number}: {kind}\n")
    sys.stdout.write(f"{len(files)} files scanned, {len(new)} secrets found\n")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
