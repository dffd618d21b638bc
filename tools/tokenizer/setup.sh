#!/bin/sh
# Makes the tokenizing environment: a Python environment with the packages that requirements.txt pins by hash.
#
#     tools/tokenizer/setup.sh [DIRECTORY]      default: build/tokenizer of the checkout, or venv beside an installed copy
#
# Needs python3 with venv (Debian: python3-venv) and, once, a package index. It appears under its name only when
# it is whole. Says nothing and touches no network when it is there and as pinned.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -gt 0 ]; then
    target=$1
elif [ -f "$here/../../Makefile" ]; then
    target=$(cd "$here/../.." && pwd)/build/tokenizer
else
    target=$here/venv
fi
cmp -s "$here/requirements.txt" "$target/requirements.txt" && exit 0

mkdir -p "$(dirname "$target")"
new=$target.new.$$
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
python3 -m venv --without-pip "$new" || {
    echo "setup.sh: python3 cannot make an environment; install it, on Debian: python3-venv" >&2
    exit 1
}
# pip of the system, or else the one that comes with Python
if python3 -m pip --version >/dev/null 2>&1; then
    pip="python3 -m pip --python $new/bin/python"
else
    "$new/bin/python" -m ensurepip >/dev/null
    pip="$new/bin/python -m pip"
fi
$pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes ${PIP_ONCE:+--retries 0 --timeout 5} \
    -r "$here/requirements.txt"
cp "$here/requirements.txt" "$new/requirements.txt"
rm -rf "$target"
mv "$new" "$target"
trap - EXIT
echo "tokenizing environment: $target"
