# Every target sets up what it needs; `make debug` and `make test` work on a fresh machine.
.DEFAULT_GOAL := help
.PHONY: help setup debug tiny-model tiny-priors paradox test lint bench mlflow up down submit

CONFIG ?= configs/debug.yaml
ARGS ?=
BENCHES ?= $(notdir $(basename $(filter-out %/__init__.py,$(wildcard paravt_ray/bench/[a-z]*.py))))
PARAVT := .venv/bin/paravt
SYNTH := outputs/synth/sft_valid.parquet # written last

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: ## the Python environment in .venv (3 to 10 minutes once, then at once)
	@cluster/setup.sh

debug: setup $(SYNTH) ## the whole loop on this machine, with a tiny model
	$(PARAVT) train configs/debug.yaml trainer.run_dir=outputs/debug-$$(date +%Y%m%d-%H%M%S) $(ARGS)

paradox: setup $(SYNTH) ## the paper's comparison on this machine: hours; a look: make paradox steps=4 seeds=1
	$(PARAVT) paradox configs/paradox.yaml $(if $(steps),steps=$(steps)) $(if $(seeds),seeds=$(seeds)) $(ARGS)

tiny-model: setup ## the tiny model that ships with the package, from a seed (about half an hour)
	rm -rf outputs/tiny
	.venv/bin/python -m paravt_ray.tiny_build tiny

tiny-priors: setup ## the tiny models with a strong and a weak tool prior, from the same beginnings
	rm -rf outputs/tiny/overviews outputs/tiny/strong_prior outputs/tiny/strong outputs/tiny/weak_prior outputs/tiny/weak
	.venv/bin/python -m paravt_ray.tiny_build tiny_strong tiny_weak

$(SYNTH): | setup
	$(PARAVT) data synth outputs/synth

test: setup ## all tests, two files at a time
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: setup ## all benchmarks, one after the other (BENCHES="crop learner" for some)
	@set -e; for name in $(BENCHES); do echo "== $$name"; $(PARAVT) bench $$name; done

mlflow: setup ## the curves of all runs, in a browser on this machine
	@cluster/mlflow.sh $(ARGS)

up: setup ## a Ray cluster on this machine, with its dashboard
	@cluster/up.sh $(ARGS)

down: ## end the cluster that `make up` started, and nothing else
	@cluster/down.sh

submit: setup ## a training job on a running cluster: CONFIG=... ARGS="key=value ..." [ADDRESS=http://head:8265]
	@ADDRESS="$(ADDRESS)" cluster/submit.sh $(CONFIG) $(ARGS)
