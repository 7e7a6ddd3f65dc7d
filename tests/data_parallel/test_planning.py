"""The bucket plan, compared with the plans of PyTorch's Reducer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jdistgrad.collectives.descriptions import Leaf, describe
from jdistgrad.data_parallel import segments as trace
from jdistgrad.data_parallel.agreement import Rules, Terms
from jdistgrad.data_parallel.buckets import MIB, lay_out, limits_of, plan_buckets
from jdistgrad.leaves import LeafSpec


def leaf(size, dtype="float32"):
    return jax.ShapeDtypeStruct((size // np.dtype(dtype).itemsize,), dtype)


@pytest.mark.parametrize(
    ("sizes", "limits", "expected"),
    [
        ([200] * 4, [400], [[0, 1], [2, 3]]),
        ([20] * 10, [40, 80], [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]),
        ([40, 4000, 40], [100], [[0, 1], [2]]),
        ([], [100], []),
        ([0, 0], [100], [[0, 1]]),
    ],
)
def test_golden_plans(sizes, limits, expected):
    assert plan_buckets([leaf(size) for size in sizes], limits) == expected


def test_dtypes_never_mix_and_have_their_own_limits():
    leaves = [leaf(200, dtype) for _ in range(3) for dtype in ("float32", "float64")]
    assert plan_buckets(leaves, [200, 400]) == [[0], [1], [2, 4], [3, 5]]


def test_sparse_leaves_stand_alone_and_an_order_is_kept():
    leaves = [leaf(40)] * 5
    assert plan_buckets(leaves, [80], sparse=[2]) == [[0, 1], [2], [3, 4]]
    assert plan_buckets(leaves, [80], order=[4, 2, 0, 1, 3]) == [[4, 2], [0, 1], [3]]


def test_large_leaves_may_stand_alone():
    leaves = [leaf(size) for size in (40, 4000, 40, 40)]
    assert plan_buckets(leaves, [100], large_alone=True) == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("cap", "sizes", "order", "expected"),
    [
        (None, [300_000] * 8, None, [[7, 6, 5, 4], [3, 2, 1, 0]]),
        (None, [300_000] * 8, [0, 2, 1, 3, 7, 6, 5, 4], [[0, 2, 1, 3], [7, 6, 5, 4]]),
        (1, [600_000, 2_000_000, 600_000, 400_000], None, [[3, 2], [1], [0]]),  # large leaves stand alone
        (0.25, [100_000] * 6, None, [[5, 4, 3], [2, 1, 0]]),
    ],
)
def test_golden_plans_of_data_parallel_objects(cap, sizes, order, expected):
    rules = Rules(cap)
    plan = rules.plan(rules.terms([leaf(size) for size in sizes]), order)
    assert [[slot.index for slot in bucket.slots] for bucket in plan.buckets] == expected
    assert [bucket.last for bucket in plan.buckets] == [False] * (len(expected) - 1) + [True]


def test_the_digest_tells_trees_and_settings_apart_and_nothing_else():
    rules, shape = Rules(), (3,)
    leaves = [Leaf(name, LeafSpec(shape, np.dtype("float32"))) for name in "ab"]
    others = [Leaf(str(name), LeafSpec(tuple([3]), np.dtype("float32"))) for name in "ab"]  # noqa: C409
    digest = Terms(tuple(leaves), rules.settings).digest()
    assert digest == Terms(tuple(others), Rules().settings).digest()
    assert digest == rules.terms({"a": np.ones(3, "float32"), "b": jnp.ones(3)})._replace(leaves=tuple(leaves)).digest()
    changed = [leaves[0], leaves[1]._replace(sparse=1)]
    assert (
        len({digest, Terms(tuple(changed), rules.settings).digest(), Terms(tuple(leaves), Rules(1).settings).digest()})
        == 3
    )


def test_the_first_bucket_is_small_only_while_the_cap_is_left_alone():
    assert limits_of(None) == (MIB, 25 * MIB)
    assert limits_of(25) == (25 * MIB,)
    assert limits_of(0.5) == limits_of(np.float32(0.5)) == (MIB // 2,)
    assert limits_of(np.int32(4096)) == (4096 * MIB,)


def test_bad_limits_and_orders_are_refused():
    with pytest.raises(ValueError, match=r"limits must be one or more positive numbers.*\[0\]"):
        plan_buckets([leaf(4)], [0])
    with pytest.raises(ValueError, match="each of the 3 leaves once"):
        plan_buckets([leaf(4)] * 3, [10], order=[0, 1, 1])


def test_a_hundred_thousand_leaves_are_planned():
    # benchmarks/data_parallel.py measures how long planning takes.
    leaves = [leaf(400, "float32" if k % 3 else "float64") for k in range(100_000)]
    plan = plan_buckets(leaves, limits_of(None), order=range(99_999, -1, -1))
    assert sorted(k for bucket in plan for k in bucket) == list(range(100_000))
    assert plan[0][:3] == [99_998, 99_997, 99_995]  # float32 has twice as many leaves: its first bucket is full first


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["float32", "float64", "int8"])), max_size=30),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_leaf_is_in_one_bucket_of_its_dtype(kinds, limits, random, large_alone):
    leaves = [jax.ShapeDtypeStruct((n,), dtype) for n, dtype in kinds]
    order = random.sample(range(len(leaves)), len(leaves))
    plan = plan_buckets(leaves, limits, order=order, large_alone=large_alone)
    assert sorted(k for bucket in plan for k in bucket) == list(range(len(leaves)))
    for bucket in plan:
        assert len({leaves[k].dtype for k in bucket}) == 1
        size = sum(leaves[k].size * leaves[k].dtype.itemsize for k in bucket[:-1])
        assert size < max(limits)


def test_the_layout_names_every_leaf():
    tree = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros(()), jnp.zeros((0, 4))]}
    (bucket,) = lay_out(describe(tree), [[2, 0, 1]])
    told = [(s.path, s.offset, s.length, s.shape) for s in bucket.slots]
    assert told == [("['b'][1]", 0, 0, (0, 4)), ("['a']", 0, 6, (2, 3)), ("['b'][0]", 6, 1, ())]
    assert bucket.last
    assert (bucket.size, bucket.nbytes) == (7, 28)
    views = bucket.views(jnp.arange(7))
    assert [v.shape for v in views] == [(0, 4), (2, 3), ()]
    assert views[2] == 6


def chain(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def test_the_order_is_that_of_the_backward_pass():
    traced = trace.trace(jax.jit(chain), 0, ([jnp.ones((3, 3))] * 5, jnp.ones((2, 3))), {}, has_aux=False)
    assert trace.readiness(traced.closed, 5) == [4, 3, 2, 1, 0]


def test_what_the_loss_depends_on_is_known_before_the_first_step():
    def loss(p, x):
        return jnp.sum(p["a"] * x) + jnp.sum(jax.lax.stop_gradient(p["b"])) + 0 * p["c"]

    parameters = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(()), "d": jnp.ones(2)}
    assert trace.trace(loss, 0, (parameters, jnp.ones(3)), {}, has_aux=False).used == (True, False, True, False)
