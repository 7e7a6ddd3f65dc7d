"""Errors of a staged step: they name the function, the worker and the line of the call."""

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import X
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.rpc.functions import ServedFunction

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_a_failure_in_a_row_names_the_function_that_failed(world):
    def program(x):
        for function in (jnp.sin, jnp.cos, moody):
            x = jd.rpc_sync(last(), function, args=(x,))
        return x.sum()

    step = jd.jit(program)
    assert len(step.plan(X).operations) == 1
    jd.rpc_sync(last(), change_mood, args=("bad",))
    with pytest.raises(ValueError, match="no such luck") as caught:
        step(X)
    notes = "\n".join(caught.value.__notes__)
    assert f"in {moody.__module__}.moody, called by" in notes
    jd.rpc_sync(last(), change_mood)
    assert_close(step(X), jnp.cos(jnp.sin(X)).sum())


@on_worker0
def test_a_failure_while_a_row_runs_names_its_function_too(world):
    step = jd.jit(lambda x: jd.rpc_sync(last(), jnp.sin, args=(jd.rpc_sync(last(), fails_when_negative, args=(x,)),)))
    assert_close(step(abs(X)), jnp.sin(abs(X)))
    with pytest.raises(Exception, match="a negative number") as caught:
        jax.block_until_ready(step(X))
    assert f"in {moody.__module__}.fails_when_negative, called by" in "\n".join(caught.value.__notes__)


def with_a_note(x):
    return jd.rpc_sync(last(), jnp.sin, args=(x,)), {"note": "warm"}


@on_worker0
def test_a_result_that_is_no_array_is_named_with_the_function(world):
    with pytest.raises(TypeError, match=r"jdistgrad\.jit: .*with_a_note returned a str: 'warm'"):
        jd.jit(with_a_note)(X)


@on_worker0
def test_errors_say_where_the_call_stands(world):
    jd.rpc_sync(last(), forget_runs)
    step = jd.jit(lambda x: jd.rpc_sync(last(), sometimes, args=(x,)))
    step(X)
    with pytest.raises(ValueError, match="no such luck") as caught:
        step(X)
    notes = "\n".join(caught.value.__notes__)
    assert "test_staged_errors.py" in notes
    assert "test_errors_say_where_the_call_stands" in notes
    assert_close(step(X), X)


runs = []


def forget_runs():
    runs.clear()


def sometimes(x):
    """Return ``x``, but fail in every second call with data."""
    if not isinstance(x, jax.core.Tracer):
        runs.append(x)
        if len(runs) % 2 == 0:
            raise ValueError("no such luck")
    return x


@on_worker0
def test_arguments_must_be_arrays(world):
    with pytest.raises(TypeError, match="str: 'text'"):
        jd.jit(lambda x: x)("text")
    with pytest.raises(TypeError, match=r"is a Trainer: .*close over anything else"):
        Trainer().step(1.0)


class Trainer:
    @jd.jit
    def step(self, x):
        return x


moods = []


def change_mood(*new):
    moods[:] = new


class Moody(ServedFunction):
    """A function that is pure by contract, so that it is compiled; in a bad mood it raises while it is traced."""

    pure = True
    label = f"{__name__}.moody"

    def __call__(self, x):
        if moods:
            raise ValueError("no such luck")
        return x


moody = Moody()


def refuse_negative(x):
    if (x < 0).any():
        raise ValueError("a negative number")
    return x


@jax.jit
def fails_when_negative(x):
    return jax.pure_callback(refuse_negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
