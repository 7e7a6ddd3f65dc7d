"""The barrier of a world."""

import time

import pytest
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.data_parallel.collectives.default import shared

pytestmark = pytest.mark.world(1, 3)


@on_every_worker
def test_nobody_passes_before_all_have_come(world, rank, size):
    for turn in range(3):
        if rank == turn % size:
            time.sleep(0.05)
        before = time.time()
        jd.barrier()
        arrivals = jd.collectives.of_this_world().gather_objects((before, time.time()))
        assert max(came for came, _ in arrivals) <= min(left for _, left in arrivals)


@on_every_worker
def test_ranks_in_another_collective_are_told(big_world, rank, size):
    with pytest.raises(jd.DisagreementError):
        jd.barrier() if rank else shared().agree("something else")
    jd.barrier()
