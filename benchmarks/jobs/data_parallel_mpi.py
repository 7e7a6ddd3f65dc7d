"""Job of data_parallel.py: two ranks reduce 64 MiB in place with MPI alone."""

import pathlib
import sys

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report


def main():
    memory = np.ones(1 << 24, np.float32)
    seconds = median(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, memory), 8, warm_up=3)
    if MPI.COMM_WORLD.rank == 0:
        report(large=seconds)


if __name__ == "__main__":
    main()
