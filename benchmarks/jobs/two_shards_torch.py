"""Job of pipelines.py: the network of examples/pipeline_two_shards.py, trained as PyTorch's pipeline example does.

A master sends each microbatch through both shards by RPC, puts the scores together, and runs one distributed backward
pass. Only the forward pass is pipelined.
"""

import os
import pathlib
import sys
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from mpi4py import MPI
from torch import nn
from torch.distributed.optim import DistributedOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

SPLITS, BATCH, SIDE, CLASSES, WIDTH = (1, 2, 4, 8), 24, 32, 100, 4


def conv(inner, outer, size, stride=1):
    return nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, before, width, stride=1):
        super().__init__()
        self.inner = nn.Sequential(
            conv(before, width, 1), nn.GroupNorm(WIDTH, width), nn.ReLU(),
            conv(width, width, 3, stride), nn.GroupNorm(WIDTH, width), nn.ReLU(),
            conv(width, 4 * width, 1), nn.GroupNorm(WIDTH, 4 * width),
        )  # fmt: skip
        same = before == 4 * width and stride == 1
        self.around = (
            nn.Identity() if same else nn.Sequential(conv(before, 4 * width, 1, stride), nn.GroupNorm(WIDTH, 4 * width))
        )

    def forward(self, x):
        return torch.relu(self.around(x) + self.inner(x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def first():
    return nn.Sequential(
        conv(3, WIDTH, 7, 2), nn.GroupNorm(WIDTH, WIDTH), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        Bottleneck(WIDTH, WIDTH), Bottleneck(4 * WIDTH, 2 * WIDTH, 2),
    )  # fmt: skip


def second():
    return nn.Sequential(
        Bottleneck(8 * WIDTH, 4 * WIDTH, 2),
        Bottleneck(16 * WIDTH, 8 * WIDTH, 2),
        Mean(),
        nn.Linear(32 * WIDTH, CLASSES),
    )


class Shard:
    def __init__(self, make):
        self.layers, self.lock = make(), threading.Lock()

    def forward(self, x):
        x = x.to_here()
        with self.lock:
            return self.layers(x)

    def parameters(self):
        return [rpc.RRef(one) for one in self.layers.parameters()]


def step(shards, splits):
    """Return the time of a step, of the optimizer's too."""
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [one for shard in shards for one in shard.remote().parameters().to_here()], lr=0.05
    )
    images, targets = torch.randn(BATCH, 3, SIDE, SIDE), torch.eye(CLASSES)[torch.randint(CLASSES, (BATCH,))]
    loss = nn.MSELoss()

    def run():
        with dist_autograd.context() as ctx:
            scores = []
            for part in images.split(BATCH // splits):
                features = shards[0].remote().forward(rpc.RRef(part))
                scores.append(shards[1].rpc_async().forward(features))
            dist_autograd.backward(ctx, [loss(torch.cat(torch.futures.wait_all(scores)), targets)])
            optimizer.step(ctx)

    return median(run, 20, 3)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29538")
    rank = MPI.COMM_WORLD.rank
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        shards = [rpc.remote("worker1", Shard, args=(first,)), rpc.remote("worker2", Shard, args=(second,))]
        report(**{f"splits_{splits}": step(shards, splits) for splits in SPLITS})
    rpc.shutdown()


if __name__ == "__main__":
    main()
