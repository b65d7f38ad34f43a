#!/bin/sh
# Writes the hashed lock of what some examples need besides the set-up without a GPU: examples.sh BIN CPU_LOCK LOCK [ARGUMENT ...]
# Their environment sees that set-up's packages, so they bind the versions chosen here and are not listed again, but for
# protobuf: OR-Tools takes no release as new.
set -eu
bin=$1 known=$2 lock=$3
shift 3
"$bin/python" -m pip install --quiet uv
sed -nE 's/^([a-z0-9._-]+==.*[^ ]) +\\$/\1/p' "$known" | grep -v "^torch==" > "$lock.known"
grep -v "^protobuf==" "$lock.known" > "$lock.bound"
if [ -f "$lock" ]; then cp "$lock" "$lock.new"; fi
printf '%s\n' langgraph langchain-openai ortools reasoning-gym | "$bin/uv" pip compile - \
    --constraints "$lock.bound" --python-version 3.11 --universal \
    --generate-hashes --no-annotate --no-header --output-file "$lock.new" "$@" > /dev/null
"$bin/python" - "$lock.bound" "$lock.new" "$lock" <<'PYTHON'
import re
import sys
from pathlib import Path

known, source, target = map(Path, sys.argv[1:])
names = {line.partition("==")[0] for line in known.read_text().splitlines()}
requirements = re.split(r"\n(?=\S)", source.read_text().strip())
further = [text for text in requirements if text.partition("==")[0] not in names]
header = "# What some examples need besides cpu.lock, whose packages their environment sees. Made by `make lock`.\n"
target.write_text(header + "\n".join(further) + "\n")
PYTHON
rm "$lock.known" "$lock.bound" "$lock.new"
