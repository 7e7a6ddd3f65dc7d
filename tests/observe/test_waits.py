"""The graph of waits, its cycles, and the report."""

import pytest

from jdistgrad.observe import waits
from jdistgrad.observe.wait_report import Silent, places_in, render
from jdistgrad.observe.waits import Wait

NAMES = ["worker0", "worker1", "worker2", "worker3"]


def call(to, seconds=2.0, **more):
    return {"id": f"0:{to}", "to": to, "function": "f", "seconds": seconds, "context": None, "serving": None, **more}


def served(caller, **more):
    one = {"id": "9:9", "caller": caller, "function": "g", "seconds": 1.0, "context": "0:3", "thread": 77}
    return {**one, **more}


def meeting(turn, peers, what="a barrier", inside_mpi=False):
    whole = {"what": what, "group": "'all'", "turn": turn, "peers": peers, "seconds": 4.0, "inside_mpi": inside_mpi}
    return {**whole, "spares_shutdown": False}


def worker(rank, calls=(), serving=(), collectives=(), shutdown=None, world="w", failure=None, refused=()):
    return {
        "rank": rank,
        "world": world,
        "names": NAMES,
        "home": 50 + rank,
        "failure": failure,
        "contexts": [],
        "calls": list(calls),
        "serving": list(serving),
        "collectives": list(collectives),
        "refused": dict(refused),
        "shutdown": shutdown,
    }


BAD = {"2": 3}


def process(*workers, label="rank0", threads=(), events=()):
    base = {"label": label, "rank": int(label[-1]), "pid": 4711, "host": "node", "cause": "asked"}
    return {**base, "workers": list(workers), "threads": list(threads), "events": list(events)}


def edges(*workers):
    return [(edge.waiter[1], edge.awaited[1], edge.what) for edge in waits.merge([process(*workers)]).edges]


def cycles(*pairs):
    found = waits.cycles([Wait(("w", a), ("w", b), "f", 1.0) for a, b in pairs])
    return [[rank for _, rank in cycle] for cycle in found]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([(0, 1), (1, 2)], []),
        ([(0, 1), (1, 2), (2, 0)], [[0, 1, 2]]),
        ([(2, 0), (0, 2), (1, 1)], [[0, 2], [1]]),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], [[0, 1], [2, 3]]),
        ([(0, 1), (1, 2), (2, 0), (2, 1)], [[0, 1, 2], [1, 2]]),
        ([(3, 1), (1, 2), (2, 1)], [[1, 2]]),  # 3 waits for a cycle, and is in none
    ],
)
def test_cycles_are_named_once_from_their_lowest_worker_on(pairs, expected):
    assert cycles(*pairs) == expected
    assert cycles(*pairs[::-1]) == expected


def test_a_cycle_lasts_as_long_as_its_latest_wait_and_of_several_waits_the_oldest_counts():
    a, b = ("w", 0), ("w", 1)
    found = [Wait(a, b, "f", 9.0), Wait(a, b, "g", 1.0), Wait(b, a, "h", 5.0)]
    assert waits.lasting([a, b], found) == 5.0


def test_calls_are_waits():
    made = call(1, context="2:5", serving="3:8")
    assert edges(worker(0, calls=[made])) == [(0, 1, "f (call 0:1, context 2:5, made while serving call 3:8)")]


def test_in_a_collective_a_worker_waits_for_those_that_are_not_in_the_same_one():
    here, before = meeting(5, [0, 1, 2, 3]), meeting(4, [0, 1, 2, 3])
    first = worker(0, collectives=[{**here, "peers": [1, 2, 3]}])
    second = worker(1, collectives=[{**here, "peers": [0, 2, 3]}])
    third = worker(2, collectives=[{**before, "peers": [1]}])
    found = edges(first, second, third)
    assert [edge[:2] for edge in found] == [(0, 2), (1, 2), (2, 1)]  # of worker 3, which gave no snapshot, none


def test_in_shutdown_a_worker_waits_for_those_outside_and_then_for_those_that_serve():
    ends = "shutdown, which it has not called"
    assert edges(worker(0, shutdown=3.0), worker(1), worker(2, shutdown=1.0)) == [(0, 1, ends), (2, 1, ends)]
    serves = worker(1, shutdown=2.0, serving=[served(0)])
    assert edges(worker(0, shutdown=3.0), serves) == [(0, 1, "shutdown, as it serves calls")]


def test_who_serves_a_call_in_its_shutdown_is_in_no_cycle_but_who_is_missed_in_a_collective_is():
    serves = worker(1, shutdown=2.0, serving=[served(0)])
    called = waits.merge([process(worker(0, calls=[call(1)]), serves)]).edges
    assert (len(called), waits.cycles(called)) == (2, [])
    missed = waits.merge([process(worker(0, collectives=[meeting(5, [1])]), worker(1, shutdown=2.0))]).edges
    assert waits.cycles(missed) == [[("w", 0), ("w", 1)]]


def test_two_worlds_of_one_process_do_not_mix():
    first, second = worker(0, calls=[call(1)]), worker(1, calls=[call(0)], world="another")
    assert waits.cycles(waits.merge([process(first, second)]).edges) == []


def test_the_report():
    threads = [{"id": 50, "name": "MainThread", "place": "train.py:8, in main", "stack": []}]
    threads += [{"id": 77, "name": "t", "place": "model.py:3, in step", "stack": []}]
    event = {"kind": "call", "worker": "worker0", "rank": 0, "name": "f", "ago": 0.5, "seconds": 0.1}
    collective = meeting(7, [1, 2], "an average", inside_mpi=True)
    everybody = meeting(8, [1], "a barrier")
    busy = worker(0, calls=[call(1)], serving=[served(2), served(1, thread=0)], collectives=[collective, everybody])
    snapshots = [
        process(busy, threads=threads, events=[{**event, "details": {"call": "0:4"}}] * 3),
        process(
            worker(1, calls=[call(0, 1.5)], collectives=[everybody], shutdown=6.0, failure="torn", refused=BAD),
            label="rank1",
        ),
        process(label="rank3", threads=threads),
    ]
    stacks = 'Current thread 0x01 (most recent call first):\n  File "/home/me/net.py", line 4 in run\n'
    silent = [Silent("rank2", {"rank": 2, "pid": 9, "host": "node"}, "it stands still", stacks)]
    assert (
        render("a job", snapshots, silent, events=1)
        == """a job

rank0, process 4711 on node, asked
  worker0 (rank 0) at train.py:8, in main
    waits 2.0 s for worker1: f (call 0:1)
    in a collective for 4.0 s: an average (number 7), without worker1, inside MPI; not known whether with worker2
    in a collective for 4.0 s: a barrier (number 8), with all others
    serves worker2 for 1.0 s: g (call 9:9, context 0:3), at model.py:3, in step
    serves worker1 for 1.0 s: g (call 9:9, context 0:3), whose future is not done
  0.500 s ago: worker0 call f, call 0:4

rank1, process 4711 on node, asked
  worker1 (rank 1)
    its world is broken: torn
    messages from worker2 refused or too late: 3
    in shutdown for 6.0 s
    waits 1.5 s for worker0: f (call 0:0)
    in a collective for 4.0 s: a barrier (number 8), with all others

rank3, process 4711 on node, asked
  in no world: init has not returned, or shutdown has
    MainThread: at train.py:8, in main
    t: at model.py:3, in step

rank2, process 9 on node: it stands still
  a thread at net.py:4, in run
  Current thread 0x01 (most recent call first):
    File "/home/me/net.py", line 4 in run

who waits for whom:
  worker0 -> worker1: f (call 0:1), 2.0 s
  worker0 -> worker1: an average, 4.0 s
  worker1 -> worker0: f (call 0:0), 1.5 s
  worker1 -> worker0: shutdown, which it has not called, 6.0 s
cycle: worker0 -> worker1 -> worker0 (for 4.0 s)
"""
    )


def test_snapshots_of_processes_that_ended_make_no_graph_with_those_of_now():
    now, before = process(worker(0, calls=[call(1)])), process(worker(1, calls=[call(0)]), label="rank1")
    running, ended = render("a job", [now], [], 0, [before]), render("a job", [], [], 0, [now, before])
    assert "waits 2.0 s for worker0" in running
    assert running.endswith("\nwho waits for whom:\n  worker0 -> worker1: f (call 0:1), 2.0 s\n")
    assert "who waited for whom:\n" in ended
    assert "cycle: worker0 -> worker1 -> worker0" in ended


def test_workers_of_which_nothing_is_there_are_named():
    silent = [Silent("rank2", {"rank": 2, "pid": 9, "host": "node"}, "it stands still")]
    assert "\nnothing in this folder is of worker1, worker3. If" in render("a job", [process(worker(0))], silent)
    assert "nothing" not in render("a job", [{**process(worker(0)), "rank": None}], [])  # threads of one process


def test_of_many_calls_a_few_are_shown():
    text = render("a job", [process(worker(0, calls=[call(1)] * 25))], [])
    assert "    and 15 more such\n" in text


def test_the_place_in_the_program_is_found_in_the_stacks_of_a_process_that_stands_still():
    stacks = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3/site-packages/numpy/core.py", line 1 in dot
  File "/home/me/model.py", line 12 in forward
  File "/home/me/train.py", line 3 in <module>

Thread 0x02 (most recent call first):
  File "/usr/lib/python3/site-packages/zmq/poll.py", line 7 in poll

Current thread 0x03 (most recent call first):
  File "/home/me/data.py", line 5 in load
"""
    assert places_in(stacks) == ["model.py:12, in forward", "data.py:5, in load"]
