"""The notebooks: they run without errors, print the outputs they were committed with, and can be interrupted."""

import pathlib

import nbclient
import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from jdistgrad.cli import launch
from jdistgrad.threads import usable_cores

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Jupyter's own code

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def shown(notebook):
    """Return the output of each code cell as one text, since a stream may come in several pieces."""
    return [
        "".join(str(output.get("text") or output.get("data", {}).get("text/plain")) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """Keep Jupyter's files in the test's folder, since the machine may have no home folder."""
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("NPROC", raising=False)  # this process has set it for itself


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_was_committed(path):
    committed = nbformat.read(path, as_version=4)
    executed = nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=200).execute()
    assert shown(executed) == shown(committed)


@pytest.fixture
def kernel(own_settings):
    manager, client = start_new_kernel()
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, source, timeout=30):
    return client.execute_interactive(source, timeout=timeout, output_hook=lambda message: None)["content"]


def test_engines_that_are_not_there_are_an_error(kernel):
    _, client = kernel
    assert run(client, "import jdistgrad as jd; engines = jd.MpiEngines(2)", timeout=150)["status"] == "ok"
    assert run(client, "%px import jdistgrad as jd; me = jd.init()", timeout=60)["status"] == "ok"
    answer = run(client, "engines.of_rank(2)")
    assert "there is no rank 2 among the engines, whose ranks are [0, 1]" in answer["evalue"]
    assert run(client, "%px jd.shutdown()")["status"] == "ok"
    assert run(client, "engines.close(); engines.close()")["status"] == "ok"
    answer = run(client, "%%px --noblock\n1 + 1")
    assert answer["status"] == "error"
    assert "Client cannot be used" in answer["evalue"]


def test_engines_share_the_cores_and_end_with_a_kernel_that_is_killed(kernel):
    manager, client = kernel
    (process,) = (one for one in psutil.Process().children() if manager.connection_file in one.cmdline())
    assert run(client, "import jdistgrad as jd; engines = jd.MpiEngines(2)", timeout=150)["status"] == "ok"
    assert run(client, "%px import jdistgrad as jd; me = jd.init()", timeout=60)["status"] == "ok"
    share = launch.surroundings(2, len(usable_cores()))["NPROC"]
    assert run(client, f"%px import os; assert os.environ['NPROC'] == '{share}'")["status"] == "ok"
    started = process.children(recursive=True)
    manager.shutdown_kernel(now=True)
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left


def test_the_interrupt_button_ends_the_wait_and_leaves_the_world_usable(kernel):
    manager, client = kernel

    assert run(client, "import threading, jdistgrad as jd; workers = jd.local_workers(3)")["status"] == "ok"
    waits = "print('waiting', flush=True); jd.on(1, threading.Event().wait)()"
    identifier = client.execute(waits, stop_on_error=False)  # otherwise Jupyter drops requests that follow soon
    printed = ""
    while "waiting\n" not in printed:  # a stream may come in several pieces
        printed += client.get_iopub_msg(timeout=30)["content"].get("text", "")
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=30))["parent_header"]["msg_id"] != identifier:
        pass
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert run(client, "assert jd.on(1, abs)(-3) == 3")["status"] == "ok"
