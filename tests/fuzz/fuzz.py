#!/usr/bin/env python3
"""Runs the fuzz targets: every committed input, then SECONDS of new ones each.

    tests/fuzz/fuzz.py                     5 s each, 2 at a time (`make test`: with --corpus-only)
    tests/fuzz/fuzz.py --seconds 600 ring  one target for ten minutes
    tests/fuzz/fuzz.py --seed 7 ...        the same inputs again (with one target and --runs)
    tests/fuzz/fuzz.py --minimize          what the last runs found goes into the corpus, minimized
    tests/fuzz/fuzz.py --coverage          what corpus and found inputs reach of the functions fuzzed

`make fuzz SECONDS=n` is the first with n seconds. The targets are built as needed. New inputs that reached new code stay in
build/fuzz/<target>/new and are tried again by the next run; a crash is left in
build/fuzz/<target>/, with the command that repeats it in the output. Prints `ok`, `not ok` or
`skip` per target.
"""
import argparse
import concurrent.futures
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CORES = len(os.sched_getaffinity(0))
BINARIES = ROOT / "build" / "fuzzer-no-link-address-undefined" / "tests" / "fuzz"
PROFILED = ROOT / "build" / "fuzzer-no-link" / "tests" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
FOUND = ROOT / "build" / "fuzz"
INPUT_SECONDS_MAX = 20  # one input: a hang is a failure
CORPUS_SECONDS_MAX = 30  # beyond --seconds: the committed inputs and the start
REPLAY_SECONDS_MAX = 600
INPUT_BYTES_MAX = {"message": 8300, "run_toml": 4096, "token_shard": 1400, "safetensors": 2048, "model_config": 2048,
                   "checkpoint": 6144}
INPUT_BYTES_DEFAULT = 512
# what a single allocation may take: io_worker's streaming buffers are 8 MiB
ALLOCATION_MIB_MAX = {"message": 1, "ring": 1, "plan": 8, "model_config": 64}
ALLOCATION_MIB_DEFAULT = 32
OPTIONS = {"ASAN_OPTIONS": "quarantine_size_mb=8:detect_stack_use_after_return=1",
           "UBSAN_OPTIONS": "print_stacktrace=1"}  # fmt: skip
PROBE = "int LLVMFuzzerTestOneInput(const char *d, long n){(void)d; return n < 0;}"


def missing():
    """Why targets cannot be built here, or None."""
    with tempfile.TemporaryDirectory() as tmp:
        command = ["clang", "-x", "c", "-", "-fsanitize=fuzzer,address,undefined", "-o", tmp + "/probe"]
        try:
            done = subprocess.run(command, input=PROBE, capture_output=True, text=True)
        except FileNotFoundError:
            return "clang is not installed"
        return None if done.returncode == 0 else "clang has no libFuzzer here (libclang-rt-14-dev)"


def build(goal):
    """True if the targets are there; else says why not."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "--no-print-directory", "-k", "-j%d" % CORES, goal], cwd=ROOT, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
    if done.returncode != 0:
        print(done.stdout[-8000:])
    return done.returncode == 0


def names():
    return sorted(p.stem[len("fuzz_"):] for p in (ROOT / "tests" / "fuzz").glob("fuzz_*.c"))


def command_of(target, arguments, binaries=BINARIES):
    return [str(binaries / ("fuzz_" + target)),
            "-timeout=%d" % INPUT_SECONDS_MAX,
            "-rss_limit_mb=2048",
            "-malloc_limit_mb=%d" % ALLOCATION_MIB_MAX.get(target, ALLOCATION_MIB_DEFAULT),
            "-max_len=%d" % INPUT_BYTES_MAX.get(target, INPUT_BYTES_DEFAULT),
            "-print_final_stats=1"] + arguments  # fmt: skip


def run(target, arguments, seconds_max, binaries=BINARIES, profile="/dev/null"):
    """Runs a target with a directory of its own in memory. Returns status and output."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="mt-fuzz-", dir=place)
    try:
        env = dict(os.environ, FUZZ_DIRECTORY=directory, LLVM_PROFILE_FILE=profile, **OPTIONS)
        done = subprocess.run(command_of(target, arguments, binaries), cwd=ROOT, env=env, timeout=seconds_max,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace") + "\nnot finished after %d s\n" % seconds_max
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def folders(target, new=None):
    new = pathlib.Path(new) if new else FOUND / target / "new"
    for folder in (FOUND / target, new):
        folder.mkdir(parents=True, exist_ok=True)
    return [str(new)] + [str(d) for d in [CORPUS / target] if d.is_dir()]


def why(output):
    for pattern in (r".*oracle violated.*", r".*CHECK\(.*", r".*runtime error.*", r"==\d+== ?ERROR.*", r"not finished.*"):
        found = re.search(pattern, output)
        if found:
            return found.group(0).strip()[:300]
    return "see above"


def fuzz(target, options):
    """One target. Returns the line to print, and whether it is a failure."""
    seed = options.seed if options.seed is not None else random.randrange(1, 1 << 31)
    started = time.monotonic()
    artifacts = "-artifact_prefix=%s/" % (FOUND / target)
    with tempfile.TemporaryDirectory() as tmp:
        inputs = folders(target, tmp if options.corpus_only else None)
        status, output = run(target, ["-runs=0", artifacts] + inputs, REPLAY_SECONDS_MAX)
        replay = time.monotonic() - started  # libFuzzer counts it into its time
        if status == 0:
            limit = "-runs=%d" % options.runs if options.runs else (
                "-max_total_time=%d" % (options.seconds + math.ceil(replay)))
            status, output = run(target, ["-seed=%d" % seed, artifacts, limit] + inputs,
                                 2 * (options.seconds + replay) + CORPUS_SECONDS_MAX)  # fmt: skip
    executed = re.search(r"number_of_executed_units: (\d+)", output)
    executed = int(executed.group(1)) if executed else 0
    spent = time.monotonic() - started
    if status == 0 and executed > 0:
        return "ok fuzz_%s: %d inputs in %.0f s, seed %d" % (target, executed, spent, seed), False
    print("".join("  | %s\n" % line for line in output.splitlines()[-60:]), end="")
    unit = re.search(r"Test unit written to (\S+)", output)
    if unit:
        print("  again: FUZZ_DIRECTORY=$(mktemp -d) %s %s" % (command_of(target, [])[0], unit.group(1)))
    return "not ok fuzz_%s: seed %d: %s" % (target, seed, why(output)), True


def minimize(target):
    """Merges the corpus and what was found into a corpus that reaches as much with fewer bytes."""
    with tempfile.TemporaryDirectory() as tmp:
        status, output = run(target, ["-merge=1", tmp] + folders(target), 600)
        if status != 0:
            print(output[-4000:])
            return "not ok fuzz_%s: merge failed" % target, True
        old = CORPUS / target
        old.mkdir(parents=True, exist_ok=True)
        for path in old.iterdir():
            if not path.name.startswith(("found-", "kept-")):  # what once broke something stays
                path.unlink()
        for path in pathlib.Path(tmp).iterdir():
            shutil.copyfile(path, old / path.name[:16])
        size = sum(p.stat().st_size for p in old.iterdir())
        return "ok fuzz_%s: %d inputs, %d bytes" % (target, len(list(old.iterdir())), size), False


# the functions that the targets are about; of a file named without functions, all that were called
TARGETED = {
    "launcher/toml_reader.cpp": "",
    "launcher/config.c": "",
    "launcher/config_value.c": "",
    "ipc/message.c": "message_decode has_our_shape field_bytes get_fields get_text get_number",
    "ipc/ring.c": "ring_consume ring_publish ring_waiting",
    "ipc/plan.c": "plan_check",
    "ipc/segment.c": "segment_attach map_plan check_places place_is_inside map_regions map_rings map unmap_all",
    "ipc/page_image.c": "",
    "io_worker/commit.c": "page_entry_valid page_entry_seal commit_table_fill fill_overlap commit_record_verify "
                          "commit_state_hash commit_begin",
    "io_worker/store.c": "store_open open_existing common_state missing_superblock read_superblocks refuse_other_run "
                         "open_ready compare_geometry compare_run adopt_file adopt_files",
    "io_worker/store_superblock.c": "store_superblock_read store_superblock_load",
    "io_worker/store_files.c": "store_file_check_size",
    "io_worker/store_pages.c": "store_map_pages store_check_entry check_entry_parts store_verify_image",
    "io_worker/store_recover.c": "",
    "io_worker/store_scan.c": "",
    "io_worker/page_tables.c": "page_tables_adopt state_is_good check_table start_forming publish free_place",
    "io_worker/data.c": "",
    "io_worker/data_source.c": "",
    "io_worker/data_text.c": "",
    "io_worker/data_index.c": "",
    "model/jsonl.c": "",
    "model/safetensors.c": "safetensors_open_file open_single add_file open_header read_header add_header check_cover "
                           "add_tensor parse_tensor parse_shape parse_offsets check_metadata sort_names "
                           "safetensors_open_folder open_index open_weight_map open_shards collect_shards "
                           "check_shard_name check_shard check_complete add_file_of "
                           "safetensors_find safetensors_read safetensors_read_raw read_at",
    "model/weights.c": "model_check_weights check_present has_shape is_ignored",
    "io_worker/import.c": "import_open open_source check_tied_head compare_tied import_page read_part check_finite",
    "model/config.c": "",
    "model/layout.c": "model_layout_init",
}  # fmt: skip


def functions_of(report):
    """(name, lines, lines missed, branches, branches missed) of `llvm-cov report -show-functions`."""
    for line in report.splitlines():
        fields = line.split()
        if len(fields) == 10 and fields[1].isdigit():
            yield [fields[0].split(":")[-1]] + [int(fields[i]) for i in (4, 5, 7, 8)]


def print_coverage(reports):
    total = [0, 0, 0, 0]
    print("%-28s %-26s %14s %14s" % ("file", "function", "lines", "branches"))
    for source, wanted in TARGETED.items():
        for name, lines, lines_missed, branches, branches_missed in functions_of(reports[source]):
            if name == "TOTAL" or lines == lines_missed or (wanted and name not in wanted.split()):
                continue
            total = [t + x for t, x in zip(total, (lines, lines_missed, branches, branches_missed))]
            print("%-28s %-26s %7d of %3d %7d of %3d" % (
                source, name, lines - lines_missed, lines, branches - branches_missed, branches))  # fmt: skip
    print("all: lines %d of %d (%.1f %%), branches %d of %d (%.1f %%)" % (
        total[0] - total[1], total[0], 100 - 100 * total[1] / total[0],
        total[2] - total[3], total[2], 100 - 100 * total[3] / total[2]))  # fmt: skip


def coverage(targets):
    """Lines and branches of the functions fuzzed that corpus and found inputs reach."""
    if not build("fuzz-coverage"):
        return 1
    with tempfile.TemporaryDirectory() as tmp:
        for target in targets:
            run(target, ["-runs=0"] + folders(target), 600, PROFILED, "%s/%s.profraw" % (tmp, target))
        profiles = [str(p) for p in pathlib.Path(tmp).glob("*.profraw")]
        subprocess.run(["llvm-profdata", "merge", "-o", tmp + "/all"] + profiles, check=True)
        objects = [str(PROFILED / ("fuzz_" + t)) for t in targets]
        command = ["llvm-cov", "report", "-instr-profile=" + tmp + "/all", "-show-functions", objects[0]]
        command += [option for other in objects[1:] for option in ("-object", other)]
        report = lambda source: subprocess.run(command + [source], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout  # fmt: skip
        print_coverage({source: report(source) for source in TARGETED})
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=5, help="of new inputs per target")
    parser.add_argument("--runs", type=int, help="inputs per target instead of seconds")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--corpus-only", action="store_true", help="neither read nor keep what other runs found")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("targets", nargs="*")
    options = parser.parse_args()
    known = names()
    unknown = [t for t in options.targets if t not in known]
    if unknown:
        parser.error("unknown: %s; targets: %s" % (" ".join(unknown), " ".join(known)))
    reason = missing()
    targets = options.targets or known
    if reason:
        for target in targets:
            print("skip fuzz_%s: %s" % (target, reason))
        return 0
    if options.coverage:
        return coverage(targets)
    if not build("fuzz-build"):
        print("not ok the fuzz targets are built")
        return 1
    work = minimize if options.minimize else lambda target: fuzz(target, options)
    failed = False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for line, bad in pool.map(work, targets):
            print(line, flush=True)
            failed |= bad
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
