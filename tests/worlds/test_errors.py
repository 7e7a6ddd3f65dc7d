"""Bad input: a clear error, and nothing is lost."""

import concurrent.futures
import math
import operator
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.rpc import functions
from jdistgrad.wire import environment

needs_pickling = pytest.mark.skipif(
    not environment.launched(),
    reason="local worlds hand objects over unpickled: the runs with 2, 3 and 4 ranks have it",
)


@pytest.fixture
def wire_world(world):
    """A world in which a message from worker 0 to the last one is pickled."""
    if world.size == 1:
        pytest.skip("one rank calls itself without pickling: the runs with 2, 3 and 4 ranks have it")
    return world


def last():
    return jd.world_size() - 1


def still_works():
    for rank in range(jd.world_size()):
        assert jd.rpc_sync(rank, operator.add, args=(rank, 1)) == rank + 1


@pytest.mark.parametrize(
    ("to", "message"), [("nobody", "no worker 'nobody' in this world. It has worker0"), (99, "no worker 99")]
)
def test_unknown_worker(world, to, message):
    def body():
        for call in (jd.rpc_sync, jd.rpc_async, jd.remote):
            with pytest.raises(jd.UnknownWorkerError, match=message):
                call(to, operator.add, args=(1, 2))
        still_works()

    world.drive(body)


def test_a_target_of_the_wrong_type(world):
    def body():
        with pytest.raises(ValueError, match=r"its name, its rank or its info, not by 1\.5"):
            jd.rpc_sync(1.5, operator.add, args=(1, 2))

    world.drive(body)


def test_what_is_no_function(world):
    def body():
        with pytest.raises(jd.FunctionError, match="a call needs a function, not 'add'"):
            jd.rpc_sync(0, "add", args=(1, 2))

    world.drive(body)


@needs_pickling
def test_lambdas_and_closures_are_refused_by_name(wire_world):
    def local_function(x):
        return x

    def body():
        for function in (lambda x: x, local_function, jax.jit(local_function)):
            with pytest.raises(
                jd.FunctionError, match=r"test_errors\..*<locals>.*top level.*register.*allow_code=True"
            ):
                jd.rpc_sync(last(), function, args=(1,))
        with pytest.raises(jd.FunctionError, match="<lambda>"):
            jd.rpc_sync(last(), apply, args=(lambda x: x, 1))
        still_works()

    wire_world.drive(body)


def apply(function, x):
    return function(x)


def test_code_travels_by_value_where_it_is_allowed(world):
    offset = 7

    def body():
        assert jd.rpc_sync(last(), lambda x: x + offset, args=(1,)) == 8
        assert jd.rpc_sync(last(), jax.jit(lambda x: x * offset), args=(2,)) == 14
        assert jd.rpc_sync(last(), apply, args=(lambda x: x - offset, 7)) == 0

    world.drive(body, allow_code=True)


@needs_pickling
def test_a_function_the_other_side_does_not_have(wire_world):
    def body():
        global only_here
        only_here = make_only_here()
        with pytest.raises(jd.FunctionError, match=r"only_here.*same version of every module") as caught:
            jd.rpc_sync(last(), only_here)
        assert f"On worker{last()}" in caught.value.__notes__[0]
        still_works()

    wire_world.drive(body)


def make_only_here():
    def only_here():
        return 1

    only_here.__qualname__ = "only_here"
    return only_here


def test_an_unregistered_name():
    with pytest.raises(jd.FunctionError, match=r"registered as 'nothing' .*register\(function, 'nothing'\)"):
        functions.registered("nothing")


@needs_pickling
def test_an_argument_that_cannot_be_sent_is_named(wire_world):
    def body():
        bad = {"fine": 1, "bad": [2, (k for k in range(3))]}
        with pytest.raises(jd.EncodingError, match=r"cannot call .*apply on worker.*\['bad'\]\[1\], a generator"):
            jd.rpc_sync(last(), apply, args=(len, bad))
        still_works()

    wire_world.drive(body)


@needs_pickling
def test_a_result_that_cannot_be_sent_is_named(wire_world):
    def body():
        for call in (lambda: jd.rpc_sync(last(), make_generator), jd.remote(last(), make_generator).to_here):
            with pytest.raises(jd.EncodingError, match=r"worker\d .* cannot send the result of .*generator"):
                call()
        still_works()

    wire_world.drive(body)


def make_generator():
    return (k for k in range(3))


class Holder:
    def __init__(self, value):
        self.value = value


@needs_pickling
def test_traced_values_inside_objects_are_refused(wire_world):
    """In a container of JAX's they are part of the call's derivative; elsewhere nobody finds them."""

    def body():
        with pytest.raises(jd.EncodingError, match=r"a traced value has no data yet"):
            jax.jit(lambda x: jd.rpc_sync(last(), type, args=(Holder(x),)))(1.0)
        still_works()

    wire_world.drive(body)


class OwnError(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}\nhint: {hint}")
        self.code, self.hint = code, hint

    def __reduce__(self):
        return rebuild_own_error, (self.code, self.hint)


def rebuild_own_error(code, hint):
    return OwnError(code, hint=hint)


def raise_own_error():
    raise OwnError(7, hint="two\nlines")


def test_a_remote_exception_keeps_its_type_its_fields_and_its_traceback(world):
    def body():
        for _ in range(2):
            with pytest.raises(OwnError, match="code 7\nhint: two\nlines") as caught:
                jd.rpc_sync(last(), raise_own_error)
            assert (caught.value.code, caught.value.hint) == (7, "two\nlines")
            note = caught.value.__notes__[0]
            assert note.startswith(
                f"On worker{last()} (rank {last()}), in test_errors.raise_own_error, called by worker0"
            )
            assert 'raise OwnError(7, hint="two\\nlines")' in note
        still_works()

    world.drive(body)


def relay(path, function):
    return jd.rpc_sync(path[0], relay, args=(path[1:], function)) if path else function()


def test_the_chain_of_workers_is_told(big_world):
    def body():
        with pytest.raises(OwnError) as caught:
            jd.rpc_sync(1, relay, args=([2, 1], raise_own_error))
        heads = [note.splitlines()[0] for note in caught.value.__notes__]
        assert [head.split(" (rank")[0] for head in heads] == ["On worker1", "On worker2", "On worker1"]
        assert [head.rsplit("called by ")[1][:7] for head in heads] == ["worker2", "worker1", "worker0"]

    big_world.drive(body)


class StubbornError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, a, b):
        super().__init__(f"stubborn {a} and {b}")


def raise_stubborn():
    raise StubbornError(1, 2)


@needs_pickling
def test_an_exception_that_cannot_be_rebuilt_still_says_what_it_was(wire_world):
    def body():
        with pytest.raises(
            jd.RemoteError, match=r"the remote function raised .*StubbornError: stubborn 1 and 2"
        ) as caught:
            jd.rpc_sync(last(), raise_stubborn)
        assert "raise StubbornError(1, 2)" in caught.value.__notes__[0]
        still_works()

    wire_world.drive(body)


def leave():
    raise SystemExit(5)


def test_exit_in_a_remote_function_does_not_end_the_caller(world):
    def body():
        with pytest.raises(jd.RemoteError, match="SystemExit: 5"):
            jd.rpc_sync(last(), leave)
        still_works()

    world.drive(body)


def nap(seconds):
    time.sleep(seconds)
    return seconds


def test_a_timeout_names_call_worker_and_seconds(world):
    def body():
        with pytest.raises(
            jd.CallTimeoutError, match=r"test_errors.nap on worker\d .* called by worker0 .* within 0\.1 s"
        ) as caught:
            jd.rpc_sync(last(), nap, args=(0.3,), timeout=0.1)
        assert caught.value.seconds == 0.1
        assert caught.value.worker.rank == last()
        assert isinstance(caught.value, TimeoutError)
        future = jd.rpc_async(last(), nap, args=(0.3,), timeout=0.1)
        assert isinstance(future.exception(5), jd.CallTimeoutError)
        assert jd.rpc_sync(last(), nap, args=(0.3,), timeout=math.inf) == 0.3

    world.drive(body)


def test_the_worlds_timeout_is_the_default(world):
    def body():
        with pytest.raises(jd.CallTimeoutError, match=r"within 0\.2 s"):
            jd.rpc_sync(last(), nap, args=(0.5,))
        assert jd.rpc_sync(last(), nap, args=(0.3,), timeout=5) == 0.3

    world.drive(body, timeout=0.2)


LET_GO = threading.Event()


def let_go():
    LET_GO.set()


def held():
    assert LET_GO.wait(20)
    LET_GO.clear()
    return "let go"


def test_waiting_less_than_the_call_lasts(world):
    def body():
        future = jd.rpc_async(last(), held)
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(timeout=0.02)
        jd.rpc_sync(last(), let_go)
        assert future.result() == "let go"

    world.drive(body)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "5"])
def test_timeouts_that_are_none(world, timeout):
    def body():
        with pytest.raises(ValueError, match="positive number of seconds"):
            jd.rpc_sync(0, nap, args=(0,), timeout=timeout)

    world.drive(body)


def test_a_cancelled_call_is_forgotten(world):
    def body():
        future = jd.rpc_async(last(), nap, args=(0.1,))
        assert future.cancel()
        assert future.cancelled()
        still_works()

    world.drive(body)


def future_result():
    return [jd.rpc_async(0, nap, args=(0,))]


@needs_pickling
def test_a_future_inside_a_result_is_refused(wire_world):
    def body():
        with pytest.raises(jd.EncodingError, match="a future cannot be sent"):
            jd.rpc_sync(last(), future_result)

    wire_world.drive(body)


def dtype_of(x):
    return str(x.dtype)


@needs_pickling
def test_jax_doubles_on_a_worker_without_them(wire_world):
    """NumPy's doubles travel as they are; a JAX double arrives as one or not at all."""

    def body():
        assert jd.rpc_sync(last(), dtype_of, args=(np.ones(2),)) == "float64"
        with jax.enable_x64(True):
            double = jnp.ones(2, jnp.float64)
            with pytest.raises(jd.EncodingError, match=r"float64 array .* whose JAX makes it float32.*jax_enable_x64"):
                jd.rpc_sync(last(), dtype_of, args=(double,))
        still_works()

    wire_world.drive(body)


def make_lambda():
    return lambda: 1


@needs_pickling
def test_a_result_that_is_code_is_refused_at_once(wire_world):
    def body():
        with pytest.raises(jd.EncodingError, match=r"cannot send the result of .*make_lambda.*top level of a module"):
            jd.rpc_sync(last(), make_lambda)
        still_works()

    wire_world.drive(body)


def raise_from_itself():
    try:
        raise ValueError("circular")
    except ValueError as error:
        raise error from error


def test_an_exception_that_is_its_own_cause(world):
    def body():
        with pytest.raises(ValueError, match="circular"):
            jd.rpc_sync(last(), raise_from_itself)
        still_works()

    world.drive(body)


class HoldingError(Exception):
    """Its argument is a reference."""


def raise_holding(rref):
    raise HoldingError(rref)


@needs_pickling
def test_an_exception_that_holds_a_reference(wire_world):
    """It arrives in words, and the weight of the reference stays whole."""

    def body():
        rref = jd.remote(last(), nap, args=(0,))
        for _ in range(3):
            with pytest.raises(jd.RemoteError, match="HoldingError: RRef"):
                jd.rpc_sync(last(), raise_holding, args=(jd.by_reference(rref),))
        assert rref.to_here() == 0

    wire_world.drive(body)


def test_a_failed_remote_shows_where_it_failed(world):
    def body():
        with pytest.raises(OwnError) as caught:
            jd.remote(last(), raise_own_error).to_here()
        assert any('raise OwnError(7, hint="two\\nlines")' in note for note in caught.value.__notes__)

    world.drive(body)


def kinds_of(*args):
    return [type(arg).__name__ for arg in args]


def keys_of(mapping, other):
    return list(mapping), other


def test_a_dict_that_cannot_be_sorted_keeps_nothing_from_being_delivered(world):
    def body():
        rref = jd.remote(last(), nap, args=(0.5,))
        odd = {1: "a", "b": rref}
        assert jd.rpc_sync(last(), kinds_of, args=(odd, rref, jd.by_reference(rref))) == ["dict", "float", "RRef"]
        assert jd.rpc_sync(last(), odd_value, args=(odd,)) == 0.5
        assert jd.rpc_sync(last(), keys_of, args=({"b": 1, "a": 2}, rref)) == (["b", "a"], 0.5)

    world.drive(body)


def odd_value(mapping):
    return mapping["b"]


def test_a_slow_reference_may_take_as_long_as_the_call(world):
    def body():
        rref = jd.remote(last(), nap, args=(0.6,), timeout=5)
        assert jd.rpc_sync(0, abs, args=(rref,), timeout=10) == 0.6

    world.drive(body, timeout=0.2)


def test_the_timeout_of_remote_is_that_of_its_creation(world):
    def body():
        rref = jd.remote(last(), nap, args=(0.4,), timeout=0.1)
        with pytest.raises(jd.CallTimeoutError, match=r"within 0\.1 s"):
            rref.creation().result()
        assert rref.to_here() == 0.4

    world.drive(body)
