"""Job of gradients.py: rank 0 measures gradients across calls to rank 1 with PyTorch."""

import os
import pathlib
import sys
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from mpi4py import MPI
from torch.distributed.optim import DistributedOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report


def tensors():
    return torch.ones(3, 3, requires_grad=True), torch.full((3, 3), 2.0, requires_grad=True)


def note():
    def run():
        a, b = tensors()
        with dist_autograd.context() as ctx:
            loss = (rpc.rpc_sync("worker1", torch.add, args=(a, b)) * b).sum()
            dist_autograd.backward(ctx, [loss])
            dist_autograd.get_gradients(ctx)

    return median(run, 1000)


def chain(length):
    def run():
        a, b = tensors()
        with dist_autograd.context() as ctx:
            for _ in range(length):
                a = rpc.rpc_sync("worker1", torch.add, args=(a, b))
            dist_autograd.backward(ctx, [a.sum()])
            dist_autograd.get_gradients(ctx)

    return median(run, 200 // length + 20)


def elementwise(size):
    a, b = torch.ones(size, size, requires_grad=True), torch.ones(size, size, requires_grad=True)

    def run():
        with dist_autograd.context() as ctx:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(a, b)).sum()
            dist_autograd.backward(ctx, [loss])

    return median(run, 50)


def eager(size):
    x = torch.ones(size, requires_grad=True)

    def run():
        with dist_autograd.context() as ctx:
            dist_autograd.backward(ctx, [rpc.rpc_sync("worker1", torch.mul, args=(x, x)).sum()])
            dist_autograd.get_gradients(ctx)

    return median(run, 100)


def random_values():
    return torch.rand(3, 3, requires_grad=True)


def end_to_end():
    first, second = (rpc.remote("worker1", random_values) for _ in range(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [first, second], lr=0.05)

    def run():
        with dist_autograd.context() as ctx:
            loss = first.to_here() + second.to_here()
            dist_autograd.backward(ctx, [loss.sum()])
            optimizer.step(ctx)

    return median(run, 500)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    rank = MPI.COMM_WORLD.rank
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        chains = {f"chain_{length}": chain(length) for length in (1, 8, 10, 100)}
        report(eager=eager(1000), note=note(), large=elementwise(1024), end_to_end=end_to_end(), **chains)
    rpc.shutdown()


if __name__ == "__main__":
    main()
