"""The pages of docs/: links lead somewhere, the index has them all, what they show can be used."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from dsched.cli.policy_setup import make_policies
from dsched.config_load import load_config, parse_config
from dsched.testing import policy_check

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
YAML_PAGES = ("attach.md", "policies.md", "faults.md", "drivers.md", "registry.md")
"""Pages of docs/ whose YAML blocks are configurations."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Those into the tree; a heading after `#` is one of the page it is on."""
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, heading = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (heading and path.suffix == ".md" and heading not in anchors(path)):
            broken.append(link)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_index_has_every_page() -> None:
    """Also each decision."""
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}

    assert pages - linked == {"index.md"}


@pytest.mark.parametrize("page", YAML_PAGES)
def test_configurations_on_pages_are_ones(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies they name are made where the page has them."""
    found = blocks(page, "yaml")
    for block in found:
        parse_config(block)
    assert found or page not in ("attach.md", "policies.md")


def test_the_policy_on_its_page_works_as_it_is_configured_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest one: written to its file, named by its configuration, keeping its contract."""
    source = next(block for block in blocks("policies.md", "python") if block.startswith("# my_"))
    (tmp_path / "my_policies.py").write_text(source)
    config = tmp_path / "cluster.yaml"
    config.write_text(blocks("policies.md", "yaml")[0])
    monkeypatch.syspath_prepend(tmp_path)

    policies = make_policies(load_config(config))
    (guard,) = policies.guards()
    report = policy_check(guard.policy)

    assert guard.name == "sticky"
    assert guard.policy.tolerance == 1.1
    assert 0 < report.num_defaults < report.num_questions
    importlib.invalidate_caches()
    sys.modules.pop("my_policies")


def test_every_kind_of_policy_is_on_the_page() -> None:
    """With its method, and the key that names it."""
    from dsched.cli.policy_setup import KINDS_OF_KEY
    from dsched.plugins import METHODS

    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for method in METHODS.values():
        assert f"`{method}(" in text
    for key in KINDS_OF_KEY:
        assert f"`{'routing.policy' if key == 'routing' else f'policies.{key}'}`" in text
