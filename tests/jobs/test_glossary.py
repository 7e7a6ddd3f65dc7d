"""The glossaries: few terms, each once, whose names the code has; and the code says none of the refused phrases."""

import ast
import importlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jdistgrad").rglob("*.py"))


def rows(page):
    """Return the cells of each row of a glossary."""
    lines = re.findall(r"^\| (.+) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines[1:]]


def terms(page):
    return [term for row in rows(page) for term in row[0].split(", ")]


def find(name):
    """Return what has a dotted name inside the package."""
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(f"jdistgrad.{module}")
    except ModuleNotFoundError:  # a method
        found = find(module)
    return getattr(found, attribute)


def texts(source):
    """Yield the texts of a program, docstrings and errors among them, each in one line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def refused():
    found = re.search(
        r"refuses in docstrings and errors: (.*?)\.\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    phrases = re.findall(r"`([^`]+)`", found[1])
    assert len(phrases) > 10
    return re.compile("|".join(rf"\b{first}s? {rest}" for first, _, rest in (one.partition(" ") for one in phrases)))


@pytest.mark.parametrize(("page", "most"), [("glossary.md", 14), ("developers-glossary.md", 45)])
def test_a_glossary_has_few_terms(page, most):
    assert most - 5 < len(terms(page)) <= most


def test_no_term_has_two_entries():
    both = terms("glossary.md") + terms("developers-glossary.md")
    assert sorted(both) == sorted(set(both))


def test_terms_of_users_have_links_and_short_meanings():
    assert [row for row in rows("glossary.md") if "](" not in row[1] or len(re.findall(r"[.!] |\.$", row[1])) > 2] == []


def test_the_names_in_the_glossaries_exist():
    named = [name for row in rows("developers-glossary.md") for name in re.findall(r"`([\w.]+)`", row[1])]
    assert len(named) == len(rows("developers-glossary.md"))
    assert all(find(name) is not None for name in named)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_says_no_refused_phrase(path):
    found = [text for text in texts(path.read_text()) if refused().search(text)]
    assert found == []
