"""The directory: the members of a world, by name, rank and info."""

import jax
import pytest

from jdistgrad.errors import DuplicateNameError, UnknownWorkerError, WorldError
from jdistgrad.rpc import directory
from jdistgrad.rpc.directory import Directory, Hello, WorkerInfo, agree, name_of


def hello(name, **facts):
    return Hello(name, "w", facts)


@pytest.mark.parametrize(
    ("error", "to"),
    [(UnknownWorkerError, to) for to in ("nobody", 2, -1, WorkerInfo(1, "other"), WorkerInfo(7, "ps"))]
    + [(ValueError, to) for to in (1.5, None, ["ps"])],
)
def test_an_unknown_worker_is_refused_with_the_known_ones(error, to):
    with pytest.raises(error, match=r"no worker .* It has ps, trainer\.|a worker is named by its name"):
        Directory(["ps", "trainer"]).find(to)


def test_two_workers_of_one_name_are_named():
    with pytest.raises(DuplicateNameError, match="ranks 0 and 2 both want the name 'a'"):
        agree([hello("a"), hello("b"), hello("a")])


def test_a_disagreement_names_the_rank_and_both_values():
    with pytest.raises(WorldError, match=r"disagree on jax: rank 0 has 1, rank 2 has 2\. .*the same installation"):
        agree([hello("a", jax="1"), hello("b", jax="1"), hello("c", jax="2")])


def test_what_a_rank_does_not_tell_is_not_compared():
    agree([hello("a", jax="1"), hello("b", script="x"), hello("c", jax="1", script="x")])
    with pytest.raises(WorldError):
        agree([hello("a"), hello("b", script="x"), hello("c", script="y")])


def test_what_this_process_tells():
    found = directory.facts_of_this_process()
    assert found["jax"] == jax.__version__
    assert found[directory.X64] == "False"
    with jax.enable_x64(True):
        assert directory.facts_of_this_process() == {**found, directory.X64: "True"}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, "worker2"),
        *((name, name) for name in ("ps", "Größe/2", "w" * 64)),
        ("trainer{rank}", "trainer2"),
        ("{rank}-of-{many}", "2-of-{many}"),
        (["ps", "a", "b"], "b"),
        (lambda rank: "ps" if rank == 0 else f"trainer{rank}", "trainer2"),
    ],
)
def test_a_name_is_found_for_a_rank(names, expected):
    assert name_of(names, 2, 3) == expected


@pytest.mark.parametrize(
    "names",
    [
        *("", "a b", "worker\n1", "tab\t", "nul\0", "\u2028", "w" * 65, 7, b"worker"),
        *(lambda rank: rank, ["a", "", "c"], lambda rank: "with space", ["ps", "a"]),
    ],
)
def test_names_that_cannot_stand_in_a_message(names):
    with pytest.raises(ValueError, match="name"):
        name_of(names, 1, 3)
