"""Functions made by functions of importable modules, which travel without their code."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import imports_others
from helpers.forgery import calling

import jdistgrad as jd
from jdistgrad.rpc import closures, unpickling
from jdistgrad.rpc.closures import WithClosures
from jdistgrad.rpc.codec import PickleCodec

CODEC = PickleCodec(allow_code=False)
PARAMETERS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
GRADIENTS = jax.tree.map(lambda leaf: leaf + 0.5, PARAMETERS)

decay = lambda step: 0.1 / (1 + step)  # noqa: E731 a function without a name of its own


def carried(value):
    return CODEC.decode(CODEC.encode(WithClosures(value), snapshot=True)).value


def decay_from(rate):
    return lambda step: rate / (1 + step)


def recursive(base):
    def power(n, factor=base, *, plus=0):
        return plus + (1 if n == 0 else factor * power(n - 1))

    power.label = "a power"
    return power


TRANSFORMATIONS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "a lambda of a module": optax.sgd(decay),
    "several steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "a lambda of a function": optax.adam(decay_from(0.2)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "several": optax.multi_transform({"a": optax.lion(1e-3), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "masked": optax.masked(optax.lamb(0.1), {"w": True, "b": False}),
    "jitted": optax.GradientTransformation(optax.adam(1e-2).init, jax.jit(optax.adam(1e-2).update)),
}


@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_optax_transformations_do_the_same_elsewhere(tx):
    found = carried(tx)
    expected, _ = tx.update(GRADIENTS, tx.init(PARAMETERS), PARAMETERS)
    updates, _ = found.update(GRADIENTS, found.init(PARAMETERS), PARAMETERS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_a_closure_may_call_itself_and_keeps_defaults_and_attributes():
    found = carried(recursive(3))
    assert (found(2), found(1, plus=1), found.label, found.__qualname__) == (9, 4, "a power", recursive(3).__qualname__)


def test_no_code_travels():
    stream = bytes(CODEC.encode(WithClosures(decay_from(0.2)), snapshot=True).stream)
    assert decay_from(0.2).__code__.co_code not in stream


def test_code_that_no_module_has_is_refused():
    namespace = {"__name__": __name__}
    exec("def made():\n    return lambda step: step + 12345", namespace)
    with pytest.raises(jd.FunctionError, match="allow_code=True"):
        carried(namespace["made"]())


def test_ordinary_calls_send_no_closures():
    with pytest.raises(jd.FunctionError, match="cannot be called on another process"):
        CODEC.encode(decay_from(0.2), snapshot=True)


def test_a_module_that_differs_is_an_error():
    qualified, line, mark = closures.place_of(decay_from(0.2).__code__)
    with pytest.raises(jd.FunctionError, match=f"no {__name__}.{qualified} like the one of line {line}"):
        closures.make(__name__, (qualified, line, mark + 1), 1)


def of_the_program(x, scale=1):
    return x * scale


def test_a_forged_pickle_changes_no_function_of_the_program():
    state = (), ("of_the_program", "of_the_program", __name__), ((1000,), None, {})
    with pytest.raises(jd.FunctionError, match="which it has not made"):
        unpickling.loads(calling("jdistgrad.rpc.closures", "complete", of_the_program, state))
    assert of_the_program(1) == 1


def test_forged_closures_of_the_standard_library_are_refused():
    with pytest.raises(jd.FunctionError, match=r"os.system may not be named"):
        unpickling.loads(calling("jdistgrad.rpc.closures", "make", "os", ("system", 1, 2), 0))


def test_a_module_gives_no_code_that_it_has_only_imported():
    place = closures.place_of(imports_others.run.__code__)
    with pytest.raises(jd.FunctionError, match=r"this worker has no helpers\.imports_others\.run like the one"):
        closures.make(imports_others.__name__, place, 0)
    own = closures.make(imports_others.__name__, closures.place_of(imports_others.doubled.__code__), 0)
    assert own(2) == 4


def test_the_code_of_a_module_is_no_function():
    code = compile(inspect.getsource(imports_others), imports_others.__file__, "exec")
    with pytest.raises(jd.FunctionError, match="this worker has no"):
        closures.make(imports_others.__name__, closures.place_of(code), 0)
