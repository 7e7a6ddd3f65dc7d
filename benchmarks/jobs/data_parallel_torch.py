"""Job of data_parallel.py: two ranks measure DistributedDataParallel over gloo beside local steps."""

import copy
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import in_turn, report

VARIANTS = {
    "cap_1": {"bucket_cap_mb": 1},
    "cap_25": {"bucket_cap_mb": 25},
    "view": {"gradient_as_bucket_view": True},
}


def mlp(layers, width, batch=64):
    blocks = [block for _ in range(layers) for block in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*blocks), torch.randn(batch, width)


def transformer(layers=4, width=256, length=128, batch=8):
    blocks = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks), torch.randn(batch, length, width)


def steps(name, made, calls):
    model, x = made
    models = {"local": copy.deepcopy(model)}
    models |= {kind: DistributedDataParallel(copy.deepcopy(model), **chosen) for kind, chosen in VARIANTS.items()}

    def run(model):
        model.zero_grad(set_to_none=True)
        (model(x) ** 2).mean().backward()

    found = in_turn([lambda model=model: run(model) for model in models.values()], calls, MPI.COMM_WORLD.Barrier)
    return {f"{name}_{kind}": seconds for kind, seconds in zip(models, found, strict=True)}


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = MPI.COMM_WORLD.rank
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
    dist.init_process_group("gloo", rank=rank, world_size=MPI.COMM_WORLD.size)
    found = steps("deep", mlp(64, 256), 20) | steps("wide", mlp(4, 2048), 12) | steps("transformer", transformer(), 8)
    if rank == 0:
        report(**found)
    dist.destroy_process_group()
    MPI.Finalize()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads still need Python's lock: if Python ends before they do, it sometimes aborts


if __name__ == "__main__":
    main()
