#!/bin/sh
# Trains the model of this folder and says what can be done with it. `make quickstart` has installed
# and built what is needed. Everything lands in .quickstart/ of the repository.
#
# An interrupted run goes on where its newest commit is. A finished one is thrown away and trained
# again, from the same seed.
set -eu
cd "$(dirname "$0")/../.."
data=.quickstart/perl-doc.jsonl
run=.quickstart/run
config=examples/quickstart/run.toml
steps=$(sed -n 's/^steps = *\([0-9]*\).*/\1/p' $config)

mkdir -p .quickstart
[ -s $data ] || python3 examples/quickstart/extract_text.py $data

if [ -d "$run/export/step-$steps" ]; then
    echo "quickstart: $run is finished; starting again"
    rm -rf "$run"
elif [ -d "$run" ]; then
    echo "quickstart: going on with $run"
fi
./mtlaunch $config "$@"

cat <<TEXT

The trained model, a Hugging Face folder:  $run/export/step-$steps
Let it write:                              ./mtlaunch generate $run --prompt "The value of" --temperature 0.7
What every step was:                       $run/metrics.jsonl
Proof of what is on disk:                  ./mtlaunch digest $run
TEXT
