"""Every link of the documentation leads somewhere, and what is asked most is near the README."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if path.parent in (ROOT, *(ROOT / d for d in ("docs", "cluster", "benchmarks")))
)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)")
CLICKS = 3


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for path, anchor in LINK.findall(prose(page)):
        yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = [(to, anchor) for to, anchor in links(page) if not to.exists() or (anchor and anchor not in anchors(to))]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_spell_a_launch_in_one_way_and_other_verbs_in_one(page: Path) -> None:
    other = r"python -m orchestrator\.(?!launch\b)\w+|^ *orchestrator (?:launch\b|-m\b|\w+=).*"
    assert re.findall(other, page.read_text(), re.M) == []


@pytest.mark.parametrize(
    ("page", "anchor"),
    [
        pytest.param("docs/one-machine.md", "eight-gpus", id="my-model-on-8-gpus"),
        pytest.param("docs/keys.md", "", id="what-a-key-means"),
        pytest.param("docs/troubleshooting.md", "it-hangs", id="why-a-run-hangs"),
        pytest.param("CONTRIBUTING.md", "add-a-strategy", id="how-to-add-a-strategy"),
        pytest.param("orchestrator/policy/recovery.py", "", id="how-a-failure-is-handled-in-the-code"),
    ],
)
def test_the_readme_leads_there_in_three_clicks(page: str, anchor: str) -> None:
    near = {ROOT / "README.md"}
    for _ in range(CLICKS):
        near |= {to for place in near if place.suffix == ".md" for to, _ in links(place)}
    target = ROOT / page
    assert target in near
    assert not anchor or anchor in anchors(target)
