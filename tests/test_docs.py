"""The documentation: its length, its links, and the words that it avoids."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
GENERATED = "knobs.md"
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
MOST_WORDS = 26_000  # without the generated list of settings and generated tables
VAGUE = re.compile(r"\b(?:no|some|any|every)body\b|\bwhoever\b", re.IGNORECASE)


def num_words(text: str) -> int:
    """Count words and numbers, but not borders of tables or generated tables."""
    text = re.sub(r"^<!-- begin -->$.*?^<!-- end -->$", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(re.search(r"\w", each)) for each in text.split())


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def broken_links(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if ":" in name:  # an address on the web
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def test_the_docs_have_a_bounded_number_of_words():
    words = {page.name: num_words(page.read_text()) for page in DOCS if page.name != GENERATED}
    assert sum(words.values()) <= MOST_WORDS, f"shorten a page as you add to one: {words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_broken_link_and_names_the_subject_of_every_sentence(page):
    assert broken_links(page) == []
    assert VAGUE.findall(without_code(page.read_text())) == []


def test_the_architecture_names_modules_and_functions_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    sources = {path: path.read_text() for path in (ROOT / "hicache").rglob("*.py")}
    steps = re.findall(r"^\| \d+ \|(.*?)\|", text, flags=re.MULTILINE)
    assert steps
    for each in steps:
        path, functions = None, 0
        for name in re.findall(r"`([\w./]+)`", each):
            if name.endswith(".py"):
                path = ROOT / "hicache" / name
                continue
            assert path is not None, each
            assert f"def {name.rpartition('.')[2]}(" in sources[path], f"{name} is not in {path}"
            functions += 1
        assert functions, each
    for name in re.findall(r"\b[\w/]+\.py\b", text):
        assert any(str(path).endswith(f"/{name}") for path in [*sources, Path(__file__)]), name


def test_words_are_counted_and_broken_links_are_found(tmp_path):
    assert num_words("| a word | 1.5 |\n|---|---:|\n") == 3
    page = tmp_path / "page.md"
    page.write_text("# A heading: one\n[a](#a-heading-one) [b](#two) [c](none.md) [d](page.md)\n")
    assert broken_links(page) == ["#two", "none.md"]
