# nCompass: `make help` lists the verbs. Everything is installed into .venv, all state lives in var/.

PYTHON ?= python3
VAR ?= var
PORT ?= 8000
export VAR PORT

BIN := .venv/bin
TEST_FLAGS ?=
FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help run demo test test-fast test-e2e test-clients check check-kernels bench-kernels format test-models bench-engine bench-scheduler bench-vllm bench-llamacpp bench-ledger bench-gateway mutants mutants-kernels chaos soak test-books migrate clean environment test-environment

help: ## List the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

run: environment ## Set up what is missing, start everything, stay in the foreground
	@exec $(BIN)/ncompass up

demo: environment ## The same, but stop after one real request
	@exec $(BIN)/ncompass demo

test: test-environment ## Every test, the end-to-end one included (about ten minutes on two cores)
	$(BIN)/pytest -n 2 -m "not e2e and not clients" $(TEST_FLAGS)
	$(BIN)/pytest -m e2e $(TEST_FLAGS)

test-fast: test-environment ## Without the slow, browser and end-to-end tests (about four minutes on two cores)
	$(BIN)/pytest -n 2 -m "not e2e and not clients and not slow and not browser" $(TEST_FLAGS)

test-e2e: test-environment ## Only the end-to-end tests, against real processes and a browser
	$(BIN)/pytest -m e2e $(TEST_FLAGS)

test-clients: test-environment ## npm's openai and anthropic, Vercel's AI SDK, LangChain, LlamaIndex, LiteLLM; schemathesis (needs node)
	$(BIN)/pytest -m clients $(TEST_FLAGS)

check: test-environment ## Formatting, lints, types, and the arrows between the folders
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: test-environment ## Format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check-kernels: test-environment ## Compile every Triton kernel for sm_80, sm_90 and sm_100, with no GPU, beside docs/triton-kernels.md (FLAGS=--write)
	$(BIN)/python -m kernels.check --table docs/triton-kernels.md $(FLAGS)

bench-kernels: test-environment ## Triton kernels beside this GPU's limits and others' kernels; without a GPU what the static model predicts
	$(BIN)/python -m kernels.benchmarks $(FLAGS)

test-models: test-environment ## Every text-generation family of transformers beside its `generate`; writes docs/model-families.md
	$(BIN)/python -m tests.models.run

bench-engine: test-environment ## TTFT and tokens/s beside this machine's limits; writes var/bench/engine.json
	$(BIN)/python -m tests.bench.bench_engine

bench-vllm: test-environment ## Ours and vLLM side by side over HTTP (hours; it resumes); FLAGS=--help tells more
	$(BIN)/python -m tests.bench.bench_vllm $(FLAGS)

bench-llamacpp: test-environment ## The same with llama.cpp, built for this CPU
	$(BIN)/python -m tests.bench.bench_llamacpp $(FLAGS)

bench-ledger: test-environment ## Holds a second on both databases; writes var/bench/ledger.json
	$(BIN)/python -m tests.bench.bench_ledger $(FLAGS)

bench-gateway: test-environment ## What the gateway costs, beside LiteLLM's proxy and Portkey's (minutes); writes var/bench/gateway.json
	$(BIN)/python -m tests.bench.bench_gateway $(FLAGS)

mutants: test-environment ## Plant mistakes about money, each of which a test must notice (minutes)
	$(BIN)/python -m tests.billing.kill_mutants $(FLAGS)

mutants-kernels: test-environment ## The same with mistakes in the Triton kernels, which run in the interpreter (minutes)
	$(BIN)/python -m tests.kernels.kill_mutants $(FLAGS)

chaos: test-environment ## kill -9 of everything in turn while streams run, on both databases; the last line counts what was lost
	$(BIN)/python -m tests.chaos.run

soak: test-environment ## Minutes of kill -9 while customers spend all they have and pay in at a fake Stripe (FLAGS="--seconds 600")
	$(BIN)/python -m tests.chaos.soak $(FLAGS)

test-books: test-environment ## The state machine of the books with thousands of examples (hours); FLAGS="-k sqlite"
	$(BIN)/pytest tests/billing/test_books_machine.py --hypothesis-profile=long --timeout=0 $(FLAGS)

bench-scheduler: test-environment ## Planning, queue, fairness and policies, simulated and live; writes var/bench/scheduler.json
	$(BIN)/python -m tests.bench.bench_scheduler $(FLAGS)

migrate: environment ## Bring the database up to date
	@$(BIN)/ncompass migrate

clean: ## Remove all state (var/): accounts, money, keys, the converted model
	@$(PYTHON) -B -m infra.local.clean $(VAR)

environment:
	@$(PYTHON) infra/bootstrap.py --extras run

test-environment:
	@$(PYTHON) infra/bootstrap.py --extras test
