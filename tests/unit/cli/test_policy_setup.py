"""Policies of a configuration that cannot work: one line with key and place, exit status 2."""

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from structlog.testing import capture_logs

from dsched.cli.main import main
from dsched.cli.policy_setup import PolicyReloader, make_policies
from dsched.config import inherited_environment
from dsched.config_load import load_config
from dsched.errors import ConfigError

HEAD = "class Policy:\n    name = 'p'\n    api_version = 1\n"
PICK = "    def pick(self, request, candidates): return 0\n"
ADMIT = "    def admit(self, request, view): return None\n"
NEEDY = "    def __init__(self, *, key): self.key = key\n"

BAD_PACKAGES = {
    "syntax": ("def broken(:\n", "bad_syntax: syntax error at "),
    "import": ("import not_there\n", "bad_import imports 'not_there', which is missing"),
    "raises": (
        "raise RuntimeError('two\\nlines')\n",
        "cannot be imported: RuntimeError: two lines",
    ),
    "exits": ("raise SystemExit(7)\n", "cannot be imported: SystemExit: 7"),
    "version": (HEAD.replace("1", "2") + PICK, "api_version is 2; this dsched speaks version 1"),
    "signature": (
        HEAD + "    def pick(self, request): ...\n",
        "pick() does not take (request, candidates)",
    ),
    "other kind": (HEAD + ADMIT, "has no method pick() or keep() or score()"),
    "missing": ("", "module 'bad_missing' has no class 'Policy'"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def configure(here: Path, text: str) -> Path:
    path = here / "cluster.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", BAD_PACKAGES)
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_package_that_cannot_work_stops_check_and_run(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    case: str,
) -> None:
    """Before a port is opened: one line with the key and its place, no traceback, status 2."""
    source, message = BAD_PACKAGES[case]
    module = f"bad_{case.replace(' ', '_')}"
    (here / f"{module}.py").write_text(source)
    config = configure(here, f"\nrouting: {{policy: '{module}:Policy'}}\n")
    monkeypatch.setattr(sys, "argv", ["dsched", command, "-c", str(config)])

    with pytest.raises(SystemExit) as caught:
        main()

    out, err = capfd.readouterr()
    sys.modules.pop(module, None)
    assert caught.value.code == 2
    assert err.startswith("dsched: $.routing.policy: ")
    assert message in err
    assert err.endswith(f"({config}:2)\n")
    assert err.count("\n") == 1
    assert out == ""
    assert not (here / ".dsched").exists()


def test_the_console_script_has_no_traceback(here: Path) -> None:
    """As a person types it, in a process of its own; the policy is found in the working folder."""
    (here / "broken_here.py").write_text("def broken(:\n")

    answer = subprocess.run(
        [Path(sys.executable).parent / "dsched", "check", "--policy", "broken_here:Policy"],
        env=inherited_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 2
    assert "broken_here: syntax error at" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stderr.endswith("(--routing-policy)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routing: {policy: mod}", "$.routing.policy: 'mod' is none of two_term, least_requests, "),
        ("routing: {policy: 'mod:'}", "'mod:' is not of the form module:Class"),
        ("routing: {policy: ':X'}", "':X' is not of the form module:Class"),
        ("routing: {policy: 'no.such.module:X'}", "there is no module 'no' to import"),
        ("routing: {policy: 'json.nothing:X'}", "there is no module 'json.nothing' to import"),
        ("routing: {policy: 'json:Missing'}", "module 'json' has no class 'Missing'"),
        ("routing: {policy: 'json:__doc__'}", "has no class '__doc__'"),
        ("routing: {policy: 'json:JSONDecoder'}", "api_version is None"),
        ("routing: {policy: 'ok_policy:Needy'}", "$.routing.policy_args: ok_policy:Needy: missing"),
        (
            "routing: {policy: 'ok_policy:Needy', policy_args: {key: 1, other: 2}}",
            "unexpected keyword argument 'other'",
        ),
        (
            "policies: {admission: {policy: 'ok_policy:Policy'}}",
            "$.policies.admission.policy: ok_policy:Policy: has no method admit()",
        ),
        (
            "policies: {handoff: {policy: 'ok_policy:Needy'}}",
            "$.policies.handoff.args: ok_policy:Needy: missing",
        ),
        (
            "policies: {chunk_weights: {policy: 'ok_policy:Policy'}}",
            "$.policies.chunk_weights.policy: ok_policy:Policy: has no method weights()",
        ),
        (
            "policies: {priority: {policy: gone}}",
            "$.policies.priority.policy: 'gone' is neither module:Class nor an entry point",
        ),
    ],
)
def test_each_key_is_checked_and_named(here: Path, text: str, message: str) -> None:
    (here / "ok_policy.py").write_text(HEAD + PICK + HEAD.replace("Policy", "Needy") + NEEDY + PICK)

    with pytest.raises(ConfigError) as caught:
        make_policies(load_config(configure(here, text)))

    sys.modules.pop("ok_policy", None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_object_serves_the_kinds_that_name_it_with_the_same_arguments(here: Path) -> None:
    """With other arguments it is another one."""
    (here / "ok_many.py").write_text(
        HEAD
        + "    def __init__(self, *, weights): self.weights = weights\n"
        + PICK
        + ADMIT
        + "    def priority(self, request): return 0\n"
    )
    args = "{weights: {b: [1, 2], a: 3}}"
    policies = make_policies(
        load_config(
            configure(
                here,
                f"routing: {{policy: 'ok_many:Policy', policy_args: {args}}}\n"
                "policies:\n"
                f"  admission: {{policy: 'ok_many:Policy', args: {args}}}\n"
                "  priority: {policy: 'ok_many:Policy', args: {weights: 1}}\n",
            )
        )
    )

    sys.modules.pop("ok_many", None)
    assert policies.routing is not None
    assert policies.routing.guards[0][0] is policies.admission
    assert policies.priority is not policies.admission
    assert len(list(policies.guards())) == 2
    assert policies.admission is not None
    assert policies.admission.policy.weights == {"b": [1, 2], "a": 3}


def test_a_policy_that_raises_when_it_is_looked_at_is_not_taken_at_a_reload(here: Path) -> None:
    """The old ones go on, and the next reload finds a mended one."""
    (here / "ok_reloaded.py").write_text(HEAD + PICK)
    loaded = load_config(configure(here, "routing: {policy: 'ok_reloaded:Policy'}"))
    reloader = PolicyReloader(loaded)
    raising = "    @property\n    def api_version(self): raise RuntimeError('not now')\n"
    (here / "ok_reloaded.py").write_text(HEAD + PICK + raising)

    with capture_logs() as lines:
        broken = asyncio.run(reloader.reload())
        (here / "ok_reloaded.py").write_text(HEAD + PICK)
        mended = asyncio.run(reloader.reload())

    sys.modules.pop("ok_reloaded", None)
    assert broken is None
    assert mended is not None
    assert reloader.num_reloads == {"loaded": 1, "kept": 1}
    assert lines[0]["reason"] == "RuntimeError: not now"


def test_a_reload_that_fails_while_others_import_puts_the_old_modules_back(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads the policies; the event loop's imports come in between."""

    numbers = itertools.count()

    class Importing(str):
        """The name of a module; another is imported whenever it is looked at."""

        def partition(self, sep: str) -> tuple[str, str, str]:
            monkeypatch.setitem(sys.modules, f"other_{next(numbers)}", ModuleType("other"))
            return super().partition(sep)

    (here / "ok_kept.py").write_text(HEAD + PICK)
    loaded = load_config(configure(here, "routing: {policy: 'ok_kept:Policy'}"))
    make_policies(loaded)
    old = sys.modules["ok_kept"]
    monkeypatch.setitem(sys.modules, Importing("importing_other"), ModuleType("importing_other"))
    (here / "ok_kept.py").write_text("def broken(:\n")

    with capture_logs():
        kept = asyncio.run(PolicyReloader(loaded).reload())

    assert kept is None
    assert sys.modules.pop("ok_kept") is old
