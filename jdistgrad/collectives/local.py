"""Collectives of a local world, where workers are threads of one process and read each other's arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jdistgrad.collectives.arithmetic import combined
from jdistgrad.collectives.base import Op
from jdistgrad.collectives.host import HostCollectives, described
from jdistgrad.collectives.primitive import Route
from jdistgrad.collectives.roll_call import require_same_texts
from jdistgrad.collectives.world import FOR_ANY_WORLD, is_local
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.worker import current_worker


class Local(HostCollectives):
    """Collectives with workers of the current local world as ranks.

    Every worker must make its ``Local`` objects in the same order: the k-th of each belong together.

    Arguments:
      workers: the world ranks of the participants; default all.
    """

    def __init__(self, workers: Sequence[int] | None = None) -> None:
        worker = current_worker()
        if not is_local(worker):
            raise CollectiveError(
                f"collectives of threads, made by {worker.info}: this world's workers are processes, and none would "
                f"meet another one. {FOR_ANY_WORLD}"
            )
        self._begin(Members(worker, range(worker.size) if workers is None else workers))

    def _begin(self, members: Members) -> None:
        self.members, self.rank, self.size = members, members.rank, members.size

    def __repr__(self) -> str:
        return f"Local(rank={self.rank}, size={self.size})"

    def twin(self) -> "Local":
        other = object.__new__(Local)
        other.timeout = self.timeout
        other._begin(self.members.again())
        return other

    def agree(self, text: str) -> None:
        finish_programs()  # which meet in the same group
        super().agree(text)

    def _exchange(self, what: str, value: Any) -> list[Any]:
        found = self.members.begin((what, value), what).wait(self.timeout)
        require_same_texts([text for text, _ in found])
        return [value for _, value in found]

    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        flat = memory.reshape(-1)
        result = np.empty_like(flat) if self.rank == 0 else None  # all ranks write to rank 0's
        shared = self._exchange(f"a {op} of {memory.dtype}[{flat.size}]", (flat, result))
        total = shared[0][1]
        mine = slice(flat.size * self.rank // self.size, flat.size * (self.rank + 1) // self.size)
        total[mine] = combined([theirs[mine] for theirs, _ in shared], op)
        self._exchange("the end of a reduction", None)
        flat[:] = total

    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        shared = self._exchange(f"a broadcast of {memory.dtype}{list(memory.shape)}", memory)
        if self.rank != root:
            memory[...] = shared[root]
        self._exchange("the end of a broadcast", None)

    def moved(self, name: str, memory: np.ndarray, how: Any) -> np.ndarray:
        shared = self._exchange(described(name, memory, how), memory)
        if name == "allgather":
            found = np.stack(shared)
        elif isinstance(how, Route):
            _, source = how.ends(self.rank)
            found = np.zeros_like(memory) if source is None else np.array(shared[source])
        elif name == "alltoall":
            found = np.stack([theirs[self.rank] for theirs in shared])
        else:
            rows = slice(len(memory) // self.size * self.rank, len(memory) // self.size * (self.rank + 1))
            found = combined([theirs[rows] for theirs in shared], "sum").astype(memory.dtype, copy=False)
        self._exchange(f"the end of {name}", None)
        return found
