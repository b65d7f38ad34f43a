#!/bin/sh
# Writes the exact, hashed lock of the set-up without a GPU: lock.sh BIN LOCK [FOLDER]
# FOLDER holds PyTorch's CPU wheel, where the package index has only the CUDA one. torchvision, torchaudio and
# torchcodec stay out: no build of theirs matches, and a mismatched one breaks vLLM's imports.
set -eu
bin=$1 lock=$2 folder=${3:-}
"$bin/python" -m pip install --quiet uv
# Said outright, or the CUDA build and its libraries enter for machines that nobody has.
sed -n "s/.*\"\(torch==[^\"]*\)\".*/\1+cpu ; sys_platform == 'linux'/p" pyproject.toml |
"$bin/uv" pip compile pyproject.toml - \
    --extra serving --extra judging --extra training --extra export --extra demo --extra clients --extra dev \
    --python-version 3.11 --universal --generate-hashes --no-annotate --no-header \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
    ${folder:+--find-links "$folder"} --output-file "$lock.new"
# The CPU wheel is a local version of the release; pip finds it under the release's own number, by its hash.
"$bin/python" - "$lock.new" "$lock" <<'PYTHON'
import re
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
requirements = re.split(r"\n(?=\S)", source.read_text().split("\n# The following")[0].strip())
kept = [text for text in requirements if not text.startswith("torch==") or "+cpu" in text.splitlines()[0]]
header = "# Exact versions of the set-up without a GPU: CPython 3.11 on Linux x86-64. Made by `make lock`.\n"
target.write_text(header + "\n".join(re.sub(r"^torch==(\S+)\+cpu[^\\\n]*", r"torch==\1 ", text) for text in kept) + "\n")
source.unlink()
PYTHON
