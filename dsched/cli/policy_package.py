"""The files of a new policy package: what `dsched policy new` writes.

In: a name and a kind. Out: path and text of each file. The package passes its own tests and its own
ruff as written, and its policy decides something from the first minute.
"""

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from textwrap import dedent, indent

from dsched.errors import ConfigError

MAX_NAME_LENGTH = 40
"""Above: lines of the package get longer than its own rules allow."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*")


class PolicyKind(StrEnum):
    """Kinds that there is a start for."""

    ROUTING = "routing"
    ADMISSION = "admission"
    PRIORITY = "priority"
    HANDOFF = "handoff"
    CHUNK_WEIGHTS = "chunk-weights"
    REBALANCE = "rebalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What differs between kinds."""

    what: str
    names: tuple[str, ...]
    """Imported from `dsched.plugins`."""
    uses_sequence: bool
    argument: str
    body: str
    test_imports: str
    test: str
    config: str


_STARTS: Mapping[PolicyKind, _Start] = {
    PolicyKind.ROUTING: _Start(
        what="Short prompts go where the fewest requests run; long ones are left to dsched.",
        names=("RankCandidate", "RequestView"),
        uses_sequence=True,
        argument="long_prompt_tokens: int = 8_192",
        body='''
            def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
                """Return a position in `candidates`, or `None` for dsched's own choice."""
                if request.num_prompt_tokens >= self.long_prompt_tokens:
                    return None
                return min(range(len(candidates)), key=lambda at: (candidates[at].num_running, at))
        ''',
        test_imports="example_candidates, example_request, policy_check",
        test="""
            def test_short_prompts_go_where_the_fewest_requests_run() -> None:
                policy, candidates = {cls}(), example_candidates([3, 1, 2])

                assert policy.pick(example_request(num_prompt_tokens=10), candidates) == 1


            def test_long_prompts_are_left_to_dsched() -> None:
                policy, candidates = {cls}(), example_candidates([3, 1, 2])

                assert policy.pick(example_request(num_prompt_tokens=9_000), candidates) is None
        """,
        config="routing:\n  policy: {name}\n  policy_args: {{long_prompt_tokens: 8192}}",
    ),
    PolicyKind.ADMISSION: _Start(
        what="A request that is too long is refused while the cluster is nearly full.",
        names=("AdmissionAnswer", "AdmissionView", "RequestView"),
        uses_sequence=False,
        argument="long_prompt_tokens: int = 8_192",
        body='''
            def admit(self, request: RequestView, view: AdmissionView) -> AdmissionAnswer | None:
                """Return `ACCEPT`, `REFUSE`, or `None` for the default, which accepts."""
                is_long = request.num_prompt_tokens >= self.long_prompt_tokens
                if is_long and view.load_share > 0.9:
                    return AdmissionAnswer.REFUSE
                return None
        ''',
        test_imports="example_request, policy_check",
        test="""
            def view(load_share: float) -> AdmissionView:
                return AdmissionView(
                    num_running=8,
                    num_held=0,
                    num_ranks_up=4,
                    load_share=load_share,
                    tenant_share=0.5,
                )


            def test_a_long_request_is_refused_while_the_cluster_is_nearly_full() -> None:
                policy = {cls}()
                request = example_request(num_prompt_tokens=9_000)

                assert policy.admit(request, view(0.95)) is AdmissionAnswer.REFUSE
                assert policy.admit(request, view(0.5)) is None
        """,
        config="policies:\n  admission: {{policy: {name}, args: {{long_prompt_tokens: 8192}}}}",
    ),
    PolicyKind.PRIORITY: _Start(
        what="Of those that wait, short prompts go before long ones.",
        names=("RequestView",),
        uses_sequence=False,
        argument="long_prompt_tokens: int = 8_192",
        body='''
            def priority(self, request: RequestView) -> int | None:
                """Return a whole number, larger goes first; `None` for the default, which is 0."""
                return -1 if request.num_prompt_tokens >= self.long_prompt_tokens else 0
        ''',
        test_imports="example_request, policy_check",
        test="""
            def test_short_prompts_go_before_long_ones() -> None:
                policy = {cls}()
                short = policy.priority(example_request(num_prompt_tokens=10))
                long = policy.priority(example_request(num_prompt_tokens=9_000))

                assert short > long
        """,
        config="policies:\n  priority: {{policy: {name}, args: {{long_prompt_tokens: 8192}}}}",
    ),
    PolicyKind.HANDOFF: _Start(
        what="A long answer whose engine was lost goes on where the most KV tokens are free.",
        names=("RankCandidate", "RequestView"),
        uses_sequence=True,
        argument="long_answer_tokens: int = 1_024",
        body='''
            def pick_handoff(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
                """Return a position in `candidates`, or `None` to be routed like a new request."""
                if request.num_output_tokens < self.long_answer_tokens:
                    return None
                tokens = [candidate.num_kv_tokens for candidate in candidates]
                return tokens.index(min(tokens))
        ''',  # noqa: E501 - as long as the package's own rules allow
        test_imports="example_candidates, example_request, policy_check",
        test="""
            def test_a_long_answer_goes_on_where_the_most_kv_tokens_are_free() -> None:
                policy = {cls}()
                candidates = example_candidates([1, 1, 1], num_kv_tokens=[500, 900, 100])

                long = example_request(num_output_tokens=2_000)

                assert policy.pick_handoff(long, candidates) == 2
                assert policy.pick_handoff(example_request(), candidates) is None
        """,
        config="policies:\n  handoff: {{policy: {name}, args: {{long_answer_tokens: 1024}}}}",
    ),
    PolicyKind.CHUNK_WEIGHTS: _Start(
        what="A bucket whose oldest prompt has waited for long gets up to twice its share.",
        names=("BucketView",),
        uses_sequence=False,
        argument="patience_s: float = 10.0",
        body='''
            def weights(self, view: BucketView) -> list[float] | None:
                """Return a weight above 0 for each length bucket; `None` keeps those in use."""
                shares = range(len(view.oldest_wait_ns), 0, -1)  # 4, 3, 2, 1
                patience_ns = self.patience_s * 1e9
                return [
                    share * (1.0 + min(1.0, wait_ns / patience_ns))
                    for share, wait_ns in zip(shares, view.oldest_wait_ns, strict=True)
                ]
        ''',
        test_imports="policy_check",
        test="""
            def test_who_has_waited_gets_more() -> None:
                view = BucketView(
                    num_requests=(3, 1),
                    num_tokens=(3_000, 90_000),
                    oldest_wait_ns=(0, 500_000_000),
                )

                assert {cls}(patience_s=1.0).weights(view) == [2.0, 1.5]
        """,
        config="policies:\n  chunk_weights: {{policy: {name}, args: {{patience_s: 10.0}}}}",
    ),
    PolicyKind.REBALANCE: _Start(
        what="Experts stay where they are while the worst layer is even enough.",
        names=("RebalanceView",),
        uses_sequence=False,
        argument="even_enough: float = 0.9",
        body='''
            def should_rebalance(self, view: RebalanceView) -> bool | None:
                """Return `False` to keep the placement in use; the default renews it."""
                return view.worst_balancedness < self.even_enough
        ''',
        test_imports="policy_check",
        test="""
            def view(worst: float) -> RebalanceView:
                return RebalanceView(
                    num_times_asked=9,
                    worst_balancedness=worst,
                    mean_balancedness=0.97,
                )


            def test_an_even_placement_is_kept() -> None:
                policy = {cls}(even_enough=0.9)

                assert not policy.should_rebalance(view(0.95))
                assert policy.should_rebalance(view(0.5))
        """,
        config="policies:\n  rebalance: {{policy: {name}, args: {{even_enough: 0.9}}}}",
    ),
}


def package_files(name: str, kind: PolicyKind) -> dict[str, str]:
    """Return the text of each file, by its path inside the package's folder.

    Raises:
        ConfigError: the name cannot be a package's.
    """
    module = module_name(name)
    start = _STARTS[kind]
    words = {
        "name": name,
        "module": module,
        "cls": class_name(name),
        "kind": kind.value,
        "argument_name": start.argument.partition(":")[0],
    }
    return {
        "pyproject.toml": _PYPROJECT.format(**words),
        "README.md": _README.format(**words, what=start.what, config=start.config.format(**words)),
        f"{module}/__init__.py": _policy_text(start, words),
        f"tests/test_{module}.py": _test_text(start, words),
    }


def module_name(name: str) -> str:
    """The module of a package. Raises `ConfigError` for a name that cannot be one.

    >>> module_name("my-policy")
    'my_policy'
    """
    if len(name) > MAX_NAME_LENGTH:
        raise ConfigError(f"{name!r} has {len(name)} characters; at most {MAX_NAME_LENGTH}")
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no name: letters and digits, parted by single - or _")
    module = re.sub(r"[-.]", "_", name).lower()
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in _TAKEN:
        raise ConfigError(f"{name!r}: the module {module!r} is Python's or another package's")
    return module


def class_name(name: str) -> str:
    """The class of a package's policy.

    >>> class_name("my-policy")
    'MyPolicy'
    """
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_.]", name))


_TAKEN = frozenset({"dsched", "numpy", "pytest", "tests", "vllm", "sglang"})


def _policy_text(start: _Start, words: Mapping[str, str]) -> str:
    imports = f"from dsched.plugins import {', '.join(start.names)}\n"
    if start.uses_sequence:
        imports = f"from collections.abc import Sequence\n\n{imports}"
    argument_name = words["argument_name"]
    body = indent(dedent(start.body).strip("\n"), "    ")
    return (
        f'"""{words["name"]}: a {words["kind"]} policy for dsched."""\n\n{imports}\n\n'
        f"class {words['cls']}:\n"
        f'    """{start.what}"""\n\n'
        f'    name = "{words["name"]}"\n    api_version = 1\n\n'
        f"    def __init__(self, *, {start.argument}) -> None:\n"
        f"        self.{argument_name} = {argument_name}\n\n{body}\n"
    )


def _test_text(start: _Start, words: Mapping[str, str]) -> str:
    views = [name for name in start.names if name not in ("RankCandidate", "RequestView")]
    imports = f"from dsched.testing import {start.test_imports}\n"
    if views:
        imports = f"from dsched.plugins import {', '.join(views)}\n{imports}"
    return (
        f'"""The policy {words["name"]}: its contract, and what it decides."""\n\n{imports}\n'
        f"from {words['module']} import {words['cls']}\n\n\n"
        "def test_it_keeps_the_contract() -> None:\n"
        f"    policy_check({words['cls']}())\n\n\n"
        f"{dedent(start.test).strip().format(**words)}\n"
    )


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=69"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "A {kind} policy for dsched"
requires-python = ">=3.11"
dependencies = ["dsched"]

[project.optional-dependencies]
dev = ["pytest>=8", "ruff>=0.9"]

# dsched finds the policy by this name once the package is installed.
[project.entry-points."dsched.policies"]
{name} = "{module}:{cls}"

[tool.setuptools]
packages = ["{module}"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]

[tool.ruff]
line-length = 100
target-version = "py311"

[tool.ruff.lint]
select = ["ANN", "B", "E", "F", "I", "N", "RUF", "SIM", "UP", "W"]
"""

_README = """\
# {name}

A {kind} policy for dsched. {what}

```
pip install -e '.[dev]'
pytest
dsched policy test {module}:{cls}
```

In dsched's configuration, by the name of its entry point:

```yaml
{config}
```

After a change: `kill -HUP` the running dsched, and it asks the new policy from its next tick on.
"""
