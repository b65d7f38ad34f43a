#!/bin/sh
# Writes the hashed lock of an environment that sees the packages of the set-up without a GPU:
#   PACKAGES="one,two ; marker" OWN="three four" WITHOUT="five" beside.sh BIN CPU_LOCK LOCK WHAT [ARGUMENT ...]
# That set-up's packages bind the versions chosen here and are not listed again, but for those of OWN, of which other
# releases are needed. Packages of WITHOUT are not needed on a CPU: torch's own release would bring CUDA's libraries.
set -eu
bin=$1 known=$2 lock=$3 what=$4
shift 4
"$bin/python" -m pip install --quiet uv
sed -nE 's/^([a-z0-9._-]+==.*[^ ]) +\\$/\1/p' "$known" | grep -v "^torch==" > "$lock.known"
grep -vE "^($(echo "${OWN:-none}" | tr ' ' '|'))==" "$lock.known" > "$lock.bound"
for name in ${WITHOUT:-}; do echo "$name ; sys_platform == 'nowhere'"; done > "$lock.without"
if [ -f "$lock" ]; then cp "$lock" "$lock.new"; fi
echo "$PACKAGES" | tr ',' '\n' | "$bin/uv" pip compile - \
    --constraints "$lock.bound" --overrides "$lock.without" --python-version 3.11 --universal \
    --generate-hashes --no-annotate --no-header --output-file "$lock.new" "$@" > /dev/null
"$bin/python" - "$lock.known" "$lock.new" "$lock" "$what" <<'PYTHON'
import re
import sys
from pathlib import Path

known, source, target = map(Path, sys.argv[1:4])


def pin(text: str) -> str:
    return text.split()[0]


seen = {pin(line) for line in known.read_text().splitlines()}
requirements = re.split(r"\n(?=\S)", source.read_text().strip())
further = [text for text in requirements if pin(text) not in seen and "'nowhere'" not in text]
header = f"# What {sys.argv[4]} besides cpu.lock, whose packages its environment sees. Made by `make lock`.\n"
target.write_text(header + "\n".join(further) + "\n")
PYTHON
rm "$lock.known" "$lock.bound" "$lock.without" "$lock.new"
