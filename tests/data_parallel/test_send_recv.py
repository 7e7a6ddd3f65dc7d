"""Sends and receives between two ranks: programs that differ from rank to rank have the derivatives of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import unaligned
from helpers.models import serially
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.collectives import Mesh
from jdistgrad.collectives.default import of_this_world
from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError

ROWS = 5


def shape_of(rank):
    """Return the shape of what a rank passes on: no two ranks have the same."""
    return jax.ShapeDtypeStruct((ROWS, 3 + rank), jnp.float32)


def parameters(rank, size):
    """Return a rank's parameters: from what comes to what goes on, and from the early result of rank 0."""
    draw = np.random.default_rng([rank, size]).normal
    before = shape_of(rank - 1).shape[1] if rank else 2
    return {
        "pass": draw(0, 0.7, (before, 3 + rank)).astype("float32"),
        "skip": draw(0, 0.7, (3, 3 + rank)).astype("float32"),
    }


X = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
EARLY = 7  # the tag of the result that rank 0 sends to the last rank, before the next rank has even begun


def layer(params, h, early):
    return jnp.sin(h @ params["pass"]) + (0 if early is None else early @ params["skip"])


def loss_of(h):
    return jnp.mean(h**2)


def in_one_piece(all_params, x):
    h = early = layer(all_params[0], x, None)
    for params in all_params[1:-1]:
        h = layer(params, h, None)
    return loss_of(layer(all_params[-1], h, early))


def part_of_loss(c, rank, size, params, x, step=0):
    """Return a rank's part of the loss: 0 on all but the last rank."""
    after = params, step
    if rank == 0:
        h = layer(params, x, None)
        return c.send(h, size - 1, tag=EARLY) + c.send(h, 1)
    h = c.recv(shape_of(rank - 1), rank - 1, after=after)
    if rank < size - 1:
        return c.send(layer(params, h, None), rank + 1)
    return loss_of(layer(params, h, c.recv(shape_of(0), 0, after=after, tag=EARLY)))


def first_and_second(loss, params, direction):
    """Return the loss, its gradient, and the product of its second derivatives with a direction, in reverse mode."""

    def along(params):
        gradient = jax.grad(loss)(params)
        return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))

    return *jax.value_and_grad(loss)(params), jax.grad(along)(params)


def whole(size, x):
    all_params = [parameters(rank, size) for rank in range(size)]
    return serially(derivatives_in_one_piece, all_params, jax.tree.map(np.cos, all_params), x)


def derivatives_in_one_piece(all_params, along, x):
    return first_and_second(lambda p: in_one_piece(p, x), all_params, along)


def compare(found, expected, rank, size):
    value, *derivatives = found
    np.testing.assert_allclose(value, expected[0] if rank == size - 1 else 0.0, rtol=1e-5)
    for mine, all_ in zip(derivatives, expected[1:], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), mine, all_[rank])


@pytest.mark.world(3)
@pytest.mark.parametrize("compiled", [False, True])
@on_every_worker
def test_derivatives_of_both_orders_are_those_of_the_program_in_one_piece(world, compiled, rank, size):
    c, params = of_this_world(), parameters(rank, size)
    along = jax.tree.map(np.cos, params)

    def derivatives(params):
        return first_and_second(lambda p: part_of_loss(c, rank, size, p, X), params, along)

    compare((jax.jit(derivatives) if compiled else derivatives)(params), whole(size, X), rank, size)


@pytest.mark.world(3)
@on_every_worker
def test_microbatches_in_a_loop_and_in_a_batch(world, rank, size):
    c, params = of_this_world(), parameters(rank, size)
    xs = jnp.stack([X, 2 * X, X - 1])

    def looped(params):
        def step(total, x):
            return total + part_of_loss(c, rank, size, params, x, step=total), None

        return jax.lax.scan(step, 0.0, xs)[0]

    def batched(params):
        def one(x, early, late):
            if rank == 0:
                h = layer(params, x, None)
                return c.send(h, size - 1, tag=EARLY) + c.send(h, 1)
            h = c.recv(late, rank - 1, after=params)
            if rank < size - 1:
                return c.send(layer(params, h, None), rank + 1)
            return loss_of(layer(params, h, c.recv(early, 0, after=params, tag=EARLY)))

        moulds = [jnp.zeros((len(xs), *shape_of(k).shape)) for k in (0, max(rank - 1, 0))]
        return jnp.sum(jax.vmap(one)(xs, *moulds))

    all_params = [parameters(k, size) for k in range(size)]
    expected = serially(gradient_of_all, all_params, xs)[rank]
    for gradient in (jax.grad(looped), jax.jit(jax.grad(looped)), jax.jit(jax.grad(batched))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), gradient(params), expected)


def sum_of_losses(all_params, xs):
    return sum(in_one_piece(all_params, x) for x in xs)


gradient_of_all = jax.grad(sum_of_losses)


@pytest.mark.world(3)
@on_every_worker
def test_trees_of_several_dtypes_arrive_as_they_were(world, rank, size):
    c = of_this_world()
    large = np.random.default_rng(1).normal(size=(1 << 20) + 3).astype("float32")  # which MPI does not buffer
    tree = {
        "half": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "whole": [np.int32(rank), jnp.ones(2, bool)],
        "empty": jnp.zeros((0, 3)),
        "large": large,
        "complex": jnp.asarray([1 + 2j]),
    }
    for run in (lambda f: f, jax.jit):
        for by in (1, size - 1):  # each sends first: nobody waits until its own has been received
            run(lambda tree, by=by: c.send(tree, (rank + by) % size))(tree)
            found = run(lambda tree, by=by: c.recv(tree, (rank - by) % size, after=None))(tree)
            assert found["whole"][0] == (rank - by) % size
            assert (found["half"].dtype, found["whole"][1].dtype) == (jnp.bfloat16, bool)
            for name in ("half", "empty", "large", "complex"):
                np.testing.assert_array_equal(found[name], tree[name])


@pytest.mark.world(3)
@on_every_worker
def test_other_types_are_named_and_the_next_array_is_right(world, rank, size):
    c = of_this_world()
    if rank == 0:
        c.send(jnp.ones((2, 3)), 2)
        c.send(jnp.arange(4.0), 2)
    if rank == 2:
        with pytest.raises(
            DisagreementError, match=r"recv from rank 0: expected int32\[6\], .* 0 sent float32\[2, 3\]"
        ):
            c.recv(jax.ShapeDtypeStruct((6,), jnp.int32), 0, after=None)
        np.testing.assert_array_equal(c.recv(jax.ShapeDtypeStruct((4,), jnp.float32), 0, after=None), np.arange(4.0))
    c.barrier()


@pytest.mark.world(3)
@on_every_worker
def test_a_cotangent_is_not_taken_for_what_is_sent(world, rank, size):
    """Rank 0 sends without differentiating, rank 1 differentiates: nobody waits for the cotangent that comes back."""
    c, like = of_this_world(), jax.ShapeDtypeStruct((2,), jnp.float32)
    if rank == 0:
        c.send(jnp.ones(2), 1)
        with pytest.raises(DisagreementError):
            c.recv(like, 1, after=None)
        np.testing.assert_array_equal(c.recv(like, 1, after=None), np.full(2, 100.0))
    if rank == 1:
        jax.grad(lambda w: jnp.sum(w * c.recv(like, 0, after=w)))(jnp.full(2, 3.0))
        c.send(jnp.full(2, 100.0), 0)
    c.barrier()


@pytest.mark.world(3)
@on_every_worker
def test_what_never_comes_is_named(world, rank, size):
    """Rank 1 differentiates nothing that the array it gets depends on, so it sends no cotangent back."""
    c = of_this_world()
    c.timeout = 0.5

    def loss(params):
        if rank == 0:
            return c.send(params, 1)
        return jnp.sum(params * c.recv(jax.ShapeDtypeStruct((3,), jnp.float32), 0, after=None))

    if rank == 0:
        with pytest.raises(MissingRanksError) as caught:
            jax.grad(loss)(jnp.ones(3))
        assert caught.value.missing == [1]
    if rank == 1:
        np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(3)), np.ones(3))
    c.timeout = 60.0
    c.barrier()


@pytest.mark.world(3)
@on_every_worker
def test_what_python_sends_after_a_program_comes_after_what_the_program_sends(world, rank, size):
    c, shape = of_this_world(), (512, 512)
    send, after = jax.jit(lambda x: c.send(x, 1)), jnp.full(shape, -1.0)
    for turn in range(40):
        if rank == 0:
            send(unaligned(shape, turn))
            c.send(after, 1)
        if rank == 1:
            found = [c.recv(jax.ShapeDtypeStruct(shape, jnp.float32), 0, after=None) for _ in range(2)]
            assert [float(x[0, 0]) for x in found] == [turn, -1]
    c.barrier()


@pytest.mark.world(3)
@on_every_worker
def test_arrays_that_do_not_depend_on_a_loop_are_sent_in_each_step(world, rank, size):
    c, other = of_this_world(), (rank + 1) % size

    def loss(w):
        def step(total, _):
            sent = c.send(w, other, after=total)
            got = c.recv(jax.ShapeDtypeStruct((2,), jnp.float32), (rank - 1) % size, after=(w, total))
            return total + sent + jnp.sum(got**2), None

        return jax.lax.scan(step, 0.0, length=3)[0]

    np.testing.assert_array_equal(jax.grad(loss)(jnp.full(2, rank + 1.0)), np.full(2, 3 * 2 * (rank + 1.0)))


@pytest.mark.world(3)
@on_every_worker
def test_other_ranks_and_tags_are_refused(world, rank, size):
    c = of_this_world()
    for to in (rank, size, -1, 1.0):
        with pytest.raises(ValueError, match=rf"send: the other rank is one from 0 to {size - 1}, and not this one"):
            c.send(jnp.ones(3), to)
    with pytest.raises(ValueError, match=r"not this one .*; got True"):
        c.send(jnp.ones(3), True)
    with pytest.raises(ValueError, match="recv: a tag is a whole number from 0 to 999, not 1000"):
        c.recv(jnp.ones(3), (rank + 1) % size, after=None, tag=1000)
    with jd.collectives.of_this_world() as other:
        compiled = jax.jit(lambda x: other.send(x, (rank + 1) % size))
        compiled(jnp.ones(3))
    with pytest.raises(CollectiveError):
        other.send(jnp.ones(3), (rank + 1) % size)
    with pytest.raises(jax.errors.JaxRuntimeError, match="has been closed"):
        compiled(jnp.ones(3))


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices: the local run has them, simulated")
def test_a_mesh_runs_one_program_and_says_so():
    mesh = jax.make_mesh((8,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("ranks")
    with pytest.raises(CollectiveError):
        jax.shard_map(lambda x: x + Mesh("ranks").send(x, 1), mesh=mesh, in_specs=rows, out_specs=rows)(jnp.ones(8))
