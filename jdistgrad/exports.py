"""The public names of ``import jdistgrad as jd``."""

from typing import TYPE_CHECKING

from jdistgrad import collectives as collectives, pipeline as pipeline
from jdistgrad.autograd import traced_calls as _traced_calls
from jdistgrad.autograd.contexts import Context as Context, context as context, get_gradients as get_gradients
from jdistgrad.autograd.gradients import (
    RemoteGradient as RemoteGradient,
    backward as backward,
    grad as grad,
    value_and_grad as value_and_grad,
)
from jdistgrad.autograd.graph import Graph as Graph
from jdistgrad.autograd.staged.jit import jit as jit
from jdistgrad.collectives.default import barrier as barrier
from jdistgrad.data_parallel import hooks as hooks
from jdistgrad.data_parallel.buckets import plan_buckets as plan_buckets
from jdistgrad.data_parallel.parallel import DataParallel as DataParallel
from jdistgrad.errors import *  # noqa: F403
from jdistgrad.ffi.dispatch import provide_threads as _provide_threads
from jdistgrad.modules.function import RemoteFunction as RemoteFunction, RemoteModule as RemoteModule
from jdistgrad.modules.on_owners import get as get, tree_map as tree_map
from jdistgrad.notebooks import MpiEngines as MpiEngines
from jdistgrad.observe.timeline import Timeline as Timeline, timeline as timeline
from jdistgrad.optim.averaging import (
    average_gradients as average_gradients,
    keep_unused as keep_unused,
    local_sgd as local_sgd,
)
from jdistgrad.optim.distributed import DistributedOptimizer as DistributedOptimizer
from jdistgrad.optim.sharding import (
    divide_state as divide_state,
    gather_state as gather_state,
    shard_state as shard_state,
)
from jdistgrad.optim.transformation import on_owners as on_owners
from jdistgrad.pipeline.pipeline import Pipeline as Pipeline
from jdistgrad.rpc.api import (
    map as map,
    remote as remote,
    rpc_all as rpc_all,
    rpc_async as rpc_async,
    rpc_sync as rpc_sync,
)
from jdistgrad.rpc.directory import WorkerInfo as WorkerInfo
from jdistgrad.rpc.functions import register as register
from jdistgrad.rpc.leaving import shutdown as shutdown
from jdistgrad.rpc.local_workers import LocalWorkers as LocalWorkers, local_workers as local_workers, spawn as spawn
from jdistgrad.rpc.on import on as on, put as put
from jdistgrad.rpc.rref import RRef as RRef, by_reference as by_reference
from jdistgrad.rpc.worlds import (
    init as init,
    launched as launched,
    local_rank as local_rank,
    on_lost as on_lost,
    rank as rank,
    worker_info as worker_info,
    world_size as world_size,
)
from jdistgrad.saving.checkpoints import restore as restore, save as save
from jdistgrad.saving.marks import per_worker as per_worker, sharded as sharded
from jdistgrad.wire.launcher_env import launched as _launched

if TYPE_CHECKING:
    from jdistgrad.data_parallel.batch_norm import NnxSyncBatchNorm as NnxSyncBatchNorm, SyncBatchNorm as SyncBatchNorm

# Names of modules that import flax, which takes as long as JAX: imported when they are asked for.
_on_demand = dict.fromkeys(("NnxSyncBatchNorm", "SyncBatchNorm"), "jdistgrad.data_parallel.batch_norm")

if not _launched():
    _provide_threads()  # local worlds need them
_traced_calls.install()  # from here on, calls inside grad and jit are differentiable
