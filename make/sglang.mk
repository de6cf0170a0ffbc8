# The SGLang environment for the tests that run real SGLang on a CPU, like the one in engines.mk.
# SGLang finds its CPU platform through an entry point: tests/sglang/plugin is installed beside it.

SGLANG_REQUIREMENTS := requirements/sglang-cpu.txt
SGLANG_PLUGIN := tests/sglang/plugin

.PHONY: sglang-env
sglang-env: .venv-sglang/.ready ## Make the environment of SGLang on a CPU

engines: .venv-sglang/.ready

# `--no-deps` everywhere: the list is complete, and sglang's own pins would bring CUDA builds.
.venv-sglang/.ready: $(SGLANG_REQUIREMENTS) pyproject.toml make/sglang.mk $(SGLANG_PLUGIN)/pyproject.toml
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --no-deps $$(grep '^torch==' $(SGLANG_REQUIREMENTS))
	.venv-sglang/bin/python -m pip install --quiet --no-deps --requirement $(SGLANG_REQUIREMENTS)
	.venv-sglang/bin/python -m pip install --quiet --no-deps --editable . --editable $(SGLANG_PLUGIN)
	.venv-sglang/bin/python $(SGLANG_PLUGIN)/smoke.py --imports-only
	touch $@
