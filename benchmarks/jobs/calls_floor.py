"""Job of calls.py: the least that a call of a Python function costs over MPI, by way of waiting for a message.

A call here is pickled, sent, found by a matched probe, unpickled and looked up; nothing is checked, timed or counted.
"""

import os
import pathlib
import pickle
import select
import socket
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, report, seconds

ROUNDS, CALLS, TAG = 3, 500, 7
WAYS = {"spin": float("inf"), "bell_50": 50e-6, "bell_200": 200e-6}  # for how long to probe before sleeping


def echo(x):
    return x


class Floor:
    """Two ends of a channel. A bell wakes the other rank if it sleeps: one byte through a socket."""

    def __init__(self, comm):
        self.comm, self.peer, self.status = comm, 1 - comm.rank, MPI.Status()
        name = f"\0calls-floor-{comm.bcast(os.getpid())}-"
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.bell.bind(f"{name}{comm.rank}")
        comm.Barrier()
        self.bell.connect(f"{name}{self.peer}")
        self.sleeper = select.poll()
        self.sleeper.register(self.bell, select.POLLIN)
        self.window = MPI.Win.Allocate_shared(64, comm=comm)
        self.asleep = [np.frombuffer(self.window.Shared_query(rank)[0], np.int32, 1) for rank in (0, 1)]

    def send(self, value):
        self.comm.Isend([pickle.dumps(value, 5), MPI.BYTE], self.peer, TAG).Wait()
        if self.asleep[self.peer][0]:
            self.bell.send(b"1")

    def receive(self, patience):
        start = time.perf_counter()
        while (found := self.comm.Improbe(self.peer, TAG, self.status)) is None:
            if time.perf_counter() - start >= patience:
                found = self.sleep()
                if found is not None:
                    break
        body = bytearray(self.status.Get_count(MPI.BYTE))
        found.Recv([body, MPI.BYTE])
        return pickle.loads(body)

    def sleep(self):
        """Sleep until the bell rings, and at most 20 ms; return a message that came before the other could see it."""
        self.asleep[self.comm.rank][0] = 1
        found = self.comm.Improbe(self.peer, TAG, self.status)
        if found is None and self.sleeper.poll(20):
            self.bell.recv(1)
        self.asleep[self.comm.rank][0] = 0
        return found

    def call(self, x, patience):
        self.send((__name__, "echo", (x,)))
        return self.receive(patience)

    def serve(self, patience):
        module, name, args = self.receive(patience)
        self.send(getattr(sys.modules[module], name)(*args))


def main():
    floor, x = Floor(MPI.COMM_WORLD), np.ones(1, np.float32)
    times = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, patience in WAYS.items():
            floor.comm.Barrier()
            for _ in range(few(CALLS)):
                if floor.comm.rank == 0:
                    times[way].append(seconds(lambda patience=patience: floor.call(x, patience)))
                else:
                    floor.serve(patience)
    if floor.comm.rank == 0:
        report(**{way: statistics.median(found) for way, found in times.items()})
        report(**{f"{way}_mean": statistics.mean(found) for way, found in times.items()})


if __name__ == "__main__":
    main()
