#!/usr/bin/env python3
"""examples/FAMILY/MODEL/: `validate` accepts each run file with its config.json.

A folder dropped there is tested. A family in examples/unsupported.txt must be refused by name, so
that its line cannot outlive the refusal. A model larger than this machine must be refused for that
alone, with the right amount.
"""
import glob
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403

EXAMPLES = os.path.join(ROOT, "examples")
LLMC_UINT32 = 20240801  # any vocabulary
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def unsupported():
    with open(os.path.join(EXAMPLES, "unsupported.txt")) as f:
        return {line.strip() for line in f if line.strip() and not line.startswith("#")}


def folders():
    return sorted(os.path.dirname(p) for p in glob.glob(os.path.join(EXAMPLES, "*", "*", "run.toml")))


def parameters_of(folder):
    """What the run file's first line says."""
    with open(os.path.join(folder, "run.toml")) as f:
        return int(re.match(r"# .*: ([0-9,]+) parameters\.$", f.readline().rstrip()).group(1).replace(",", ""))


def shared_memory_of(text):
    amount, unit = re.search(r"needs ([0-9.]+) ([kMGT]B) of shared memory", text).groups()
    return float(amount) * UNITS[unit]


def validate(t, folder, *more):
    data = os.path.join(t.dir, "train.bin")
    if not os.path.exists(data):
        write_llmc_shard(data, tokens_of(40000), magic=LLMC_UINT32)
    return mtlaunch("validate", os.path.join(folder, "run.toml"), "--run.output_dir=" + os.path.join(t.dir, "run"),
                    "--model.init=random", '--data.train=["%s"]' % data, "--memory.offload_dir=[]", *more)


def expect_refused_by_name(folder, result):
    equal(result.status, 2, "status of %s, which is in examples/unsupported.txt: %s" % (folder, result))
    with open(os.path.join(folder, "config.json")) as f:
        name = json.load(f)["architectures"][0]
    check("config.json: architectures: expected" in str(result) and name in str(result), str(result))


def expect_accepted(folder, result):
    """Valid, with the published number of parameters; or it needs 6 bytes of RAM for each of them."""
    parameters = parameters_of(folder)
    if result.status == 3:
        share = shared_memory_of(str(result)) / (6 * parameters)
        check(1.0 < share < 1.1, "6 x %d bytes: %s" % (parameters, result))
        return
    equal(result.status, 0, "status of %s: %s" % (folder, result))
    check("valid: %d parameters" % parameters in str(result), "%d parameters: %s" % (parameters, result))


def add(folder):
    name = os.path.relpath(folder, EXAMPLES)

    def function(t):
        result = validate(t, folder)
        if name.split(os.sep)[0] in unsupported():
            expect_refused_by_name(folder, result)
        else:
            expect_accepted(folder, result)

    add_test("example_" + re.sub(r"\W", "_", name), function)


for found in folders():
    add(found)


@test
def every_folder_has_both_files_and_every_unsupported_family_is_there(t):
    check(len(folders()) >= 20, "%d examples" % len(folders()))
    for folder in glob.glob(os.path.join(EXAMPLES, "*", "*", "")):
        for name in ("config.json", "run.toml"):
            check(os.path.exists(os.path.join(folder, name)), "%s: no %s" % (folder, name))
    families = {os.path.basename(os.path.dirname(f)) for f in folders()}
    equal(sorted(unsupported() - families), [], "unsupported families without an example")
    check(families - unsupported(), "no family is supported")


@test
def a_config_of_another_shape_is_noticed(t):
    """The test above would see a wrong number of parameters."""
    folder = os.path.join(t.dir, "SmolLM2-135M")
    shutil.copytree(os.path.join(EXAMPLES, "llama", "SmolLM2-135M"), folder)
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    with open(path, "w") as f:
        json.dump(dict(config, num_hidden_layers=29), f)
    result = validate(t, folder)
    try:
        expect_accepted(folder, result)
    except TestFailure:
        return
    check(False, str(result))


@test
def pages_that_small_layers_fill_badly_are_told_with_what_better_ones_save(t):
    folder = os.path.join(EXAMPLES, "qwen3_moe", "Qwen3-30B-A3B")

    def needed(page_elements):
        result = validate(t, folder, "--memory.page_elements=%d" % page_elements, "--memory.max_ram=8GB")
        equal(result.status, 3, str(result))
        return shared_memory_of(str(result)), str(result)

    wasteful, text = needed(4 << 20)
    page, amount, unit = re.search(r"\[memory\] page_elements = ([0-9]+) needs ([0-9.]+) ([MGT]B) less", text).groups()
    better, text = needed(int(page))
    check("page_elements" not in text, text)
    saved = float(amount) * UNITS[unit]
    check(abs(wasteful - better - saved) < 0.02 * saved, "%g bytes, then %g; %g were promised" % (wasteful, better, saved))


main()
