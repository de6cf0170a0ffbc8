"""The cluster files in `examples/`: each can be used, and its start lines say what engines know."""

import re
import sys
from pathlib import Path

import pytest

from dsched.cli.main import main
from dsched.config import dsched_environment

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "examples" / "clusters"
FILES = sorted(CLUSTERS.glob("*.yaml"))
SOURCES = {
    "vllm serve": (
        "vllm",
        ("engine/arg_utils.py", "entrypoints/cli/*.py", "entrypoints/**/cli_args.py"),
    ),
    "sglang.launch_server": ("sglang", ("srt/arg_groups/fields/*.py",)),
}
"""How a start line is told, its package, and where the package declares its flags."""


def start_lines(path: Path) -> list[str]:
    """The commands in a file's comments, each in one line."""
    text = path.read_text()
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def flags_of(path: Path, marker: str) -> set[str]:
    """The flags of a file's commands for one kind of engine."""
    commands = [line for line in start_lines(path) if marker in line]
    return {flag for line in commands for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", line)}


def test_there_are_some() -> None:
    assert len(FILES) >= 8
    assert flags_of(CLUSTERS / "wide-ep-vllm.yaml", "vllm serve") > {"--enable-eplb", "--headless"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_passes_its_check(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`dsched check -c FILE`, as its reader would."""
    for name in dsched_environment():
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["dsched", "check", "-c", str(path)])

    with pytest.raises(SystemExit) as ended:
        main()

    out, err = capfd.readouterr()
    assert not ended.value.code, err
    assert "pools:" in out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_says_how_it_is_served(path: Path) -> None:
    served = [line.split()[-1] for line in start_lines(path) if line.startswith("dsched run -c")]

    assert [Path(each).name for each in served] == [path.name]


def test_table_names_every_file() -> None:
    """Also the tests that run the small ones."""
    table = (CLUSTERS / "README.md").read_text()

    named = re.findall(r"^\| `(.+?)`", table, re.MULTILINE)
    assert sorted(named) == [path.name for path in FILES]
    for test in re.findall(r"`(tests/.+?)`", table):
        assert (ROOT / test).is_file(), test


@pytest.mark.parametrize(
    "marker",
    # Marked: they run once the environments are made, with the tests of the engines.
    [pytest.param(each, marks=getattr(pytest.mark, SOURCES[each][0])) for each in SOURCES],
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_engine_knows_the_flags(path: Path, marker: str) -> None:
    """Every flag of a start line is one of the engine that the tests run."""
    flags = flags_of(path, marker)
    package, patterns = SOURCES[marker]
    folders = list(ROOT.glob(f".venv-{package}/lib/python3*/site-packages/{package}"))
    if not folders:
        pytest.skip(f"no {package} environment; run `make .venv-{package}/.ready`")
    text = "".join(
        source.read_text() for pattern in patterns for source in folders[0].glob(pattern)
    )

    unknown = {
        flag for flag in flags if flag not in text and flag[2:].replace("-", "_") not in text
    }

    assert unknown == set()
