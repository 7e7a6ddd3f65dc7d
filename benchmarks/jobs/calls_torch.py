"""Job of calls.py: rank 0 measures calls to rank 1 with PyTorch's RPC."""

import os
import pathlib
import statistics
import sys
import warnings

import torch
from mpi4py import MPI
from torch.distributed import rpc

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import pipelined, report, times


def echo(x):
    return x


def round_trip(tensor, calls):
    return times(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,)), calls)


def in_flight(tensor):
    return pipelined(lambda: rpc.rpc_async("worker1", echo, args=(tensor,)), lambda future: future.wait(), 3000)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    rank = MPI.COMM_WORLD.rank
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        small = round_trip(torch.ones(1), 3000)
        report(
            small=statistics.median(small),
            small_mean=statistics.mean(small),
            rate=in_flight(torch.ones(1)),
            large=statistics.median(round_trip(torch.ones(16 << 20), 15)),
        )
    rpc.shutdown()


if __name__ == "__main__":
    main()
