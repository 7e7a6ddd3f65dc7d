"""The README's program runs as shown, and the tests that the conformance page names exist."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_the_tests_named_in_the_conformance_page_exist():
    ours = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))))
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "conformance.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert len(named) > 40
    assert named <= ours, named - ours


def test_the_readmes_program_prints_what_it_shows(tmp_path):
    readme = (ROOT / "README.md").read_text()
    source, shown = re.search(r"```python\n(.*?)```\n\n```\n\$ (.*?)```", readme, re.DOTALL).groups()
    command, _, output = shown.partition("\n")
    (tmp_path / "program.py").write_text(source)
    assert command.startswith("jdistgrad ")
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == output, done.stderr


def test_the_readmes_program_runs_as_threads(tmp_path):
    # The program is unchanged, but its last part becomes ``main``.
    source = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    functions, program = source.split("me = jd.init()")
    main = "def main():\n    me = jd.init()" + program.replace("\n", "\n    ") + "\njd.spawn(main, 2)\n"
    (tmp_path / "threads.py").write_text(functions + main)
    done = subprocess.run([sys.executable, "threads.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0] / 10


def test_the_exchange_finds_what_it_looks_for():
    command = [sys.executable, "-m", "jdistgrad", "run", "-n", "3", str(ROOT / "examples" / "exchange.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "3 workers hold a 1800 x 300 matrix in unequal blocks" in done.stdout
    found, exact = map(float, re.search(r"([\d.]+) by 200 rounds of calls, ([\d.]+) by", done.stdout).groups())
    assert abs(found - exact) < 0.01 * exact
