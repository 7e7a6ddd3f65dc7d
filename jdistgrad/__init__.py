"""Gradients that cross process boundaries, in pure JAX."""

import difflib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from jdistgrad._version import __version__ as __version__
from jdistgrad.wire.launcher_env import launched as _launched

if TYPE_CHECKING:
    from jdistgrad.exports import *  # noqa: F403

if _launched() or "jax" in sys.modules:  # must be set before the program's first array
    from jdistgrad.ffi import dispatch as _dispatch

    _dispatch.run_programs_where_they_are_called()
    if not _launched():
        _dispatch.provide_threads()


FROM_TYPING = "Any", "TYPE_CHECKING"


def _offered() -> dict[str, Any]:
    """Return the public names, with their values, or the names of their modules if these are imported on demand."""
    exports = vars(importlib.import_module(f"{__name__}.exports"))
    found = {name: value for name, value in exports.items() if name[0].isalpha() and name not in FROM_TYPING}
    return found | exports["_on_demand"]


# What ``dir(jd)`` and completion show. The other names are PyTorch's, classes of results, and errors.
_SHOWN = [
    "DataParallel", "DistributedOptimizer", "Pipeline", "RRef", "RemoteFunction", "RemoteModule", "barrier",
    "by_reference", "collectives", "context", "get", "grad", "hooks", "init", "jit", "local_workers", "on", "on_owners",
    "pipeline", "put", "rank", "restore", "save", "shard_state", "shutdown", "spawn", "tree_map", "value_and_grad",
    "worker_info", "world_size",
]  # fmt: skip

_ELSEWHERE = {  # what PyTorch and Horovod call it: what it is called here
    "DDP": "DataParallel",
    "DistributedDataParallel": "DataParallel",
    "init_rpc": "init",
    "init_process_group": "init",
    "get_rank": "rank",
    "get_worker_info": "worker_info",
    "get_world_size": "world_size",
    "size": "world_size",
    "all_reduce": "collectives.of_this_world().allreduce",
    "allreduce": "collectives.of_this_world().allreduce",
    "no_sync": "DataParallel.no_sync",
    "Join": "DataParallel.join",
    "ZeroRedundancyOptimizer": "shard_state",
    "broadcast": "collectives.of_this_world().broadcast",
    "all_gather": "collectives.of_this_world().allgather",
    "new_group": "collectives.of_this_world",
    "destroy_process_group": "shutdown",
    "wait_all": "rpc_all",
    "load": "restore",
    "no_grad": "jax.lax.stop_gradient",
}


if not TYPE_CHECKING:  # checkers would believe that every name exists

    def __getattr__(name: str) -> Any:
        """Import a public name, and JAX with it, on first use.

        Neither ``jdistgrad run`` nor pytest, which imports our plugin in every run, needs JAX.
        """
        if name == "__all__":
            return sorted(_offered().keys() - {"map"})  # a star import must not replace the built-in map
        if not name.startswith("__"):
            if importlib.util.find_spec(f"{__name__}.{name}"):
                return importlib.import_module(f"{__name__}.{name}")
            if name in _offered():
                value = _offered()[name]
                found = getattr(importlib.import_module(value), name) if isinstance(value, str) else value
                return globals().setdefault(name, found)
            near = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, _offered(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *_SHOWN]
