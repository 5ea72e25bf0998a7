# make demo: set up and run the main job.  make test: set up and run every test.
# ARGS reaches pytest: make test ARGS="-k kv_cache".
PYTHON ?= python3
PY := .venv/bin/python
DEMO := demo.jsonl
PROMPT := def read_lines(path):

.PHONY: demo test check test-gpu clean
.SILENT: demo .venv/installed .venv/installed-dev

demo: .venv/installed
	rm -f $(DEMO)
	echo "1 of 2: full precision" >&2
	$(PY) generate.py --compile --prompt "$(PROMPT)" --output_json_path $(DEMO)
	echo >&2; echo "2 of 2: int8 weights" >&2
	$(PY) generate.py --quantization int8wo --compile --prompt "$(PROMPT)" --output_json_path $(DEMO)
	echo; echo "Both runs:"
	$(PY) -m benchlog table $(DEMO)
	echo; echo "The log is benchmarks.txt; these two runs are its last two lines:"
	tail -n 2 benchmarks.txt | cut -c 1-110
	echo; echo "Next, your own model: $(PY) generate.py --checkpoint_path PATH --compile   (--help shows more)"

test: .venv/installed-dev
	$(PY) -m pytest $(ARGS)

test-gpu: .venv/installed-dev
	$(PY) -m pytest -m gpu $(ARGS)

check: .venv/installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m benchlog check benchmarks.txt

clean:
	rm -rf .venv build *.egg-info

# A stamp newer than pyproject.toml means there is nothing to install.
.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quantbench needs Python 3.11 or newer")'
	echo "Installing into .venv: some minutes the first time, nothing the second" >&2
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	echo "Installing what the tests need into .venv" >&2
	$(PY) -m pip install --quiet --editable '.[dev]'
	touch $@
