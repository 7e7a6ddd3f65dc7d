"""Run a job over several simulated machines: ``make test-machines``, ``python -m machines --help``.

Takes Linux and root. Messages go by TCP, and signals, doorbells and shared memory do not reach all ranks.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from jdistgrad.cli import launch
from machines import agent
from machines.network import Machine, Machines

PASSED_ON = ("JAX", "XLA", "JDISTGRAD", "PYTHON", "OMPI_MCA", "PATH", "NPROC", "MALLOC")
OWN_NETWORK = "MACHINES_NETWORK"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m machines", description="Run a job over several simulated machines."
    )
    parser.add_argument("-n", type=int, default=3, help="how many ranks (default 3), dealt to the machines in turn")
    parser.add_argument("--machines", type=int, default=3, help="how many machines (default 3)")
    parser.add_argument("--survive", action="store_true", help="go on without ranks that die")
    parser.add_argument("program", nargs="+", help="after --: a program and its arguments, as after python")
    return parser.parse_args(arguments)


def job(machines: Sequence[Machine], chosen: argparse.Namespace, environment: dict[str, str]) -> list[str]:
    """Return the mpirun command of a job, for the first machine."""
    places = [f"{one.name}:{len(range(k, chosen.n, len(machines)))}" for k, one in enumerate(machines)]
    used = [place for place in places if not place.endswith(":0")]
    passed_on = [part for name in environment if name.startswith(PASSED_ON) for part in ("-x", name)]
    start = [*launch.mpirun(chosen.n, survive=chosen.survive), "--host", ",".join(used)]
    start += ["--prtemca", "plm_ssh_agent", agent.__file__, *passed_on]
    return machines[0].command([*start, sys.executable, *chosen.program])


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    machines = Machines(chosen.machines)
    with machines as there:
        environment = {**launch.environment(chosen.n), **(launch.SURVIVING if chosen.survive else {})}
        environment |= {"MACHINES_SOCKET": machines.socket}
        return subprocess.run(job(there, chosen, environment), env=environment, check=False).returncode


if __name__ == "__main__":
    if os.geteuid() != 0 or sys.platform != "linux":
        sys.exit("python -m machines: simulated machines take Linux, and root")
    if OWN_NETWORK not in os.environ:  # a network of its own, so that nothing is left of it
        again = ["unshare", "--net", sys.executable, "-m", "machines", *sys.argv[1:]]
        os.execvpe(again[0], again, {**os.environ, OWN_NETWORK: "1"})
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as Ctrl-C, with all machines
    sys.exit(main())
