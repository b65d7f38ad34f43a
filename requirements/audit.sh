#!/bin/sh
# Writes the hashed lock of the audit's tools, which have an environment of their own: audit.sh BIN LOCK [ARGUMENT ...]
set -eu
bin=$1 lock=$2
shift 2
"$bin/python" -m pip install --quiet uv
cp "$lock" "$lock.new"
printf 'detect-secrets>=1.5\npip-audit>=2.9\n' | "$bin/uv" pip compile - \
    --python-version 3.11 --universal --generate-hashes --no-annotate --no-header --quiet \
    --output-file "$lock.new" "$@"
echo "# What make audit runs. Made by make lock." > "$lock"
cat "$lock.new" >> "$lock"
rm "$lock.new"
