"""Job of pipelines.py: the same pipelines with torch.distributed.pipelining over gloo."""

import os
import pathlib
import sys
import time
import warnings

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import pipelining

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

MICROBATCHES = 8


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight[0]


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        time.sleep(2 * ctx.seconds)
        return cotangent, ctx.saved_tensors[0], None


class Sleeper(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = torch.nn.Parameter(torch.ones(4)), seconds

    def forward(self, x):
        return Asleep.apply(x, self.weight, self.seconds)


def mean(output, target):
    return output.mean()


def own_time(bytes_between):
    x = torch.ones(MICROBATCHES, bytes_between // 4)
    return step(pipelining.Schedule1F1B, [Scale()], x, 50) / (2 * MICROBATCHES)


def step(schedule, modules, x, calls):
    """Return the time of a step of all ranks, which have these stages each."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    stages = [
        pipelining.PipelineStage(module, rank + k * size, size * len(modules), device)
        for k, module in enumerate(modules)
    ]
    made = schedule(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=mean)

    def run():
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            made.step(x)
        elif rank == size - 1:
            made.step(target=x[:, :1])
        else:
            made.step()
        dist.barrier()
        return time.perf_counter() - start

    return median(run, calls, 5)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
    comm = MPI.COMM_WORLD
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    x = torch.ones(MICROBATCHES, 4)
    found = {
        "own_4k": own_time(4 << 10),
        "own_1m": own_time(1 << 20),
        "sleeping_one_f_one_b_2": step(pipelining.Schedule1F1B, [Sleeper(0.005)], x, 8),
        "sleeping_interleaved_2": step(pipelining.ScheduleInterleaved1F1B, [Sleeper(0.0025), Sleeper(0.0025)], x, 8),
    }
    if comm.rank == 0:
        report(**found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
