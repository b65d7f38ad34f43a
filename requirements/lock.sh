#!/bin/sh
# Writes the exact, hashed lock of the set-up without a GPU, for Python 3.11 to 3.13: lock.sh BIN LOCK [FOLDER] [ARGUMENT ...]
# Versions that still fit stay; `--upgrade` chooses all anew. FOLDER holds a CPU wheel of PyTorch (any Python's), where
# its index is out of reach. torchvision, torchaudio and torchcodec stay out: no build of theirs matches, and a mismatched
# one breaks vLLM's imports.
set -eu
bin=$1 lock=$2 folder=${3:-}
shift 2
[ $# -eq 0 ] || shift
"$bin/python" -m pip install --quiet uv
cp "$lock" "$lock.new"
# Said outright, or the CUDA build and its libraries enter for machines that nobody has.
sed -n "s/.*\"\(torch==[^\"]*\)\".*/\1+cpu ; sys_platform == 'linux'/p" pyproject.toml |
"$bin/uv" pip compile pyproject.toml - \
    --extra serving --extra judge --extra training --extra export --extra demo --extra clients --extra dev \
    --python-version 3.11 --universal --generate-hashes --no-annotate --no-header --quiet \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
    ${folder:+--find-links "$folder"} --output-file "$lock.new" "$@"
# The hashes of PyTorch's CPU wheels come from torch.hashes: a folder seldom has the wheels of every Python.
"$bin/python" - "$lock.new" "$lock" <<'PYTHON'
import re
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
version, *hashes = [
    line.split()[0] for line in Path("requirements/torch.hashes").read_text().splitlines() if not line.startswith("#")
]
requirements = re.split(r"\n(?=\S)", source.read_text().split("\n# The following")[0].strip())
found = [text for text in requirements if text.startswith("torch==") and "+cpu" in text.splitlines()[0]]
known = set(re.findall(r"sha256:(\w+)", "".join(found))) & set(hashes)
if len(found) != 1 or found[0].split()[0] != version or not known:
    sys.exit(f"torch.hashes is for {version}, the lock has {[one.split()[0] for one in found]}: bring it up to date")
torch = f"{version} \\\n" + " \\\n".join(f"    --hash=sha256:{one}" for one in sorted(hashes))
kept = [text for text in requirements if not text.startswith(("torch==", "#"))] + [torch]
header = "# Exact versions of the set-up without a GPU: CPython 3.11 to 3.13 on Linux x86-64. Made by `make lock`.\n"
target.write_text(header + "\n".join(sorted(kept, key=lambda text: re.split(r"==", text)[0])) + "\n")
source.unlink()
PYTHON
