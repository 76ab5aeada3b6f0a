# All targets need only Python 3.11 to 3.13 and make:
#
#   make serve      install, then start the server with the built-in model on 127.0.0.1:8000
#   make test       install, then run every test that needs neither a GPU nor RDMA
#   make test-rdma  tests with real RDMA verbs, in a virtual machine (Debian 12; the first run needs root)
#   make test-clients  unmodified clients of other projects, for Python and Node, against the demonstration model
#   make test-ray   a fleet in a local Ray cluster, in a separate environment
#   make test-browser  the live page, in this machine's Chromium
#   make test-aarch64  the front end on an emulated aarch64 (Debian 12; the first run needs root)
#   make test-kubernetes  the manifests of deploy/kubernetes, against Kubernetes' schemas
#   make lint       conflict markers, ruff and mypy
#   make fuzz       random faults against scheduler and queues, for SECONDS; failing examples are saved. ARGS='--processes 8'
#   make decisions  the sides of the rules' conditions that random worlds decide. ARGS='--worlds 600 --write'
#   make fuzz-hostile  ten million random entries and claims of a hostile front end, in the simulator. ARGS='--seed 7'
#   make fuzz-schemas  random JSON schemas and outputs, checked by another validator. ARGS='--count 1000'
#   make fuzz-http  a million damaged requests: no 5xx, no hang, no leak. ARGS='--requests 20000'
#   make fleet-kills  one of two engines is killed repeatedly under streams: each client must get the right text
#   make fleet-kills-rdma  the same over RDMA in the virtual machine, also with cut links
#   make rolling-upgrade  engines and front ends are replaced one by one under load: no request of ten thousand may fail
#   make soak       random requests, kills and stops, for SECONDS: no lost or wrong token, no leak
#   make attack     random attacks on a front end, two at a time, next to a well-behaved client, for SECONDS
#   make mutants    small changes to the verified code, made by rule; a test must detect each. ARGS='--count 60', or --all
#   make coverage   check that the tests reach every line and branch of scheduler, prefix cache and queues
#   make test-gpu   tests that need an NVIDIA GPU; without a GPU they are skipped with a message. ARGS='-n 8': eight at a time
#   make bench      benchmarks that need no GPU, into benchmarks/results; a quarter of an hour on an idle machine
#   make paper      the grid of request rates, isolated and interfered, for MODEL; takes hours, and can be resumed
#   make tables     update the figures of README and docs, and the plots, from benchmarks/results
#   make measure    measure all of these figures on this machine: bench, and with a GPU decode steps and grids
#   make docs       update the generated parts of docs/
#   make clean      remove the environment and all build products
#
# Variables: MODEL=folder-or-hub-id HOST=127.0.0.1 PORT=8000 ARGS='more options'   for make serve (ARGS also for fuzz, bench, paper, measure, test-gpu)
#            T='tests/plain -k config'                                           for make test and test-gpu: tests to run
#            SECONDS=600                                                         for make fuzz, make soak and make attack
#            PYTHON=python3.12 VENV=.venv                                        Python, and folder of the environment
#            VENV=system                                                         no environment: use PYTHON and its installed
#                                                                                packages; for machines without a network
#            TORCH_ARGS='--index-url URL'                                        pip's options for installing torch

MODEL ?= demo
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
T ?= $(if $(filter test-gpu,$(MAKECMDGOALS)),tests/gpu,tests)
VENV ?= .venv
TORCH_ARGS ?=

# With an NVIDIA GPU: the torch release that the GPU extra pins. Without: one that has a CPU build for every platform.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
EXTRA := $(if $(GPU),gpu,cpu)
TORCH ?= $(if $(GPU),2.11.0,2.13.0)

# The Python that runs everything, and the stamp of an environment with what a target needs: none with VENV=system.
ifeq ($(VENV),system)
RUNNER := $(or $(PYTHON),python3)
STAMP =
else
RUNNER := $(VENV)/bin/python
STAMP = $(VENV)/.$(1)
endif
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-input
comma := ,
# Install, and say what it takes and took. $(1): what, in words. $(2): arguments of pip. $(3): how long it may take.
INSTALL = echo "install $(1): $(3)"; began=$$(date +%s); $(PIP) $(2) && \
  echo "  took $$(($$(date +%s) - began)) s; $(VENV) has $$(du -sm $(VENV) | cut -f1) MB"
# Threads of OpenMP that wait shall sleep: several tests share the cores. Byte code is kept, for the hundreds of processes that tests start.
PYTHON_OF_TESTS := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} TRITON_CACHE_DIR=$(CURDIR)/build/triton $(RUNNER)
RUN := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(PYTHON_OF_TESTS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-rdma test-clients test-ray test-browser test-aarch64 test-kubernetes lint fuzz decisions fuzz-hostile fuzz-schemas fuzz-http soak attack
.PHONY: fleet-kills fleet-kills-rdma rolling-upgrade mutants coverage
.PHONY: test-gpu bench paper tables measure docs clean

help:
	@sed -n 's/^#   *\(make [a-z]\)/  \1/p' Makefile

# ---- environment: each step leaves a stamp, so that a second run starts at once ------------------------------------------

# PYTHON may name an interpreter; otherwise the first one on the path that is new enough and not too new.
$(VENV)/.created:
	@python=$$(for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo "$$p" && break; done); \
	if [ -z "$$python" ]; then echo "blinkpy needs Python 3.11, 3.12 or 3.13; none was found (PYTHON=/path/to/python names one)" >&2; exit 1; fi; \
	echo "environment: $$("$$python" --version) in $(VENV)"; \
	"$$python" -m venv --clear $(VENV) || { rm -rf $(VENV); \
	  echo "can't make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.torch-$(TORCH): | $(VENV)/.created
	@$(call INSTALL,torch $(TORCH),$(TORCH_ARGS) torch==$(TORCH),some minutes)
	@rm -f $(VENV)/.torch-* && touch $@

# An engine on the CPU needs no torch.
$(VENV)/.serve-$(EXTRA): pyproject.toml | $(VENV)/$(if $(GPU),.torch-$(TORCH),.created)
	@$(call INSTALL,blinkpy with all that it needs on this machine,--editable '.[$(EXTRA)]',$(if $(GPU),a minute or more,half a minute))
	@touch $@

# torch's CPU build brings no Triton: take the release that the GPU side uses.
$(VENV)/.dev: pyproject.toml | $(VENV)/.torch-$(TORCH)
	@$(VENV)/bin/python -m pip show --quiet triton 2>/dev/null || $(PIP) triton==3.6.0
	@$(call INSTALL,blinkpy$(comma) test tools and linters,--editable '.[$(EXTRA)$(comma)dev]',a minute or more)
	@touch $(VENV)/.serve-$(EXTRA) $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.torch-$(TORCH)
	@$(call INSTALL,blinkpy and what the benchmarks need,--editable '.[$(EXTRA)$(comma)bench]',a minute or more)
	@touch $(VENV)/.serve-$(EXTRA) $@

# ---- what people ask for -------------------------------------------------------------------------------------------------

serve: $(call STAMP,serve-$(EXTRA))
	@exec $(RUNNER) -m blinkpy serve '$(MODEL)' --host '$(HOST)' --port '$(PORT)' $(ARGS)

# All tests: four at a time on two cores, since they wait for servers a third of their time. Those of a file are one process's, so
# that they share its fixtures; tests/conftest.py has their order and torch's number of threads.
SPREAD = $(if $(filter-out tests,$(T)),,-n 4 --dist loadfile --no-loadscope-reorder)

test: $(call STAMP,dev)
	@mkdir -p build
	@$(PYTHON_OF_TESTS) -m pytest $(T) $(SPREAD) $(foreach kind,gpu rdma aarch64 clients ray_cluster browser,--ignore=tests/$(kind))

test-rdma: $(call STAMP,dev)
	@PYTHONPATH=tests $(RUNNER) -m rdma.vm.suite $(if $(filter-out tests,$(T)),$(T))

# One of the clients needs torch: without TORCH_ARGS, the index brings several GB for GPUs.
build/clients/.installed: tests/clients/requirements.txt tests/clients/package-lock.json | $(call STAMP,serve-$(EXTRA))
	@$(RUNNER) -m venv build/clients
	@build/clients/bin/python -m pip install -qq --disable-pip-version-check --no-input $(TORCH_ARGS) torch==$(TORCH)
	@build/clients/bin/python -m pip install -qq --disable-pip-version-check --no-input -r tests/clients/requirements.txt
	@mkdir -p build/clients/node && cp tests/clients/package.json tests/clients/package-lock.json build/clients/node
	@npm ci --prefix build/clients/node --silent --no-audit --no-fund || { \
	  echo "two of the clients are for Node: npm of Node 20 or later is needed (Debian: apt install npm)" >&2; exit 1; }
	@touch $@

# In another environment: frameworks for agents want other versions. The agents for the command line have 900 MB.
build/agents/.installed: tests/clients/scripted/requirements.txt tests/clients/scripted/package.json | $(call STAMP,serve-$(EXTRA))
	@$(RUNNER) -m venv build/agents
	@build/agents/bin/python -m pip install -qq --disable-pip-version-check --no-input -r tests/clients/scripted/requirements.txt
	@mkdir -p build/agents/node && cp tests/clients/scripted/package.json build/agents/node
	@npm install --prefix build/agents/node --silent --no-audit --no-fund --no-package-lock || { \
	  echo "the agents are for Node: npm of Node 20 or later is needed (Debian: apt install npm)" >&2; exit 1; }
	@touch $@

# All, or those of T: tests/clients/scripted has the agents.
OF_CLIENTS = $(if $(filter tests/clients/scripted%,$(T)),,$(if $(filter-out tests,$(T)),$(T),tests/clients --ignore=tests/clients/scripted))
OF_AGENTS = $(if $(filter-out tests,$(T)),$(if $(filter tests/clients/scripted%,$(T)),$(T)),tests/clients/scripted)
TEST_CLIENTS = BLINKPY_PYTHON=$$(command -v $(RUNNER)) build/$(1)/bin/python -m pytest -c tests/clients/pytest.ini $(2)

test-clients: $(if $(OF_CLIENTS),build/clients/.installed) $(if $(OF_AGENTS),build/agents/.installed) $(call STAMP,serve-$(EXTRA))
	$(if $(OF_CLIENTS),@$(call TEST_CLIENTS,clients,$(OF_CLIENTS)))
	$(if $(OF_AGENTS),@$(call TEST_CLIENTS,agents,$(OF_AGENTS)))

# In an environment of its own, like the clients: Ray is large.
build/ray/.installed: pyproject.toml | $(call STAMP,serve-$(EXTRA))
	@$(RUNNER) -m venv build/ray
	@build/ray/bin/python -m pip install -qq --disable-pip-version-check --no-input --editable '.[cpu,ray]' \
	  'pytest>=9,<10' 'pytest-timeout>=2.4,<3' 'httpx>=0.28,<1'
	@touch $@

test-ray: build/ray/.installed
	@PYTHONPATH=$(CURDIR):$(CURDIR)/tests build/ray/bin/python -m pytest -c tests/ray_cluster/pytest.ini $(if $(filter-out tests,$(T)),$(T),tests/ray_cluster)

test-browser: $(call STAMP,dev)
	@$(RUNNER) -c 'import playwright' 2>/dev/null || $(RUNNER) -m pip install -qq --disable-pip-version-check --no-input 'playwright>=1.50,<2'
	@$(RUN) -m pytest $(if $(filter-out tests,$(T)),$(T),tests/browser)

test-aarch64: $(call STAMP,dev)
	@PYTHONPATH=tests $(RUNNER) -m aarch64.suite $(if $(filter-out tests,$(T)),$(T))

# In an environment of its own: the schemas of all versions are large.
build/kubernetes/.installed:
	@$(or $(wildcard $(VENV)/bin/python),python3) -m venv build/kubernetes
	@build/kubernetes/bin/python -m pip install -qq --disable-pip-version-check --no-input kubernetes-validate==1.37.0
	@touch $@

test-kubernetes: build/kubernetes/.installed
	@for version in 1.30 1.37; do \
	  build/kubernetes/bin/kubernetes-validate --strict -k $$version deploy/kubernetes/*.yaml || exit 1; done

lint: $(call STAMP,dev)
	@if grep -rnIE '^(<<<<<<< |=======$$|>>>>>>> )' --exclude-dir=.git --exclude-dir=build --exclude-dir='$(VENV)' .; then \
	  echo "make lint: a merge left these conflict markers" >&2; exit 1; fi
	@$(RUNNER) -m ruff check .
	@$(RUNNER) -m mypy -n 2
	@$(RUNNER) tools/sizes.py

fuzz: $(call STAMP,dev)
	@PYTHONPATH=.:tests $(RUN) tools/fuzz.py $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

decisions: $(call STAMP,dev)
	@PYTHONPATH=.:tests:tools $(RUN) -m decisions $(ARGS)

fuzz-hostile: $(call STAMP,dev)
	@PYTHONPATH=. $(RUN) tools/fuzz_hostile.py $(ARGS)

fuzz-schemas: $(call STAMP,dev)
	@PYTHONPATH=.:tests $(RUN) tools/fuzz_schemas.py $(ARGS)

# In an environment of its own: it brings a pytest that the tests were not written for.
build/fuzz-http/.installed:
	@$(or $(wildcard $(VENV)/bin/python),python3) -m venv build/fuzz-http
	@build/fuzz-http/bin/python -m pip install -qq --disable-pip-version-check --no-input schemathesis==4.32.5
	@touch $@

fuzz-http: $(call STAMP,dev) build/fuzz-http/.installed
	@PYTHONPATH=.:tests $(RUN) tools/fuzz_http.py --schemathesis build/fuzz-http/bin/schemathesis $(ARGS)

soak: $(call STAMP,dev)
	@PYTHONPATH=.:tests:tools $(RUN) -m soak $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

attack: $(call STAMP,dev)
	@PYTHONPATH=.:tests:tools $(RUN) -m attack $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

fleet-kills: $(call STAMP,dev)
	@PYTHONPATH=.:tests $(RUN) tools/fleet_kills.py $(ARGS)

fleet-kills-rdma: $(call STAMP,dev)
	@PYTHONPATH=.:tests $(RUN) tools/fleet_kills_rdma.py $(ARGS)

rolling-upgrade: $(call STAMP,dev)
	@PYTHONPATH=.:tests:tools $(RUN) tools/rolling_upgrade.py $(ARGS)

mutants: $(call STAMP,dev)
	@PYTHONPATH=.:tests:tools $(RUN) -m mutants $(ARGS)

# What reaches the verified code, and the files of it.
REACH = tests/compiled/scheduler tests/compiled/recording tests/plain/link tests/verified
COVERED = $$($(RUNNER) -c 'from blinkpy.sources import VERIFIED, source_files; print(*source_files(VERIFIED), sep=",")')

coverage: $(call STAMP,dev)
	@mkdir -p build
	@$(RUN) -m coverage run --include="$(COVERED)" -m pytest -q $(REACH)
	@$(RUN) -m coverage report

# Two runs: ARGS='-n 8' spreads the tests over processes that share the GPU, and some need it for themselves. A run that has no
# test to do (5) is no failure, as long as the other one has some.
TEST_GPU = $(RUN) -m pytest $(T) $(ARGS)
ONE_BY_ONE = $(if $(filter -n% --numprocesses%,$(ARGS)),-n 0)

test-gpu:
ifeq ($(GPU),)
	@echo "make test-gpu: SKIPPED, because nvidia-smi finds no NVIDIA GPU on this machine; nothing was tested"
else
	@$(if $(call STAMP,dev),$(MAKE) --no-print-directory $(call STAMP,dev))
	@$(if $(filter -m%,$(ARGS)),$(error make test-gpu uses pytest's -m itself; choose tests by T= or -k))$(TEST_GPU) -m 'not whole_gpu'; beside=$$?; $(TEST_GPU) $(ONE_BY_ONE) -m whole_gpu; alone=$$?; \
	case "$$beside $$alone" in "0 0"|"0 5"|"5 0") ;; *) exit 1;; esac
endif

bench: $(call STAMP,bench)
	@for name in queue_round_trip control_overhead front_end_cpu cpu_engine rdma_cpu; do $(RUNNER) -m benchmarks.parts.$$name $(ARGS) || exit 1; done

paper: $(call STAMP,bench)
	@$(RUNNER) -m benchmarks.serving.grid --model '$(MODEL)' $(ARGS)
	@$(RUNNER) -m benchmarks.report.pages

tables: $(call STAMP,bench)
	@$(RUNNER) -m benchmarks.report.pages

SHAPES = llama-3-8b qwen3-30b-a3b
DECODE = $(RUNNER) -m benchmarks.parts.decode_step --out benchmarks/results/decode-

# The grids of docs/results.md, one model after another, on a machine with 16 cores (others: ARGS='--server-cores LIST ...'; the last option counts).
GRID = $(RUNNER) -m benchmarks.serving.grid --quick --drain-s 10 --idle-s 5 --server-cores 0-11 --client-cores 12-15 --frontend-cores 10-11 \
  $(foreach name,blinkpy blinkpy-host blinkpy-8192,--extra '$(name):--workers 2')
ALL = --system blinkpy --system blinkpy-host --system vllm --streams 1 8 64 256 --shared-rates 16 --repeats 2
EQUAL = --system blinkpy-8192 --streams 64 256 --rates 16 --modes isolated

measure: $(call STAMP,bench) $(if $(GPU),$(call STAMP,dev))
	@$(MAKE) --no-print-directory bench ARGS=
ifneq ($(GPU),)
	@for shape in $(SHAPES); do $(DECODE)$$shape.json --shape $$shape --new 200 || exit 1; done
	@$(RUNNER) -m benchmarks.parts.whole_steps --shape llama-3-8b
	@$(DECODE)scheduler.json --shape small --spin-us 5000 --rows 1 64 256 1024 --prompt 48
	@for shape in $(SHAPES); do $(GRID) --model $$shape $(EQUAL) $(ARGS) && $(GRID) --model $$shape $(ALL) $(ARGS) || exit 1; done
	-@$(RUN) -m pytest tests/gpu -m 'not whole_gpu' --junitxml=build/gpu-tests.xml
	-@$(RUN) -m pytest tests/gpu -m whole_gpu --junitxml=build/gpu-tests-alone.xml
	@$(RUNNER) -m benchmarks.report.gpu_tests build/gpu-tests.xml build/gpu-tests-alone.xml \
	  --gpu "$$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
endif
	@$(RUNNER) -m benchmarks.report.pages

docs: $(call STAMP,dev)
	@$(RUNNER) tools/write_cli_reference.py > docs/cli.md
	@$(RUNNER) tools/write_messages.py
	@$(RUNNER) tools/write_api_fields.py
	@$(RUNNER) tools/write_schema_keywords.py
	@$(RUNNER) tools/write_model_sizes.py
	@$(RUNNER) tools/write_tried_widths.py
	@$(RUNNER) tools/write_claims.py
	@$(RUNNER) tools/write_alerts.py
	@$(RUNNER) tools/write_field_tables.py
	@$(RUNNER) tools/write_dependencies.py

clean:
	rm -rf $(if $(call STAMP,dev),$(VENV)) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
