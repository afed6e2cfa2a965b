# make demo [SEED=2] [DEMO_ARGS=...]   sets up .venv and runs the demo
# make test                           sets up .venv and runs the tests (5 to 8 minutes on two cores)
# make test-all                       all cases of large tables and the slow tests, too (over an hour)
# make test-tenth [PART=0..9]         a tenth of what only test-all runs; by default another one each day;
#                 [MINUTES=20]        tests that have not begun by then are skipped, and named
# make test-families                 every model family under every layout (`make test` has a part of it)
# make gpu-check                     what needs a GPU: tests and speed (docs/gpu.md)
# make check                          ruff, mypy and the layering test
# make docs                           builds the documentation as a site, site/index.html
# make bench-setup                    sets up .venv-bench: the libraries that benchmarks compare with
# make openvino-bench-setup           sets up .venv-openvino-bench: openvino-genai, and runs/real_model/openvino for it
# make control-bench-setup            sets up .venv-control-bench: those of benchmarks/compare/control.py
#
# This installs the pinned CPU build of torch. On a machine with CUDA, install by hand instead (docs/gpu.md).

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv-bench/.installed
OPENVINO_STAMP := .venv-openvino-bench/.installed
OPENVINO_MODEL := runs/real_model/openvino
CONTROL_STAMP := .venv-control-bench/.installed
# Many tests start processes: they load compiled modules, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

.PHONY: setup bench-setup openvino-bench-setup control-bench-setup demo test test-all test-tenth test-families \
	gpu-check check docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

bench-setup: setup $(BENCH_STAMP)

$(BENCH_STAMP): constraints.txt benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -r benchmarks/requirements.txt
	touch $@

openvino-bench-setup: setup $(OPENVINO_STAMP) $(OPENVINO_MODEL)

$(OPENVINO_MODEL): | $(OPENVINO_STAMP)
	@test -d runs/real_model/model || { echo 'there is no runs/real_model/model: `python examples/real_model.py` makes it'; exit 1; }
	rm -rf $@.part
	HF_HUB_OFFLINE=1 .venv-openvino-bench/bin/optimum-cli export openvino \
		--model runs/real_model/model --task text-generation-with-past --weight-format fp32 $@.part
	mv $@.part $@

# torchvision, which optimum-intel needs for images alone, is often built for another torch, and fails then.
$(OPENVINO_STAMP): benchmarks/requirements-openvino.txt
	test -x .venv-openvino-bench/bin/python || $(PYTHON) -m venv .venv-openvino-bench
	.venv-openvino-bench/bin/python -m pip install --quiet $(PIP_ARGS) -r benchmarks/requirements-openvino.txt
	.venv-openvino-bench/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

control-bench-setup: setup $(CONTROL_STAMP)

$(CONTROL_STAMP): benchmarks/requirements-control.txt
	test -x .venv-control-bench/bin/python || $(PYTHON) -m venv .venv-control-bench
	.venv-control-bench/bin/python -m pip install --quiet $(PIP_ARGS) -r benchmarks/requirements-control.txt
	touch $@

demo: setup
	$(BIN)/python examples/demo.py $(if $(SEED),--seed $(SEED)) $(DEMO_ARGS)

test: setup
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

test-all: setup
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu"

# Days since 1970: ten days in a row run everything.
PART ?= $(shell expr $$(date +%s) / 86400 % 10)
MINUTES ?= 20

test-tenth: setup
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not gpu" --part $(PART)/10 --minutes $(MINUTES) -rs

test-families: setup
	$(PYTEST) -m "" tests/models/test_families.py

gpu-check: setup
	$(BIN)/python benchmarks/gpu_check.py --json gpu.json

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy realhf
	$(PYTEST) tests/test_layering.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find realhf tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
