"""The documentation: its programs print the output it shows, and the names it uses exist."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import threading

import pytest

import jdistgrad as jd

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"```python\n(?P<source>.*?)```\n(?:\n```text\n(?:\$ .*?\n)?(?P<output>.*?)```)?", re.DOTALL)
NAME = re.compile(r"\bjd\.([a-zA-Z_]+(?:\.\w+)?)")


def programs():
    """Yield every block that imports the package, as a program, with the output that the page shows."""
    for page in PAGES:
        for number, found in enumerate(BLOCK.finditer(page.read_text())):
            if "import jdistgrad" in found["source"]:
                yield pytest.param(found["source"], found["output"], id=f"{page.stem}-{number}")


def command_for(source):
    if "def test_" in source:
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "program.py"]
    return (
        ["program.py"] if "local_workers" in source else ["-m", "jdistgrad", "run", "--local", "-n", "3", "program.py"]
    )


@pytest.mark.parametrize(("source", "output"), list(programs()))
def test_a_program_prints_what_the_page_shows(source, output, tmp_path):
    (tmp_path / "program.py").write_text(source)
    command = [sys.executable, *command_for(source)]
    # The numbers that a page shows are those of a user's settings, not of a suite that compiles quickly.
    around = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=tmp_path, env=around, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if output is None:
        assert "3 passed" in done.stdout
    else:
        assert done.stdout == output


def test_the_journey_is_the_real_one():
    printed = subprocess.run(
        [sys.executable, DOCS / "programs" / "journey.py"], capture_output=True, text=True, check=True
    )
    for part in printed.stdout.split("\n\n"):
        assert f"```text\n{part.strip()}\n```" in (DOCS / "journey.md").read_text()


def test_the_journey_passes_the_files_of_its_table(capfd):
    table = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (DOCS / "journey.md").read_text(), re.MULTILINE)
    assert len(table) == 10
    passed = set()

    def note(frame, event, _):
        if event == "call":
            passed.add((frame.f_code.co_filename.rpartition("/jdistgrad/")[2], frame.f_code.co_qualname))

    program = runpy.run_path(str(DOCS / "programs" / "journey.py"))
    threading.setprofile(note)
    try:
        jd.spawn(program["main"], 3)
    finally:
        threading.setprofile(None)
    assert [row for row in table if row not in passed] == []


def test_first_mistakes_are_answered_as_the_file_says():
    command = [sys.executable, DOCS / "programs" / "first_mistakes.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n| `") >= 40
    assert printed.strip() in (DOCS / "programs" / "first-mistakes.md").read_text()


def test_the_journey_of_a_step_is_the_real_one():
    # JAX's names for the equations of a piece are left out: they change with JAX's versions.

    def without_names(text):
        return re.sub(r"compute .*", "compute", text)

    command = [sys.executable, DOCS / "programs" / "journey_of_a_step.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"```text\n{without_names(printed)}```" in without_names((DOCS / "journey.md").read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "first-mistakes"], ids=lambda page: page.stem)
def test_every_name_on_a_page_exists(page):
    for name in set(NAME.findall(page.read_text())):
        found = jd
        for part in name.split("."):
            found = getattr(found, part)


def test_every_exported_name_is_in_the_reference():
    reference = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    errors = {name for name in jd.__all__ if name.endswith("Error")}
    names = {*jd.__all__, "map"} - errors - {"collectives", "hooks", "pipeline"}
    assert len(names) > 30
    assert {name for name in names if not re.search(rf"^::: .*\.{name}$", reference, re.MULTILINE)} == set()
    page = (DOCS / "errors.md").read_text()
    assert set(re.findall(r"^\| `(\w+Error)` \|", page, re.MULTILINE)) == errors
    assert "::: jdistgrad.errors\n" in page
