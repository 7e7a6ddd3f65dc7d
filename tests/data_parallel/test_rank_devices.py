"""Which devices XLA's collectives can span, and when ranks run the same program: pure functions."""

import jax
import jax.numpy as jnp
import pytest

from jdistgrad import jaxprs
from jdistgrad.collectives.devices import Place, require_usable
from jdistgrad.errors import CollectiveError

GPU = Place(processes=3, device=0, platform="gpu", kind="NVIDIA H100", host="node1", card="0")


def test_a_card_for_each_rank():
    require_usable([GPU, GPU._replace(card="1"), GPU._replace(host="node2")])
    require_usable([GPU._replace(card="")] * 3)  # unknown
    require_usable([GPU._replace(processes=1)])


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            [GPU, GPU._replace(card="1"), GPU._replace(card="1")],
            r"ranks 1 and 2 share a GPU of node1.*CUDA_VISIBLE",
        ),
        (
            [GPU, GPU._replace(card="1"), GPU._replace(platform="cpu", kind="cpu")],
            r"rank 0 has NVIDIA H100 \(gpu\) on node1, rank 2 has cpu \(cpu\) on node1.*JAX_PLATFORMS",
        ),
        (
            [GPU, GPU._replace(processes=1), GPU._replace(processes=1)],
            r"ranks \[1, 2\] of 3 see only their own devices",
        ),
    ],
    ids=["shared", "kinds", "not connected"],
)
def test_devices_that_no_collective_can_span(places, said):
    with pytest.raises(CollectiveError, match=said):
        require_usable(places)


def program(factor, name="f"):
    def function(x):
        return jnp.sin(x) * factor

    function.__name__ = name
    return jaxprs.digest(jax.make_jaxpr(jax.jit(function))(jnp.ones(3)))


def test_programs_are_equal_where_their_equations_are():
    assert program(2.0) == program(2.0)
    assert program(2.0) != program(3.0)
    assert program(2.0) < 2**63


def test_addresses_and_the_order_of_sets_do_not_count():
    def digest_of(text):
        return jaxprs.digest(type("Closed", (), {"jaxpr": text}))

    one = "g[fn=<function f at 0x7f01> axes=frozenset({'a', 'b'})] c"
    assert digest_of(one) == digest_of(one.replace("7f01", "55aa").replace("'a', 'b'", "'b', 'a'"))
    assert digest_of(one) != digest_of(one.replace("'a'", "'c'"))
