"""The facts that must agree on all processes of a world, because functions travel by name and arrays by dtype."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence

import jax
import jaxlib.version
import numpy as np

from jdistgrad._version import __version__
from jdistgrad.config import settings
from jdistgrad.errors import WorldError

SCRIPT, X64, DEVICES, SURVIVE = "the script", "jax_enable_x64", "devices", "survive"
COLLECTIVES = "JDISTGRAD_COLLECTIVES"
TEST = "the test"
REMEDIES = {
    SCRIPT: "Start every rank with the same program. Where different ones are meant (mpirun -n 1 python a.py : -n 2 "
    "python b.py), set JDISTGRAD_SAME_SCRIPT=0; functions to be called belong in modules that all can import.",
    X64: 'Set jax.config.update("jax_enable_x64", True) on every rank before init, or on none.',
    COLLECTIVES: "Set it on every rank, or on none; mpirun passes it on to other nodes with -x JDISTGRAD_COLLECTIVES.",
    DEVICES: "Give init the same devices on every rank.",
    TEST: "Every rank must run the same tests in the same order: give pytest-randomly a seed (--randomly-seed=1), "
    "parametrize by lists, not by sets, and skip a test on all ranks or on none.",
    SURVIVE: "Give init the same survive on every rank, or set JDISTGRAD_SURVIVE alike.",
}
SAME_INSTALLATION = "Start every rank with the same installation."


def of_this_process() -> dict[str, str]:
    """Return the facts that the processes of an MPI job compare. Workers of one process need not compare them."""
    found = {
        "jdistgrad": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),  # code and pickles do not depend on the rest
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "mpi4py": _installed("mpi4py"),
        "mpi4jax": _installed("mpi4jax"),  # without it, compiled programs reduce in another way
        COLLECTIVES: settings.collectives or "the job's choice",
        X64: str(jax.dtypes.canonicalize_dtype(np.float64) == np.float64),
    }
    script = _script() if settings.same_script else None
    known = {SCRIPT: script, TEST: os.environ.get("PYTEST_CURRENT_TEST")}
    return found | {what: value for what, value in known.items() if value is not None}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _script() -> str | None:
    """Return the name and digest of the program that runs here; None in a notebook and the like, which has no file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not pathlib.Path(file).is_file():
        return None
    digest = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
    return f"{pathlib.Path(file).name} (sha256 {digest[:12]})"


def check(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise WorldError if ranks differ in a fact. A rank that does not state a fact is not compared in it."""
    for what in dict.fromkeys(what for told in facts for what in told):
        values = {rank: told[what] for rank, told in enumerate(facts) if what in told}
        first, expected = next(iter(values.items()))
        for rank, value in values.items():
            if value != expected:
                raise WorldError(
                    f"init: the workers disagree on {what}: rank {first} has {expected}, rank {rank} has {value}. "
                    f"{REMEDIES.get(what, SAME_INSTALLATION)}",
                    what=what,
                )
