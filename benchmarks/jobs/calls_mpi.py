"""Job of calls.py: MPI alone sends 64 MiB between two ranks, both ways at once and one after the other."""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

ROUNDS, WARM_UP = 15, 5


def main():
    comm = MPI.COMM_WORLD
    peer = 1 - comm.rank
    out = np.asarray(jnp.ones(16 << 20, jnp.float32))  # the same memory that the calls send from
    back = np.ones(16 << 20, np.float32)

    def exchange():
        comm.Sendrecv(out, peer, recvbuf=back, source=peer)

    def there_and_back():
        if comm.rank == 0:
            comm.Send(out, peer)
            comm.Recv(back, peer)
        else:
            comm.Recv(back, peer)
            comm.Send(back, peer)

    found = {way.__name__: median(way, ROUNDS, WARM_UP) for way in (exchange, there_and_back)}
    if comm.rank == 0:
        report(**found)


if __name__ == "__main__":
    main()
