#!/bin/sh
# Writes the hashed lock of the audit's tools, which have an environment of their own: audit.sh BIN LOCK
set -eu
bin=$1 lock=$2
"$bin/python" -m pip install --quiet uv
echo "# What make audit runs. Made by make lock." > "$lock.new"
printf 'detect-secrets>=1.5\npip-audit>=2.9\n' | "$bin/uv" pip compile - \
    --python-version 3.11 --universal --generate-hashes --no-annotate --no-header --quiet >> "$lock.new"
mv "$lock.new" "$lock"
