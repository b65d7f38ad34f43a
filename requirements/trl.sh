#!/bin/sh
# Writes the hashed lock of what TRL needs besides the set-up without a GPU: trl.sh BIN CPU_LOCK LOCK [ARGUMENT ...]
# TRL's environment sees that set-up's packages, so they bind the versions chosen here and are not listed again.
set -eu
bin=$1 known=$2 lock=$3
shift 3
"$bin/python" -m pip install --quiet uv
# torch's own release for this platform is a CUDA build, which would bring its libraries along.
sed -nE 's/^([a-z0-9._-]+==.*[^ ]) +\\$/\1/p' "$known" | grep -v "^torch==" > "$lock.known"
echo "torch ; sys_platform == 'nowhere'" > "$lock.without"
cp "$lock" "$lock.new"
echo trl | "$bin/uv" pip compile - \
    --constraints "$lock.known" --overrides "$lock.without" --python-version 3.11 --universal \
    --generate-hashes --no-annotate --no-header --output-file "$lock.new" "$@" > /dev/null
"$bin/python" - "$lock.known" "$lock.new" "$lock" <<'PYTHON'
import re
import sys
from pathlib import Path

known, source, target = map(Path, sys.argv[1:])
names = {line.partition("==")[0] for line in known.read_text().splitlines()}
requirements = re.split(r"\n(?=\S)", source.read_text().strip())
kept = [text for text in requirements if text.partition("==")[0] not in {*names, "torch"}]
header = "# What TRL needs besides cpu.lock, whose packages its environment sees. Made by `make lock`.\n"
target.write_text(header + "\n".join(kept) + "\n")
PYTHON
rm "$lock.known" "$lock.without" "$lock.new"
