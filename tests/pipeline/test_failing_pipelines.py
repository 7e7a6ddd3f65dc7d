"""Steps that cannot work: who is to blame is named, nobody waits for ever, and the next step is right."""

import contextlib
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import needs_pickling, on_worker0, wait_until_nobody_takes_part, wire_world as wire_world

import jdistgrad as jd
from jdistgrad import pipeline as pp
from jdistgrad.errors import FunctionError
from jdistgrad.schedules.schedule import Action, Kind


def ones(width):
    return jnp.ones((width, width))


def multiply(params, x):
    return jnp.tanh(x @ params / len(params))


def mean(output, target):
    return jnp.mean(output - target)


def fails(params, x):
    raise RuntimeError("the stage broke")


@jax.custom_vjp
def breaks_backwards(x):
    return x


def _no_rule(_, cotangent):
    raise RuntimeError("the rule broke")


breaks_backwards.defvjp(lambda x: (x, None), _no_rule)


def fails_backwards(params, x):
    return breaks_backwards(multiply(params, x))


def fails_with_three_rows(params, x):
    if len(x) == 3:
        raise RuntimeError("three rows broke it")
    return multiply(params, x)


def refs_on_all(widths=None):
    size = jd.world_size()
    return [jd.remote(k % size, ones, args=((widths or [4] * 3)[k],)) for k in range(3)]


def pipeline_of(functions, refs, **options):
    workers = [k % jd.world_size() for k in range(3)]
    options = {"loss": mean, "workers": workers, **options}
    return jd.Pipeline(list(zip(functions, refs, strict=True)), pp.one_f_one_b(3, 4), **options)


def notes(raised):
    return "\n".join(raised.value.__notes__)


X, Y = np.ones((8, 4), "float32"), np.zeros((8, 4), "float32")


def steps_well(refs):
    with jd.context():
        loss = pipeline_of([multiply] * 3, refs).step(X, targets=Y)
    assert float(loss) == pytest.approx(np.tanh(np.tanh(np.tanh(1.0))), rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "function", "what", "action"),
    [(0, fails, "stage broke", "F0"), (2, fails, "stage broke", "F0"), (1, fails_backwards, "rule broke", "B0")],
)
@on_worker0
def test_a_stage_that_raises_is_named_with_microbatch_action_and_worker(world, stage, function, what, action):
    refs, functions = refs_on_all(), [multiply] * 3
    functions[stage] = function
    with jd.context() as ctx:
        with pytest.raises(RuntimeError, match=what) as raised:
            pipeline_of(functions, refs).step(X, targets=Y)
        assert ctx.closed
    (named,) = [line for line in notes(raised).splitlines() if line.startswith("In ")]
    assert f"In {stage}{action}: stage {stage}, microbatch 0," in named
    assert f"worker{stage % jd.world_size()}" in named
    steps_well(refs)
    wait_until_nobody_takes_part()


_computed = []


def notes_that_it_computed(x):
    _computed.append(len(x))
    time.sleep(0.2)
    return x


@jax.custom_vjp
def noted(x):
    return jax.pure_callback(notes_that_it_computed, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


noted.defvjp(lambda x: (noted(x), None), lambda _, g: (g,))


def slow(params, x):
    return noted(multiply(params, x))


@on_worker0
def test_a_driver_with_much_to_do_learns_of_a_failure_between_its_actions(wire_world):
    """GPipe: the driver's stage needs nothing of the others for all its forward passes."""
    microbatches, last = 20, jd.world_size() - 1
    refs = [jd.remote(0, ones, args=(4,)), jd.remote(last, ones, args=(4,))]
    schedule = pp.gpipe(2, microbatches)
    pipeline = jd.Pipeline([(slow, refs[0]), (fails, refs[1])], schedule, loss=mean, workers=[0, last])
    _computed.clear()
    x = np.ones((microbatches, 4), "float32")
    with jd.context(), pytest.raises(RuntimeError):
        pipeline.step(x, targets=x)
    assert 0 < len(_computed) < microbatches


def set_here(name, function):
    """Define a function of this module's, as a script comes to it; or take it away."""
    globals().pop(name) if function is None else globals().update({name: function})


def comes_late(params, x):
    return multiply(params, x)


@needs_pickling
@on_worker0
def test_a_stage_that_its_worker_has_not_come_to_can_be_tried_again(wire_world):
    refs, last = refs_on_all(), min(jd.world_size(), 3) - 1
    pipeline = pipeline_of([comes_late] * 3, refs)
    jd.rpc_sync(last, set_here, args=("comes_late", None))
    try:
        for _ in range(2):
            with pytest.raises(FunctionError), jd.context():
                pipeline.step(X, targets=Y)
    finally:
        jd.rpc_sync(last, set_here, args=("comes_late", multiply))
    with jd.context():
        loss = pipeline.step(X, targets=Y)
    assert float(loss) == pytest.approx(np.tanh(np.tanh(np.tanh(1.0))), rel=1e-6)


def batch(rows):
    return np.ones((rows, 4), "float32"), np.zeros((rows, 4), "float32")


@on_worker0
def test_steps_fail_and_the_next_is_right(world):
    refs = refs_on_all()
    pipeline = pipeline_of([multiply, multiply, fails_with_three_rows], refs)
    for rows in [8, 12, 8, 12, 12, 8]:
        x, y = batch(rows)
        with jd.context():
            if rows == 12:
                with pytest.raises(RuntimeError):
                    pipeline.step(x, targets=y)
            else:
                assert float(pipeline.step(x, targets=y)) == pytest.approx(np.tanh(np.tanh(np.tanh(1.0))), rel=1e-6)
    wait_until_nobody_takes_part()


_go_on = threading.Event()


def stands_still_with_three_rows(params, x):
    if len(x) == 3:
        _go_on.wait(60)
    return multiply(params, x)


def go_on():
    _go_on.set()


@on_worker0
def test_a_stage_that_stands_still_ends_the_step_after_its_timeout(world):
    """The stages before it have been compiled for the shape: the last worker alone has something to do."""
    refs, last = refs_on_all(), min(jd.world_size(), 3) - 1
    if last == 0:
        pytest.skip("one rank would stand still itself: the runs with more ranks run this test")
    functions, (x, y) = [multiply] * 3, batch(12)
    with jd.context():
        pipeline_of(functions, refs).step(x, targets=y)
    functions[last] = stands_still_with_three_rows
    with pytest.raises(jd.CallTimeoutError) as raised, jd.context():
        pipeline_of(functions, refs, timeout=3.0).step(x, targets=y)
    jd.rpc_sync(last, go_on)
    assert f"worker{last} (rank {last}): {last}F0: stage {last}, microbatch 0, forward: computing" in notes(raised)
    steps_well(refs)


_begun = threading.Event()


def says_that_it_begins(params, x):
    _begun.set()
    while not _go_on.wait(0.1):  # Python wakes no thread for a signal that comes just before the thread falls asleep
        pass
    return multiply(params, x)


def press_when_begun(main_thread):
    assert _begun.wait(60)
    signal.pthread_kill(main_thread, signal.SIGINT)


@pytest.mark.parametrize("stage", [0, 1])
def test_ctrl_c_ends_a_step_and_the_next_is_right(stage):
    """Stage 0 is the main thread's own, which then is inside the stage; else it waits for the others."""
    _begun.clear()
    _go_on.clear()
    with jd.local_workers(3):
        refs, functions = refs_on_all(), [multiply] * 3
        functions[stage] = says_that_it_begins
        pipeline = pipeline_of(functions, refs)
        presses = threading.Thread(target=press_when_begun, args=(threading.get_ident(),))
        presses.start()
        with jd.context() as ctx:
            with pytest.raises(KeyboardInterrupt):
                pipeline.step(X, targets=Y)
            assert not _go_on.is_set()
            assert ctx.closed
        presses.join()
        _go_on.set()
        steps_well(refs)
        wait_until_nobody_takes_part()


def too_slow(x):
    _go_on.wait(3)
    return np.asarray(x)


def finds_time_over(params, x):
    return multiply(params, x) + jax.pure_callback(too_slow, jax.typeof(x), jax.lax.stop_gradient(x))


@needs_pickling
@pytest.mark.parametrize("slow", [0, 2])
@on_worker0
def test_the_drivers_own_stage_that_takes_too_long_is_named(wire_world, slow):
    """Nobody can interrupt what the driver computes itself; but the step must not end as if it had been in time.

    Not in a local world, where a result may be handed on before it has been computed.
    """
    refs, functions, placement = refs_on_all(), [multiply] * 3, [1 % jd.world_size()] * 3
    functions[slow], placement[slow] = finds_time_over, 0
    stages, options = list(zip(functions, refs, strict=True)), {"loss": mean, "workers": placement}
    _go_on.set()
    with jd.context():  # compiles
        jd.Pipeline(stages, pp.gpipe(3, 1), **options).step(X, targets=Y)
    _go_on.clear()
    with pytest.raises(jd.CallTimeoutError) as raised, jd.context():
        jd.Pipeline(stages, pp.gpipe(3, 1), timeout=2, **options).step(X, targets=Y)
    begun = "computations that its actions have begun"  # where JAX runs a program on another thread
    assert re.search(rf"In ({slow}[FB]0: stage {slow}, microbatch 0, \w+|{begun}), on worker0", notes(raised))
    steps_well(refs)


@on_worker0
def test_an_average_that_is_no_data_parallel_is_named(world):
    refs = refs_on_all()
    stages = [pp.Stage(multiply, refs[0]), pp.Stage(multiply, refs[1], average=refs[1]), (multiply, refs[2])]
    with pytest.raises(TypeError) as raised, jd.context():
        jd.Pipeline(stages, pp.gpipe(3, 2), loss=mean, workers=[ref.owner for ref in refs]).step(X, targets=Y)
    assert "In average= of stage 1" in notes(raised)
    steps_well(refs)


def loss_of_three(output, target):
    return jnp.mean(output), output, target


def loss_and_text(output, target):
    return jnp.mean(output), {"name": "a batch"}


def times_number(params, given):
    return multiply(params, given[0]) * given[1]


def with_text(params, x):
    return multiply(params, x), "text"


def vector_loss(output, target):
    return output[:, 0]


@on_worker0
def test_what_cannot_be_made_a_pipeline_is_refused(world):
    refs = refs_on_all()
    good = list(zip([multiply] * 3, refs, strict=True))
    schedule = pp.gpipe(3, 2)
    workers = [0] * 3
    skips_one, takes_a_later = (pp.Stage(multiply, refs[0], inputs=(source,)) for source in (0, 2))
    cases = [
        (lambda: jd.Pipeline(good[:2], schedule), jd.ScheduleError),
        (lambda: jd.Pipeline(good, schedule, workers=[0]), jd.ScheduleError),
        (lambda: jd.Pipeline(good, schedule, workers=[0, 0, "nobody"]), jd.UnknownWorkerError),
        (lambda: jd.Pipeline([multiply, *good[1:]], schedule), TypeError),
        (lambda: jd.Pipeline([(multiply, 3.0), *good[1:]], schedule), TypeError),
        (lambda: jd.Pipeline([*good[:2], skips_one], schedule, workers=workers), jd.ScheduleError),
        (lambda: jd.Pipeline([takes_a_later, *good[1:]], schedule, workers=workers), jd.ScheduleError),
        (lambda: jd.Pipeline(good, deadlocking(), workers=workers), jd.ScheduleError),
        (lambda: jd.Pipeline(good, "0F0,0B0", workers=workers), TypeError),
        (lambda: jd.Pipeline(good, schedule, loss=3, workers=workers), TypeError),
        (lambda: jd.Pipeline(good, schedule, timeout=0), ValueError),
        (  # replicas would come apart: each would add a part that is its own
            lambda: jd.Pipeline([pp.Stage(multiply, refs[0], average=refs[1]), good[1], good[0]], schedule),
            ValueError,
        ),
    ]
    for make, kind in cases:
        with pytest.raises(kind):
            make()


def deadlocking():
    rows = [[Action(Kind.FORWARD, k, 0), Action(Kind.BACKWARD, k, 0)] for k in range(3)]
    rows[1].reverse()
    return pp.Schedule((0, 1, 2), tuple(map(tuple, rows)))


@on_worker0
def test_steps_that_cannot_be_taken_are_refused(world):
    refs = refs_on_all()
    pipeline = pipeline_of([multiply] * 3, refs)
    with pytest.raises(jd.ContextError, match=r"with jd\.context"):
        pipeline.step(X, targets=Y)
    with jd.context():
        with pytest.raises(ValueError):
            pipeline.step(X[:2], targets=Y[:2])
        with pytest.raises(ValueError, match="targets= has 7 rows, argument 0 of the step has 8"):
            pipeline.step(X, targets=Y[:7])
        with pytest.raises(ValueError, match=r"argument 0 of the step is .*no first axis.*whole"):
            pipeline.step(3.0, targets=Y)
        for taken in (lambda x: pipeline.step(x, targets=Y), lambda x: jnp.sum(pipeline.apply(x))):
            with pytest.raises(jd.DifferentiationError):
                jax.grad(taken)(X)
        with pytest.raises(TypeError):
            pipeline_of([multiply] * 3, refs, loss=None).step(X)
        with pytest.raises(ValueError):
            pipeline.report()
        with pytest.raises(TypeError, match=r"mean takes targets: step\(\.\.\., targets=\), .*'target'"):
            pipeline.step(X)
        assert re.fullmatch(r"<Pipeline of .*multiply, .*multiply, .*multiply on ranks \[0, .*>", repr(pipeline))
        with pytest.raises(ValueError):
            pipeline.apply(pp.whole(X))
    with pytest.raises(jd.DifferentiationError, match=r"vector_loss returned float32\[2\].*mean"), jd.context():
        pipeline_of([multiply] * 3, refs, loss=vector_loss).step(X, targets=Y)
    steps_well(refs)


@on_worker0
def test_what_is_no_array_in_a_batch_is_named(world):
    """References would be split like arrays."""
    refs, held = refs_on_all(), jd.remote(jd.world_size() - 1, np.copy, args=(X,))
    pipeline = pipeline_of([multiply] * 3, refs)
    for batch, y in ((held, Y), ({"x": held}, Y), (X, held)):
        with pytest.raises(TypeError, match=r"is a reference, RRef.*to_here\(\)"), jd.context():
            pipeline.step(batch, targets=y)
    for given in (range(len(X)), X.astype(str)):
        with pytest.raises(TypeError):
            pipeline.apply(given)
    for targets in (None, {"y": Y, "reduce": pp.whole("mean")}):
        with pytest.raises(TypeError), jd.context():
            pipeline.step(X, targets=targets)
    steps_well(refs)


@on_worker0
def test_results_that_are_no_arrays_are_refused(world):
    refs = refs_on_all()
    for functions, loss, kind in (
        ([multiply] * 3, loss_of_three, jd.DifferentiationError),
        ([multiply] * 3, loss_and_text, TypeError),
        ([with_text, times_number, multiply], mean, TypeError),
    ):
        with pytest.raises(kind), jd.context():
            pipeline_of(functions, refs, loss=loss).step(X, targets=Y)
    steps_well(refs)


def test_in_another_world_a_pipeline_names_the_parameters_that_are_gone():
    """And nobody waits: the workers of the new world have never heard of what the old ones keep."""
    for turn in range(2):
        with jd.local_workers(3):
            if turn == 0:
                stages = [(multiply, jd.remote(rank, ones, args=(4,))) for rank in (1, 2, 1)]
                pipeline = jd.Pipeline(stages, pp.Schedule.parse("0F0,2F0,2B0,0B0\n1F0,1B0"), loss=mean)
            gone = pytest.raises(jd.StaleReferenceError)
            with gone if turn else contextlib.nullcontext(), jd.context():
                pipeline.step(np.ones((2, 4), "float32"), targets=np.ones((2, 4), "float32"))
