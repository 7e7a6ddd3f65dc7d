"""The timeline: the events of each worker, in order, with ids that match between workers."""

import operator
import time

import jax
import jax.numpy as jnp
import pytest

import jdistgrad as jd
from jdistgrad import events
from jdistgrad.observe import timeline as chrome
from jdistgrad.wire import launcher_env

pytestmark = pytest.mark.world(3)


@jax.jit
def layer(w, x):
    return jnp.tanh(w @ x)


def through_both(w, x):
    return jd.rpc_sync("worker2", layer, args=(w, x))


def loss_fn(w, x):
    hidden = jd.rpc_sync("worker1", through_both, args=(w, x))
    return jnp.sum(hidden * jnp.arange(1.0, 4.0))


def record(world, body):
    """Run a body on worker 0; return the recorded events: of all workers, or under mpirun of this rank."""
    with jd.timeline() as recorded:
        world.drive(body)
    return recorded.events


def of_worker(events, rank):
    return {rank} if launcher_env.launched() else {event.rank for event in events}


def test_a_call_stands_on_both_sides_with_one_id(world):
    events = record(world, lambda: jd.rpc_sync("worker1", time.sleep, args=(0.05,)))
    calls = {event.kind: event for event in events if event.name == "time.sleep"}
    here = launcher_env.rank() if launcher_env.launched() else None
    assert set(calls) == {None: {"call", "serve"}, 0: {"call"}, 1: {"serve"}}.get(here, set())
    assert len({event.details["call"] for event in calls.values()}) <= 1
    for kind, event in calls.items():
        assert event.worker == {"call": "worker0", "serve": "worker1"}[kind]
        assert event.end - event.start >= 0.05
    if here is None:
        assert calls["call"].start < calls["serve"].start
        assert calls["call"].details["to"] == "worker1"


def test_a_gradient_through_two_workers_in_order(world):
    def body():
        with jd.context():
            step = jd.jit(jd.value_and_grad(loss_fn))
            jax.block_until_ready(step(jnp.eye(3), jnp.ones(3)))

    events = sorted(record(world, body), key=lambda event: event.start)
    if launcher_env.launched():
        kinds = {event.kind for event in events}
        assert (
            {"call", "piece"} <= kinds if launcher_env.rank() == 0 else launcher_env.rank() > 2 or "pullback" in kinds
        )
        return
    served = [event for event in events if event.kind in ("serve", "pullback") and "message" in event.details]
    forward, back = [e for e in served if e.kind == "serve"], [e for e in served if e.kind == "pullback"]
    assert [event.worker for event in forward] == ["worker1", "worker2"]
    assert [event.worker for event in back] == ["worker1", "worker2"]
    assert [e.details["message"] for e in forward] == [e.details["message"] for e in back]
    assert all(call.end < pull.end for call, pull in zip(forward, back, strict=True))
    calls = {event.details["call"]: event for event in events if event.kind == "call"}
    assert all("call" in event.details for event in served if event.worker == "worker2")
    for event in served:
        if "call" in event.details:
            call = calls[event.details["call"]]
            assert (call.details["to"], call.details["message"]) == (event.worker, event.details["message"])
        else:
            call = asked_for_together(events, event.worker)
        assert call.start < event.start < call.end
    pieces = [event for event in events if event.kind == "piece"]
    assert pieces
    assert {event.worker for event in pieces} == {"worker0"}
    assert all(event.arrays is None for event in pieces)


def asked_for_together(events, worker):
    """Return the single call that requests from a worker a result and its pullback together."""
    to_it = [event for event in events if event.kind == "call" and event.details["to"] == worker]
    (call,) = [event for event in to_it if "through_both, the pullback of" in event.name]
    return call


def test_a_failed_call_says_so(world):
    def body():
        with pytest.raises(ZeroDivisionError):
            jd.rpc_sync("worker2", operator.truediv, args=(1, 0))

    events = [event for event in record(world, body) if event.name == "_operator.truediv"]
    assert all(event.details["failed"] for event in events)
    assert len(events) == (2 if not launcher_env.launched() else launcher_env.rank() in (0, 2))


def test_the_file_has_a_process_for_each_worker_and_an_arrow_for_each_call(world, tmp_path, capsys):
    path = tmp_path / "trace.json"
    with jd.timeline(path) as recorded:
        world.drive(lambda: [one.result() for one in [jd.rpc_async(k % 3, abs, args=(-k,)) for k in range(9)]])
    rank = launcher_env.rank() if launcher_env.launched() else None
    trace = chrome.read(path if rank is None else tmp_path / f"trace.rank{rank}.json")
    assert trace == recorded.trace()
    written = path if rank is None else tmp_path / f"trace.rank{rank}.json"
    assert f"{written}: {len(recorded.events)} events of " in capsys.readouterr().err
    entries = trace["traceEvents"]
    if rank is None:
        names = {e["args"]["name"] for e in entries if e["name"] == "process_name"}
        assert names == {"worker0", "worker1", "worker2"}
        begun, arrived = ({e["id"] for e in entries if e["ph"] == phase} for phase in "sf")
        assert begun == arrived
        assert len(begun) == 9
    for entry in entries:
        assert entry["pid"] in of_worker(recorded.events, rank)


def test_buckets_stand_after_the_gradients_in_them_were_ready(world):
    def main():
        me, dp = jd.init(), jd.DataParallel(bucket_cap_mb=1e-4)
        params = {"b": jnp.ones(5), "w": jnp.ones((40, 5))}
        dp.value_and_grad(lambda p, x: jnp.sum((x @ p["w"] + p["b"]) ** 2))(params, jnp.full(40, 1.0 + me.rank))
        jd.shutdown()

    with jd.timeline() as recorded:
        world.run(main)
    ranks = {launcher_env.rank()} if launcher_env.launched() else set(range(3))
    for rank in ranks:
        mine = [event for event in recorded.events if event.rank == rank]
        (backward,) = [event for event in mine if event.kind == "piece"]
        buckets = [event for event in mine if event.kind == "bucket"]
        assert sorted(event.details["bytes"] for event in buckets) == [20, 800]
        assert all(backward.start < event.start < event.end for event in buckets)
        assert [event.end for event in buckets] == sorted(event.end for event in buckets)


def test_nothing_is_recorded_outside(world):
    with jd.timeline() as recorded:
        pass
    world.drive(lambda: jd.rpc_sync("worker1", abs, args=(-1,)))
    assert recorded.events == []


def test_an_event_that_another_thread_tells_as_the_block_ends_is_left_out():
    with jd.timeline() as recorded:
        sink = events.sink  # where a worker is between the look for a listener and the word to it
    sink(events.Event(events.PIECE, 1, "worker1", "piece 0", 1.0, 2.0, {}, arrays=jnp.ones(3)))
    assert recorded.events == []


def test_two_at_once_are_refused():
    with jd.timeline(), pytest.raises(jd.TimelineError):
        jd.timeline().__enter__()


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path):
    done = []
    with pytest.raises(jd.TimelineError), jd.timeline(tmp_path / "missing" / "trace.json"):
        done.append("work")
    assert not done
    with jd.timeline():  # nothing is being recorded after the refusal
        pass
