#!/bin/sh
# Writes the hashed lock of what Unsloth needs on a CPU besides the set-up without a GPU: unsloth.sh BIN CPU_LOCK LOCK [ARGUMENT ...]
# Its environment sees that set-up's packages, so they bind the versions chosen here and are not listed again, but for
# transformers and what goes with it: Unsloth takes no release as new. 2026.10.9 is the first with a backend for CPUs.
set -eu
bin=$1 known=$2 lock=$3
shift 3
"$bin/python" -m pip install --quiet uv
# torch's own release for this platform is a CUDA build, which would bring its libraries along.
sed -nE 's/^([a-z0-9._-]+==.*[^ ]) +\\$/\1/p' "$known" | grep -vE "^torch==" > "$lock.known"
grep -vE "^(transformers|huggingface-hub|fsspec|certifi)==" "$lock.known" > "$lock.bound"
# What is built for CUDA and not needed without it.
for name in torch torchvision xformers; do echo "$name ; sys_platform == 'nowhere'"; done > "$lock.without"
if [ -f "$lock" ]; then cp "$lock" "$lock.new"; fi
echo "unsloth>=2026.10.9 ; sys_platform == 'linux'" | "$bin/uv" pip compile - \
    --constraints "$lock.bound" --overrides "$lock.without" --python-version 3.11 --universal \
    --generate-hashes --no-annotate --no-header --output-file "$lock.new" "$@" > /dev/null
"$bin/python" - "$lock.known" "$lock.new" "$lock" <<'PYTHON'
import re
import sys
from pathlib import Path

known, source, target = map(Path, sys.argv[1:])


def pin(text: str) -> str:
    return text.split()[0]


bound = {pin(line) for line in known.read_text().splitlines()}
requirements = re.split(r"\n(?=\S)", source.read_text().strip())
header = "# What Unsloth needs on a CPU besides cpu.lock, whose packages its environment sees. Made by `make lock`.\n"
target.write_text(header + "\n".join(text for text in requirements if pin(text) not in bound) + "\n")
PYTHON
rm "$lock.known" "$lock.bound" "$lock.without" "$lock.new"
