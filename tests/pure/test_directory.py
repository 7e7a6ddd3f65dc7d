"""Who is in a world."""

import numpy as np
import pytest

from jdistgrad.errors import DuplicateNameError, UnknownWorkerError, WorldError
from jdistgrad.rpc.directory import Directory, Hello, WorkerInfo, agree


def hello(name, version="1", allow_code=False):
    return Hello(name, "w", version, allow_code)


def test_workers_are_found_by_name_rank_and_info():
    directory = Directory(["ps", "trainer"])
    expected = WorkerInfo(1, "trainer")
    assert directory.find("trainer") == directory.find(1) == directory.find(np.int64(1)) == expected
    assert directory.find(expected) is directory.workers[1]


@pytest.mark.parametrize("to", ["nobody", 2, -1, WorkerInfo(1, "other"), WorkerInfo(7, "ps")])
def test_an_unknown_worker_is_refused_with_the_known_ones(to):
    with pytest.raises(UnknownWorkerError, match=r"no worker .* It has ps, trainer\."):
        Directory(["ps", "trainer"]).find(to)


@pytest.mark.parametrize("to", [1.5, None, ["ps"]])
def test_what_names_no_worker_at_all_is_refused(to):
    with pytest.raises(ValueError, match="its name, its rank or its info"):
        Directory(["ps", "trainer"]).find(to)


def test_two_workers_of_one_name_are_named():
    with pytest.raises(DuplicateNameError, match="ranks 0 and 2 both want the name 'a'"):
        agree([hello("a"), hello("b"), hello("a")])


def test_a_disagreement_names_the_rank_and_both_values():
    with pytest.raises(WorldError, match="version: rank 0 has '1', rank 2 has '2'"):
        agree([hello("a"), hello("b"), hello("c", version="2")])
    with pytest.raises(WorldError, match="allow_code: rank 0 has False, rank 1 has True"):
        agree([hello("a"), hello("b", allow_code=True)])
