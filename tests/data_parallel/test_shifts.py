"""Shifts and permutations: programs cut over ranks have the values and derivatives of the same program in one piece."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import serially
from helpers.worlds import on_every_worker
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from jdistgrad.collectives import Mesh, operations
from jdistgrad.collectives.default import of_this_world

EDGE = 0.7


class InOnePiece:
    """The same operations on an array with a row for each rank."""

    def __init__(self, size):
        self.size, self.rank = size, jnp.arange(size)[:, None]

    def shift(self, x, by=1, *, wrap=True, edge=0.0):
        source = self.rank - by
        return jnp.where(wrap | ((source >= 0) & (source < self.size)), jnp.roll(x, by, 0), edge)

    def permute(self, x, pairs):
        return sum((jnp.zeros_like(x).at[there].set(x[here]) for here, there in pairs), jnp.zeros_like(x))


def some_pairs(seed, size):
    """Return a random permutation, of which some pairs may be missing."""
    random = np.random.default_rng(seed)
    pairs = list(zip(range(size), random.permutation(size).tolist(), strict=True))
    return [pair for pair in pairs if random.random() < 0.8]


def results(c, pairs, x, direction):
    """Return what all ranks' loss is made of, its derivative in forward mode, and both orders in reverse mode."""

    def outcome(x):
        def step(u, _):
            v = c.shift(u, wrap=False, edge=EDGE) * jnp.cos(c.shift(u, -2)) - c.shift(u, -1, wrap=False)
            return u + 0.3 * c.permute(v * (c.rank + 1), pairs), None

        return jnp.sin(jax.lax.scan(step, x, length=3)[0]) * (c.rank + 1)

    gradient = jax.grad(lambda x: jnp.sum(outcome(x)))
    return *jax.jvp(outcome, (x,), (direction,)), *jax.jvp(gradient, (x,), (direction,))


def inputs(size):
    return np.random.default_rng(size).normal(size=(2, size, 3)).astype(np.float32)


def compare(found, expected, rank=slice(None)):
    for mine, all_ in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, all_[rank], rtol=1e-4, atol=1e-5)


def program(c, size):
    return functools.partial(results, c, some_pairs(0, size))


IN_ONE_PIECE = {size: program(InOnePiece(size), size) for size in (1, 2, 3, 4, 8)}


@on_every_worker
def test_derivatives_are_those_of_the_program_in_one_piece(big_world, rank, size):
    here, (x, direction) = program(of_this_world(), size), inputs(size)
    whole, other = (serially(IN_ONE_PIECE[size], sign * x, direction) for sign in (1, -1))
    both = jax.jit(jax.vmap(here))(jnp.stack([x[rank], -x[rank]]), jnp.stack([direction[rank]] * 2))
    compare([found[0] for found in both], whole, rank)
    compare([found[1] for found in both], other, rank)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
@pytest.mark.parametrize(("axes", "typed"), [("ranks", True), (("long", "short"), False), (("short", "long"), True)])
def test_several_axes_are_numbered_in_the_order_of_their_names(axes, typed):
    here, (x, direction) = program(Mesh(axes), 8), inputs(8)
    shape, names = ((8,), ("ranks",)) if axes == "ranks" else ((4, 2), ("long", "short"))
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def on_rows(x, direction):
        return [found[None] for found in here(x[0], direction[0])]

    rows = P(axes)
    along = jax.jit(jax.shard_map(on_rows, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=typed))
    compare(along(x, direction), serially(IN_ONE_PIECE[8], x, direction))


@on_every_worker
def test_ranks_may_leave_what_they_get_unused(big_world, rank, size):
    c, x = of_this_world(), jnp.arange(3.0) + rank

    def loss(x):
        y = c.shift(x * x)
        return jnp.sum(3 * y) if rank == 0 else jnp.sum(x)

    mine = 0 if rank == 0 else 1
    for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        np.testing.assert_array_equal(run(x), mine + (6 * x if rank == size - 1 else 0))


@on_every_worker
def test_trees_and_edges(big_world, rank, size):
    c = of_this_world()
    tree = {"a": jnp.full((2, 3), rank, jnp.bfloat16), "b": [jnp.int32(rank), jnp.zeros((0, 2)), None]}
    edge = {"a": jnp.arange(3.0), "b": [7, 0.0, None]}
    for run in (lambda f: f, jax.jit):
        found = run(lambda tree: c.shift(tree, by=2, wrap=False, edge=edge))(tree)
        np.testing.assert_array_equal(found["a"], np.tile(np.arange(3.0), (2, 1)) if rank < 2 else np.zeros((2, 3)))
        assert (found["a"].dtype, found["b"][0].dtype) == (jnp.bfloat16, jnp.int32)
        assert found["b"][0] == (7 if rank < 2 else rank - 2)
        moved = run(lambda tree: c.permute(tree, [(0, 2), (2, 2 - 1)]))(tree)
        assert moved["b"][0] == {1: 2}.get(rank, 0)


@on_every_worker
def test_edges_that_an_array_cannot_hold_are_refused(big_world, rank, size):
    c = of_this_world()
    for run in (lambda f: f, jax.jit):
        for x, edge in (("int32", 0.5), ("int32", jnp.ones(3)), ("bool", 2), ("float32", 1j), ("uint8", jnp.int32(1))):
            with pytest.raises(TypeError):
                run(lambda x, edge=edge: c.shift(x, wrap=False, edge=edge))(jnp.ones(3, x))
        with pytest.raises(OverflowError):
            run(lambda x: c.shift(x, wrap=False, edge=-1))(jnp.ones(3, "uint8"))
        for x, edge in (("bfloat16", jnp.float32(2)), ("complex64", 2.0), ("uint8", 2)):
            found = run(lambda x, edge=edge: c.shift(x, wrap=False, edge=edge))(jnp.zeros(3, x))
            np.testing.assert_array_equal(found, jnp.full(3, 0 if rank else edge, x), strict=True)


@on_every_worker
def test_routes_that_are_none_are_refused(big_world, rank, size):
    c = of_this_world()
    with pytest.raises(TypeError):
        c.shift(jnp.ones(3), 1.5)
    with pytest.raises(ValueError, match="a ring has no edge"):
        c.shift(jnp.ones(3), edge=0.0)
    for pairs, said in [
        ([(0, 1), (2, 1)], "rank 1 gets from several ranks"),
        ([(0, 1), (0, 2)], "rank 0 sends to several ranks"),
        ([(0, size)], rf"ranks from 0 to {size - 1}, not \(0, {size}\)"),
        ([0, 1], r"pairs are \(sender, receiver\)"),
    ]:
        with pytest.raises(ValueError, match=said):
            c.permute(jnp.ones(3), pairs)


@given(st.integers(1, 9), st.integers(-12, 12), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_way_back_is_the_transpose(size, by, wrap, random):
    def matrix(route):
        return np.array([[route.ends(here)[0] == there for there in range(size)] for here in range(size)])

    order = random.sample(range(size), size)
    pairs = random.sample(list(enumerate(order)), random.randint(0, size))
    for route in (operations.shifted(size, by, wrap=wrap), operations.permuted(size, pairs)):
        there, back = matrix(route), matrix(route.reversed())
        np.testing.assert_array_equal(back, there.T)
        np.testing.assert_array_equal([route.ends(here)[1] is not None for here in range(size)], there.any(0))
