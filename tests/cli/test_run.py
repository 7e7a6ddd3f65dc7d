"""`jdistgrad run`: as a job, as threads, with a timeline, and with programs that fail."""

import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jdistgrad.cli import launch
from jdistgrad.cli.main import main
from jdistgrad.observe import timeline as chrome

PROGRAM = """
import dataclasses, os, sys
import jax, jax.numpy as jnp
import jdistgrad as jd


@dataclasses.dataclass
class Report:
    text: "str"


def told(text):
    return Report(f"{text} at {jd.worker_info().name}")


@jax.jit
def double(x):
    return 2 * x


os.chdir("/")
assert os.path.exists(__file__)
me = jd.init()
assert sys.modules["__main__"].Report.__name__ == "Report"  # where pickle and typing look for it
peer = (me.rank + 1) % jd.world_size()
gradient = jax.grad(lambda x: jd.rpc_sync(peer, double, args=(x,)).sum())
with jd.context():
    assert gradient(jnp.ones(3)).tolist() == [2, 2, 2]
answer = jd.rpc_sync(peer, told, args=(sys.argv[1],))
print(f"{me.rank} of {jd.world_size()}: {answer.text}, {__name__}, {jd.launched()}\\n", end="", flush=True)
jd.shutdown()
sys.exit(0)
"""

FAILS = """
import jdistgrad as jd

me = jd.init()
if me.rank == 1:
    raise ValueError("boom")
jd.rpc_sync(1, abs, args=(-1,))
jd.shutdown()
"""


@pytest.fixture
def jdistgrad(tmp_path):
    """Return a function that runs the command line in a folder with two programs in it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "fails.py").write_text(FAILS)

    def run(*arguments, status=0):
        command = [sys.executable, "-m", "jdistgrad", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status if status is not None else done.returncode != 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("local", [(), ("--local",)], ids=["job", "threads"])
def test_a_program_as_it_stands_is_every_worker(jdistgrad, local, tmp_path):
    path = tmp_path / "trace.json"
    output = jdistgrad("run", *local, "-n", "3", "--timeline", str(path), "program.py", "hello")
    for rank in range(3):
        assert f"{rank} of 3: hello at worker{(rank + 1) % 3}, __main__, True\n" in output
    entries = chrome.read(path)["traceEvents"]
    kinds = {(entry["pid"], entry["cat"]) for entry in entries if entry["ph"] == "X"}
    assert kinds == {(rank, kind) for rank in range(3) for kind in ("call", "serve", "pullback")}
    calls, served = ({e["id"]: e for e in entries if e["ph"] == phase} for phase in "sf")
    assert set(calls) == set(served)
    assert all(calls[one]["ts"] < served[one]["ts"] for one in calls)


KNOWS_ITS_PLACE = """
import os
import jdistgrad as jd
from .part import told

os.chdir("/")
me = jd.init()
answer = jd.rpc_sync((me.rank + 1) % 3, told, args=(me.rank,))
print(f"{answer}, {__spec__.name} {os.path.exists(__file__)}\\n", end="", flush=True)
jd.shutdown()
"""


def test_a_module_finds_its_neighbours(jdistgrad, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("def told(rank):\n    return f'part called by {rank}'\n")
    (package / "__main__.py").write_text(KNOWS_ITS_PLACE)
    output = jdistgrad("run", "--local", "-n", "3", "-m", "package")
    for rank in range(3):
        assert f"part called by {rank}, package.__main__ True\n" in output


NAMES_ITS_COLLECTIVES = """
import sys
import jax.numpy as jnp
import jdistgrad as jd

me = jd.init()
dp = jd.DataParallel(getattr(jd.collectives, sys.argv[1])())
assert dp.average(jnp.float32(me.rank)) == (jd.world_size() - 1) / 2
jd.shutdown()
"""


def test_threads_are_no_ranks_of_mpi_and_do_not_average_alone(jdistgrad, tmp_path):
    (tmp_path / "averages.py").write_text(NAMES_ITS_COLLECTIVES)
    told = jdistgrad("run", "--local", "-n", "3", "averages.py", "MPI", status=1)
    assert "CollectiveError: collectives of processes, made by worker" in told
    assert "the 3 workers of this world are threads of one process" in told


def test_the_status_of_a_job_of_which_no_rank_comes_to_its_end_is_its_own(jdistgrad, tmp_path):
    (tmp_path / "leaves.py").write_text("import os, jdistgrad as jd\njd.init()\njd.barrier()\nos._exit(3)\n")
    output = jdistgrad("run", "--timeline", "trace.json", "-n", "2", "leaves.py", status=3)
    assert "no rank came to its end: there is no timeline to write to trace.json" in output
    assert not (tmp_path / "trace.json").exists()


def test_the_traceback_of_the_worker_that_failed_comes_first(jdistgrad):
    output = jdistgrad("run", "-n", "3", "fails.py", status=None)
    assert output.startswith("Traceback")
    assert output.index("ValueError: boom") < output.index("worker1 (rank 1) failed: ValueError: boom; ending the job")


def test_compiled_programs_are_kept_for_the_next_run(jdistgrad, tmp_path):
    kept = []
    for _ in range(2):
        jdistgrad("run", "-n", "3", "--cache", "folder/cache", "program.py", "hello")
        kept.append({file.name for file in (tmp_path / "folder" / "cache").glob("*-cache")})
    assert kept[0]
    assert kept[1] == kept[0], "the second run compiled something again"


INTERRUPTS = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
import jdistgrad as jd

inside = sys.__dict__.setdefault("inside", threading.Barrier(3))  # each worker has a module of its own


def slow(x):
    inside.wait(30)
    if jd.rank() == 0:
        print("all are inside", end="")
        os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        time.sleep(0.02)
    return x


jd.init()
jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(slow, x, x))(jnp.ones(3)))
"""


def test_ctrl_c_ends_threads_that_are_in_compiled_code(jdistgrad, tmp_path):
    (tmp_path / "interrupts.py").write_text(INTERRUPTS)
    output = jdistgrad("run", "--local", "-n", "3", "--timeline", "trace.json", "interrupts.py", status=130)
    assert "all are inside" in output
    assert "atal" not in output
    assert (tmp_path / "trace.json").exists()


STOPS = """
import os, signal
import jdistgrad as jd
if jd.rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
jd.init(timeout=8)
"""


def test_ranks_that_never_came_are_named(jdistgrad, tmp_path):
    # Before MPI has started, ranks cannot tell each other: rank 2 is stopped, the others wait for it in C.
    (tmp_path / "stops.py").write_text(STOPS)
    output = jdistgrad("run", "-n", "3", "stops.py", status=None)
    assert "mpi_starts_when_every_rank_has_called_init" in output
    assert output.endswith("jdistgrad: ranks [2] of 3 had not called init when the job ended\n")


def test_a_thread_that_failed_is_shown_from_its_programs_first_line(jdistgrad):
    output = jdistgrad("run", "--local", "-n", "3", "fails.py", status=1)
    assert re.match(r'Traceback .*\n  File ".*/fails.py", line 6, in <module>\n', output)
    assert "raised by the main of rank 1" in output
    assert output.count("Traceback") == 1


def test_the_end_of_a_thread_is_the_programs(jdistgrad):
    assert jdistgrad("run", "--local", "-n", "3", "-c", "raise SystemExit('no data')", status=1) == "no data\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local"], "no program given"),
        (["--local", "missing.py"], "there is no script 'missing.py' in"),
        (["-n", "2", "python", "a.py", "1"], r"leave out 'python': .* jdistgrad run a\.py 1"),
        (["-n", "2", "pytest"], "there is no script 'pytest' in .*The module is run by -m: jdistgrad run -m pytest"),
        (["--local", "-m", "no_such_module"], "there is no module 'no_such_module' that could be run"),
        (["-m", "no_such_module.part"], "there is no module 'no_such_module.part' that could be run"),
        (["--local", "-m"], "-m needs a module after it"),
        (["--local", "-n", "3", "-m", "pytest", "--version"], "run plain pytest; or, as a job, jdistgrad run -n 3 -m"),
        (["--local", str(pathlib.Path(sys.executable).with_name("pytest"))], "run plain pytest"),
        (["--local", "-n", "0", "-c", "pass"], "a world has from 1 to"),
        (["--local", "-n", "1000", "-c", "pass"], "1000 workers are too many for one process: up to 256"),
        (
            ["--timeline", "no/such/trace.json", "-c", "pass"],
            r"trace.json cannot be written: there is no folder",
        ),
        (["--cache", __file__, "-c", "pass"], r"--cache .*File exists"),
        (["-n", "100000", "-c", "pass"], r"100000 ranks are too many for the \d+ cores here: .* as threads: --local"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys):
    assert main(["run", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_package_that_cannot_be_imported_says_why(jdistgrad, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import missing_module")
    (tmp_path / "package" / "training.py").touch()
    output = jdistgrad("run", "--local", "-n", "3", "-m", "package.training", status=1)
    assert "ModuleNotFoundError: No module named 'missing_module'" in output


SLEEPS = """
import os, pathlib, time
for process in (os.getpid(), os.getppid()):
    pathlib.Path(f"{process}.process").touch()
time.sleep(60)
"""

# SIGHUP has its default effect, as in a terminal, even if the suite itself was started with nohup.
HANGS_UP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


# What a killed mpirun left, whose process id the next mpirun has: the shell's.
LEFT = 'mkdir "$TMPDIR/ompi.$$"; touch "$TMPDIR/ompi.$$/pmix.$(uname -n).tool.$$"; exec "$@"'


def test_a_job_starts_where_a_killed_mpirun_has_left_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = launch.attend(
        ["sh", "-c", LEFT, "sh", *launch.command(3, ["-c", "print('started')"])], stdout=subprocess.PIPE
    )
    assert (job.returncode, job.stdout.count(b"started")) == (0, 3)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_job_ends_with_the_command_that_started_it(tmp_path, number):
    """However the command ends, neither ranks nor mpirun are left behind."""
    command = [sys.executable, "-c", HANGS_UP, sys.executable, "-m", "jdistgrad", "run", "-n", "3", "-c", SLEEPS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as job:
        wait_until(lambda: len(list(tmp_path.glob("*.process"))) == 4)
        job.send_signal(number)
        assert job.wait(20) != 0
    processes = [int(file.stem) for file in tmp_path.glob("*.process")]
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_command_that_shall_outlast_its_terminal_does(tmp_path):
    """The command is started with SIGHUP ignored, as nohup does."""
    command = [sys.executable, "-m", "jdistgrad", "run", "-n", "2", "-c", SLEEPS.replace("60", "3") + "print('slept')"]
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *command]
    with subprocess.Popen(ignoring, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        wait_until(lambda: len(list(tmp_path.glob("*.process"))) == 3)
        job.send_signal(signal.SIGHUP)
        output, _ = job.communicate(timeout=30)
    assert output.count("slept") == 2
    assert job.returncode == 0


TOLD = """
import os, pathlib, signal, time
told = []
signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
pathlib.Path(f"{os.getpid()}.process").touch()
while not told:
    time.sleep(0.05)
print("told", *map(int, told), flush=True)
"""


def test_signals_for_the_program_reach_all_ranks(tmp_path):
    """Batch systems announce the end of a job by them."""
    number = signal.SIGUSR2
    command = [sys.executable, "-m", "jdistgrad", "run", "--survive", "-n", "3", "-c", TOLD]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        wait_until(lambda: len(list(tmp_path.glob("*.process"))) == 3)
        job.send_signal(number)
        output, _ = job.communicate(timeout=30)
    assert output.count(f"told {int(number)}") == 3
    assert job.returncode == 0


def is_alive(process):
    """Return whether a process runs. An ended process stays in the table until its parent asks for its status."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ranks_that_leave_without_starting_mpi_do_not_keep_the_others(jdistgrad):
    program = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n    import jdistgrad as jd; jd.init(timeout=4)"
    output = jdistgrad("run", "-n", "3", "-c", program, status=None)
    assert "mpi_starts_when_every_rank_has_called_init" in output or "did not call init" in output


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
