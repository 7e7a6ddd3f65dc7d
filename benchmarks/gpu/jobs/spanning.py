"""Job of table.py: a rank for each GPU measures steps over all of them, by hand and in host memory."""

import pathlib
import sys

import jax
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from jobs.data_parallel_jdistgrad import mlp
from jobs.devices_jdistgrad import by_hand
from measure import in_turn, report

import jdistgrad as jd


def main():
    me = jd.init(devices=True)
    loss, params, x = mlp(*(8, 4096, 1024) if jax.default_backend() != "cpu" else (3, 64, 16))
    runs = {
        "hand": by_hand(loss, params, x, together=False),
        "devices": (jd.DataParallel(jd.collectives.Devices()).value_and_grad(loss), params, x),
        "mpi": (jd.DataParallel(jd.collectives.MPI()).value_and_grad(loss), params, x),
    }
    made = [lambda run=run: jax.block_until_ready(run[0](*run[1:])) for run in runs.values()]
    found = in_turn(made, 20, MPI.COMM_WORLD.Barrier)
    if me.rank == 0:
        report(**dict(zip(runs, found, strict=True)))
    jd.shutdown()


if __name__ == "__main__":
    main()
