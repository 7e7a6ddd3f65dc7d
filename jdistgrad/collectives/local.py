"""Collectives of a local world, where workers are threads of one process and read each other's arrays."""

from collections.abc import Sequence

from jdistgrad.collectives.engines import Threads
from jdistgrad.collectives.host import HostCollectives
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
        self.engine = Threads(Members(worker, range(worker.size) if workers is None else workers))
        self.rank, self.size = self.members.rank, self.members.size

    def __repr__(self) -> str:
        return f"Local(rank={self.rank}, size={self.size})"

    def agree(self, text: str) -> None:
        finish_programs()  # which meet in the same group
        super().agree(text)
