#!/bin/sh
# Sees that the Debian packages of the named sections of dependencies.txt are installed:
#
#     tools/setup.sh build test
#
# As root it installs what is missing. Anyone else is told the one command that does, and the exit
# status is 1. Says nothing and touches no network when nothing is missing.
set -eu
here=$(dirname "$0")

wanted=$(awk -v sections=" $* " '!/^#/ && NF && index(sections, " " $1 " ") { print $2 }' \
    "$here/dependencies.txt" | sort -u)

if ! command -v dpkg-query >/dev/null; then
    echo "setup: not a Debian system, so nothing was checked; needed here as Debian 12 names it:" $wanted >&2
    exit 0
fi

missing=
for package in $wanted; do
    status=$(dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null || true)
    case "$status" in
    *not-installed* | "") missing="$missing $package" ;;
    *installed*) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ]; then
    echo "setup: missing packages; install them with" >&2
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends$missing" >&2
    exit 1
fi
echo "setup: installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086  # a list of words
apt-get install -y -q --no-install-recommends $missing
