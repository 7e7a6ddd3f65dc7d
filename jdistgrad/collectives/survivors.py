"""Groups over MPI that go on without ranks that die: after each operation the ranks vote whether all have completed it.

When a rank dies, MPI raises an error on some of the others, and not in the same operation on all. A rank that sees one
revokes the communicator, so that nobody waits in an operation that will not end, and all come to the vote. The vote is
``MPI_Comm_agree`` (ULFM), whose result is the same on all live ranks, even if ranks die meanwhile. Only if all ranks
are alive and have completed the operation does it count; otherwise all shrink the communicator to the live ranks, and
repeat the operation. So no rank uses a result that another rank lacks.

A vote costs a wait for the slowest rank. Ranks that MPI takes to be alive, but which do not answer, keep the others
from voting; that ends in an error. MPI learns only of killed ranks, so the launcher makes ranks that exit look killed
(``cli.launch``), and a hanging rank is killed where it can be reached.
"""

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jdistgrad.collectives.by_mpi4jax import AT_ONCE
from jdistgrad.collectives.engines import OverMPI
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.world import TOLD_SECONDS, complete, is_failure, lost_among
from jdistgrad.errors import CollectiveError, MissingRanksError, WorkerLostError
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

ENDING_SECONDS = 5.0  # how long a rank whose step has failed may take to exit
UNKNOWN_SECONDS = 10.0  # how long MPI may consider a lost worker alive
VOTE = -1  # the turn of all votes: ranks come to a vote from different operations

log = logging.getLogger("jdistgrad.data_parallel")


class Survivors(MPI):
    """A group that goes on without ranks that die.

    Attributes:
      first_ranks: the world ranks of the group as it was made.
      voting: whether the ranks vote on the current operation. Otherwise an error is final, and names the lost rank.
    """

    survives, voting = True, True

    def __init__(self, group: MPI):
        own = group._over(group.engine.again(group.timeout))  # a channel of its own
        vars(self).update(vars(own), _of_programs=None, _by_mpi4jax=False)
        self.first_ranks = self.world_ranks
        self.engine.interrupt = self.engine.comm.Revoke

    def place_of(self, rank: int) -> int:
        worker = self.first_ranks[rank]
        if worker not in self.world_ranks:
            raise CollectiveError(f"rank {rank} of this group, {names_of([worker])}, is lost: choose a remaining one")
        return self.world_ranks.index(worker)

    def rank_at(self, place: int) -> int:
        return self.first_ranks.index(self.world_ranks[place])

    def explain(self, error: BaseException | None) -> None:
        """Add a note with the workers behind the ranks, if some are lost: the others have moved up."""
        if self.size < len(self.first_ranks) and error is not None and not hasattr(error, "__notes__"):
            error.add_note(f"The remaining ranks 0 to {self.size - 1} of this group: {names_of(self.world_ranks)}")

    def vote(self, *, whole: bool) -> bool:
        """Return whether all ranks are alive and vote that an operation is whole; the same on all live ranks.

        Raises:
          MissingRanksError: some ranks did not come in time.
          WorkerLostError: a rank is lost, and MPI does not know of it; or a rank will never come.
        """
        if not whole:
            self.engine.comm.Revoke()
        ballot = np.array([whole], np.int32)
        entry = CollectiveEntry("a vote on an operation", ("in MPI", self.members.name), VOTE)
        with WatchedBlock(self.keeper(), entry, self.world_ranks, goes_on=True) as together:
            try:
                self._wait_for_vote(self.engine.comm.Iagree(ballot), ballot, together)
            except Exception as error:
                if not is_failure(error):
                    raise
                return False
        return bool(ballot[0])

    def _wait_for_vote(self, request: Any, ballot: np.ndarray, together: WatchedBlock) -> None:
        if poll(request.Test, AT_ONCE):  # before the checks cost anything
            return
        known: dict[int, float] = {}

        def check() -> None:
            together.check()
            _require_to_stay()
            worker, now = current_worker(), time.monotonic()
            for rank in lost_among(self.world_ranks):
                if now - known.setdefault(rank, now) > UNKNOWN_SECONDS:
                    raise WorkerLostError(
                        f"{worker.info}: {worker.peers.lost[rank]}, but MPI considers it alive, so the others cannot "
                        "go on without it. Start the job again from its last checkpoint.",
                        worker=worker.directory.workers[rank],
                    )

        if not complete(request, ballot, self.timeout, check):
            text = f"a vote on an operation did not end within {self.timeout:g} s. {together.unfinished()}"
            raise MissingRanksError(text, missing=[], seconds=self.timeout)

    def has_lost_after(self, failed: Collection[int]) -> bool:
        """Give ranks whose step failed 5 s to exit; return whether a rank is lost."""
        ending = {self.world_ranks[rank] for rank in failed}
        if ending:
            poll(lambda: ending <= set(lost_among(self.world_ranks)), ENDING_SECONDS)
        return bool(ending) and bool(lost_among(self.world_ranks))

    def without_lost(self) -> "Survivors":
        """Return the group of the live ranks. All of them must call it, after a failed vote."""
        from mpi4py import MPI as mpi  # noqa: N811

        _require_to_stay()
        self.engine.comm.Revoke()
        comm = self.engine.comm.Shrink()
        ranks = [
            self.world_ranks[place]
            for place in mpi.Group.Translate_ranks(comm.group, range(comm.size), self.engine.comm.group)
        ]
        engine = OverMPI(comm, Members(self.keeper(), ranks, self.members.name), comm.Revoke)
        other = self._over(engine).adjusted(rank=comm.rank, size=comm.size)
        lost, peers = set(self.world_ranks) - set(other.world_ranks), current_worker().peers
        if lost:
            poll(lambda: lost <= peers.lost.keys(), TOLD_SECONDS)  # another thread is about to find out
            log.warning("data-parallel steps continue on %d ranks, without %s", other.size, names_of(sorted(lost)))
        return other


def names_of(ranks: Sequence[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in ranks)


def _require_to_stay() -> None:
    """Raise if the others consider this worker lost: it must not be in the group that they form."""
    if current_worker().peers.left:
        raise WorkerLostError("this worker has left the others, which continue without it")
