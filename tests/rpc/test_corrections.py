"""What references and futures answer to uses that they do not have, and that this costs nothing to those they have."""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import make, on_worker0, rank

import jdistgrad as jd
from jdistgrad.corrections import COMPARISONS, OPERATORS

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_every_operator_is_refused_from_both_sides(world):
    reference = jd.remote(rank(1), make, args=(3,))
    for name, symbol in {**OPERATORS, **COMPARISONS}.items():
        for other in (2, np.float32(2), np.ones(3), jnp.ones(3)):
            for operands in ((reference, other), (other, reference)):
                with pytest.raises(TypeError, match=r"is not the value itself: it has no operator") as caught:
                    getattr(operator, name)(*operands)
                assert symbol in str(caught.value) or name in COMPARISONS  # Python turns comparisons around
    del caught


@on_worker0
def test_a_future_has_no_operators_and_says_where_the_value_is(world):
    future = jd.rpc_async(rank(1), make, args=(3,))
    for operands in ((future, 1), (1, future), (np.ones(3), future), (future, jnp.ones(3)), (future, future)):
        for name in (*OPERATORS, *COMPARISONS):
            with pytest.raises(TypeError, match=r"is not the value itself: it has no operator .*result\(\) waits"):
                getattr(operator, name)(*operands)
    for use in (lambda: future[0], lambda: list(future), lambda: -future):
        with pytest.raises(TypeError):
            use()
    assert future == future
    assert {future: future.result().sum()}[future] == 3


@pytest.mark.parametrize("call", [jd.rpc_sync, jd.rpc_async, jd.remote, jd.rpc_all])
@on_worker0
def test_keyword_arguments_of_the_function_go_in_kwargs(world, call):
    to = [rank(1)] if call is jd.rpc_all else rank(1)
    with pytest.raises(
        TypeError, match=r"args, kwargs and timeout, not 'n'.*worlds\.make go in kwargs: kwargs=\{'n': 3\}"
    ):
        call(to, make, n=3)


@on_worker0
def test_a_module_says_where_its_parameters_are(world):
    module = jd.RemoteFunction(rank(1), make, operator.add, args=(3,))
    for name in ("to_here", "params"):
        with pytest.raises(AttributeError, match=r"module\.parameters\.to_here\(\)"):
            getattr(module, name)
    assert not hasattr(module, "weights")
    again = copy.deepcopy(jax.tree.map(lambda leaf: leaf, module))
    np.testing.assert_array_equal(again(1.0), np.arange(3) + 1)
