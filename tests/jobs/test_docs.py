"""The README's program runs as shown, the gallery is complete, pages for users are short, and named tests exist."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
AT_MOST = """
index 700, gallery 600, install 300, tutorial 950, references 550, data-parallel 1800, pipelines 1500, solvers 500,
clusters 1500, notebooks 400, checkpoints 900, testing 450, timeline 500, matrix 650, errors 750, sharp-bits 2400,
migration 1300, glossary 400
"""  # words of each page for users, as ``wc -w`` counts them; pages of the reference: 450


def test_the_tests_named_in_pages_exist():
    ours = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))))
    rows = re.findall(r"^\| .* \| (.*) \|$", (DOCS / "conformance.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    named |= set(re.findall(r"`(test_\w+)`", (DOCS / "how-to" / "solvers.md").read_text()))
    assert len(named) > 40
    assert named <= ours, named - ours


def test_the_readmes_program_prints_what_it_shows_and_is_the_sites(tmp_path):
    shown = re.search(r"```python\n(.*?)```\n\n```\n\$ jdistgrad (.*?)\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(shown[1])
    command = [sys.executable, "-m", "jdistgrad", *shown[2].split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == shown[3], done.stderr
    assert f"```python\n{shown[1]}```" in (DOCS / "index.md").read_text()  # test_pages runs it as threads


def test_the_gallery_shows_every_example_and_notebook():
    programs, page = [*ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.ipynb")], (DOCS / "gallery.md").read_text()
    assert [one.name for one in programs if f"**[{one.name}]({one.parent.name}/{one.stem}.md)**" not in page] == []


def test_the_pictures_are_those_of_their_script(tmp_path):
    subprocess.run([sys.executable, DOCS / "programs" / "pictures.py", tmp_path], check=True)
    kept, drawn = ({path.name: path.read_text() for path in one.iterdir()} for one in (DOCS / "pictures", tmp_path))
    assert kept == drawn


def test_the_exchange_finds_what_it_looks_for():
    command = [sys.executable, "-m", "jdistgrad", "run", "-n", "3", str(ROOT / "examples" / "exchange.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "3 workers hold a 1800 x 300 matrix in unequal blocks" in done.stdout
    found, exact = map(float, re.search(r"([\d.]+) by 200 rounds of calls, ([\d.]+) by", done.stdout).groups())
    assert abs(found - exact) < 0.01 * exact


def test_pages_for_users_are_short():
    (use,) = re.findall(r"- Use:\n(.*?)\n  - Develop:", (ROOT / "mkdocs.yml").read_text(), re.DOTALL)
    pages = re.findall(r": ([\w/-]+\.md)$", use, re.MULTILINE)
    words = {page: len((DOCS / page).read_text().split()) for page in pages}
    budgets = {name: int(most) for name, most in re.findall(r"([\w-]+) (\d+)", AT_MOST)}
    assert {page: n for page, n in words.items() if n > budgets.get(pathlib.Path(page).stem, 450)} == {}
    assert sum(n for page, n in words.items() if page not in ("gallery.md", "glossary.md")) <= 14_000


def test_there_are_twenty_sharp_bits():
    assert len(re.findall("^## ", (DOCS / "sharp-bits.md").read_text(), re.MULTILINE)) == 20
