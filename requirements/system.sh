#!/bin/sh
# Writes the hashed lock of what drives a browser besides the set-up without a GPU: system.sh BIN CPU_LOCK LOCK [ARGUMENT ...]
# Its environment sees that set-up's packages, so they bind the versions chosen here and are not listed again.
set -eu
bin=$1 known=$2 lock=$3
shift 3
"$bin/python" -m pip install --quiet uv
sed -nE 's/^([a-z0-9._-]+==.*[^ ]) +\\$/\1/p' "$known" | grep -v "^torch==" > "$lock.known"
cp "$lock" "$lock.new"
echo "playwright>=1.65" | "$bin/uv" pip compile - \
    --constraints "$lock.known" --python-version 3.11 --universal \
    --no-emit-package typing-extensions --generate-hashes --no-annotate --no-header --quiet \
    --output-file "$lock.new" "$@"
echo "# What make test-system needs besides cpu.lock, whose packages its environment sees. Made by \`make lock\`." > "$lock"
cat "$lock.new" >> "$lock"
rm "$lock.known" "$lock.new"
