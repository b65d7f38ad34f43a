#!/bin/sh
# Installs a locked environment: install.sh ENV LOCK [--sees ENV] [--ours]. PYTHON names its Python, TORCH_INDEX where
# PyTorch's CPU build is. Looks at the machine before anything is fetched; install.py does the rest, and runs on any
# Python from 3.8.
set -eu
machine="$(uname -s) $(uname -m)"
if [ "$machine" != "Linux x86_64" ]; then
    echo "The whole stack runs on Linux on x86-64 alone, and this is $machine: here the proxy and the judge run in front of a vLLM elsewhere (pip install '.[proxy,judge]'), or everything in containers (docs/deploy.md)." >&2
    exit 1
fi
script=$(dirname "$0")/install.py
for python in "${PYTHON:-python3}" python3.11 python3.12 python3.13 python3 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2> /dev/null; then
        exec "$python" "$script" "$@"
    fi
done
if command -v uv > /dev/null; then
    exec uv run --no-project --quiet --python 3.11 "$script" "$@"
fi
echo "There is no Python here: install Python 3.11, 3.12 or 3.13, or uv, which fetches one." >&2
exit 1
