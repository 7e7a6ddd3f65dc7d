"""Collectives among workers: every dtype, traced or not, and their derivatives."""

import collections
import contextlib
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import serially
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad import collectives as all_of
from jdistgrad.collectives.default import of_this_world
from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError, WorldClosedError
from jdistgrad.wire import launcher_env

DTYPES = ["float16", "bfloat16", "float32", "complex64", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn"]
SHAPES = [(), (0,), (5,), (2, 0, 3), (3, 4, 2)]


def value(rank, shape, dtype):
    return jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 3 + rank + 1, dtype)


@on_every_worker
def test_sums_of_every_dtype_and_shape(world, rank, size):
    c = of_this_world()
    kinds = [(shape, dtype) for dtype in DTYPES for shape in (SHAPES if dtype == "float32" else SHAPES[2:3])]
    sums = (c.allreduce, size), (jax.jit(c.allreduce), size), (c.scan, rank + 1), (jax.jit(c.scan), rank + 1)
    for run, count in sums:
        for (shape, dtype), got in zip(kinds, run([value(rank, *kind) for kind in kinds]), strict=True):
            expected = sum(np.asarray(value(r, shape, dtype)).astype("complex64") for r in range(count))
            assert (got.dtype, got.shape) == (jnp.dtype(dtype), shape)
            np.testing.assert_array_equal(np.asarray(got).astype("complex64"), expected)


@on_every_worker
def test_integers_of_less_than_a_byte(world, rank, size):
    c = of_this_world()
    xs = {dtype: jnp.full((3, 2), rank + 1, dtype) for dtype in ("int4", "uint4")}
    expected = sum(range(1, size + 1)), size, size, np.arange(1, size + 1).reshape(-1, 1, 1)
    for wrap in (lambda f: f, jax.jit):
        found = wrap(lambda x: (c.allreduce(x), c.allreduce(x, "max"), c.broadcast(x, size - 1), c.allgather(x)))(xs)
        for by_dtype, each in zip(found, expected, strict=True):
            for dtype, got in by_dtype.items():
                assert got.dtype == dtype
                around = (each + 8) % 16 - 8 if dtype == "int4" else each  # the sum of four ranks is 10
                np.testing.assert_array_equal(np.asarray(got).astype("int32"), np.broadcast_to(around, got.shape))


@on_every_worker
def test_sums_of_integers_wrap_around_as_in_jax(world, rank, size):
    c, own = of_this_world(), []
    for r in range(size):  # long enough for vectors
        held = {dtype: jnp.iinfo(dtype) for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32")}
        own.append({name: jnp.full(100, one.max if r < 2 else one.min + r, name) for name, one in held.items()})
    for run in (c.allreduce, jax.jit(c.allreduce)):
        for dtype, found in run(own[rank]).items():
            expected = jnp.stack([one[dtype] for one in own]).sum(axis=0, dtype=dtype)
            np.testing.assert_array_equal(found, expected)


@on_every_worker
def test_references_are_not_reduced_as_the_numbers_that_stand_for_them(world, rank, size):
    c, tree = of_this_world(), {"t": jd.RRef(jnp.ones(size)), "x": jnp.ones(size)}
    for operation in (c.allreduce, c.broadcast, c.allgather, c.gather_rows, c.alltoall, c.reduce_scatter, c.shift):
        with pytest.raises(TypeError):
            operation(tree)
    np.testing.assert_array_equal(c.allreduce(tree["x"]), np.full(size, size))


OPERATIONS = {
    "sum": lambda c, x: c.allreduce(x),
    "max": lambda c, x: c.allreduce(x, "max"),
    "broadcast": lambda c, x: c.broadcast(x, c.size - 1),
    "gather": lambda c, x: c.allgather(x),
    "mean": lambda c, x: c.allreduce(x, "mean"),
    "product": lambda c, x: c.allreduce(x, "prod"),
    "rows": lambda c, x: c.gather_rows(x, counts=[3] * c.size),
    "blocks": lambda c, x: c.alltoall(x),
    "unequal blocks": lambda c, x: c.alltoall(x, UNEQUAL),
    "scatter": lambda c, x: c.reduce_scatter(x),
    "scan": lambda c, x: c.scan(x),
    "exscan": lambda c, x: c.exscan(x),
    "shift": lambda c, x: c.shift(x, 2),
    "shift in a row": lambda c, x: c.shift(x, wrap=False),
}
UNEQUAL = [[0, 2, 1], [3, 0, 0], [1, 1, 1]]  # rows of three ranks for each other


def everybody(name, xs):
    """Return what each rank gets: the results of the operation on all ranks' inputs, in one process."""
    size, stacked = len(xs), jnp.stack(xs)
    same = {
        "sum": lambda: sum(xs),
        "max": lambda: jnp.max(stacked, 0),
        "broadcast": lambda: xs[-1],
        "gather": lambda: stacked,
        "mean": lambda: sum(xs) / size,
        "product": lambda: jnp.prod(stacked, 0),
        "rows": lambda: jnp.concatenate(xs),
    }
    if name in same:
        return [same[name]()] * size
    ends = np.cumsum(UNEQUAL if name == "unequal blocks" else np.full((size, size), 3 // size), axis=1)[:, :-1]
    blocks = [jnp.split(x, list(end)) for x, end in zip(xs, ends, strict=True)]
    return {
        "blocks": lambda: [jnp.concatenate([row[k] for row in blocks]) for k in range(size)],
        "unequal blocks": lambda: [jnp.concatenate([row[k] for row in blocks]) for k in range(size)],
        "scatter": lambda: [sum(row[k] for row in blocks) for k in range(size)],
        "scan": lambda: [sum(xs[: k + 1]) for k in range(size)],
        "exscan": lambda: [sum(xs[:k], jnp.zeros_like(xs[0])) for k in range(size)],
        "shift": lambda: [xs[k - 2] for k in range(size)],
        "shift in a row": lambda: [jnp.zeros_like(xs[0]), *xs[:-1]],
    }[name]()


def weight(rank, y):
    """Return a loss that differs from rank to rank."""
    return jnp.sum(jnp.sin(y) * np.random.default_rng(rank).normal(size=y.shape)) * (rank + 1)


def in_one_piece(name, xs):
    """Return what all ranks get, and derivatives of the sum of their losses: first, forward along these, second."""

    def losses(xs):
        return sum(weight(r, y) for r, y in enumerate(everybody(name, xs)))

    def squares(xs):
        return sum(jnp.sum(g**2) for g in jax.grad(losses)(xs))

    first = jax.grad(losses)(xs)
    found, forward = jax.jvp(functools.partial(everybody, name), (xs,), (first,))
    return found, first, forward, jax.grad(squares)(xs)


IN_ONE_PIECE = {name: functools.partial(in_one_piece, name) for name in OPERATIONS}


@pytest.mark.parametrize("name", OPERATIONS)
@on_every_worker
def test_derivatives_are_those_of_the_sum_of_all_ranks_losses(big_world, name, rank, size):
    inputs = [np.random.default_rng(80 + r).normal(size=(3, 2)).astype("float32") for r in range(size)]
    expected, first, forward, second = serially(IN_ONE_PIECE[name], inputs)
    c, x = of_this_world(), jnp.asarray(inputs[rank])

    def run(x):
        return OPERATIONS[name](c, x)

    def derivative(x):
        return jax.grad(lambda x: weight(rank, run(x)))(x)

    def both(x):
        return run(x), derivative(x)

    def all_(x):
        return *both(x), jax.grad(lambda x: jnp.sum(derivative(x) ** 2))(x)

    if name != "max":
        _, found = jax.jvp(run, (x,), (jnp.asarray(first[rank]),))
        np.testing.assert_allclose(found, forward[rank], rtol=1e-4, atol=1e-5)
    for found, gradient, *twice in (both(x), jax.jit(all_)(x)):
        np.testing.assert_allclose(found, expected[rank], rtol=1e-6)
        np.testing.assert_allclose(gradient, first[rank], rtol=1e-5, atol=1e-6)
        for one in twice:
            np.testing.assert_allclose(one, second[rank], rtol=1e-4, atol=1e-5)

    def step(total, x):
        y = run(x)
        return total + weight(rank, y), y

    looped = jax.grad(lambda x: jax.lax.scan(step, 0.0, jnp.stack([x, x])), has_aux=True)
    gradient, found = jax.jit(looped)(x)
    np.testing.assert_allclose(found, [expected[rank]] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * first[rank], rtol=1e-5, atol=1e-6)


OWN_PROGRAMS = (lambda p: jnp.arange(9.0).reshape(3, 3) @ p, lambda p: 2 * p, jnp.cumsum)


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"mean", "product", "rows", "shift in a row"}))
@on_every_worker
def test_ranks_vectorize_alike_whatever_they_compute_before(big_world, name, rank, size):
    """Where JAX leaves the axis of a batch depends on each rank's own program."""
    c, ps = of_this_world(), np.random.default_rng(7).normal(size=(3, 3)).astype("float32")
    mine = OWN_PROGRAMS[rank % 3]
    inputs = [jax.vmap(OWN_PROGRAMS[r % 3])(ps) for r in range(size)]
    found = jax.jit(jax.vmap(lambda p: OPERATIONS[name](c, mine(p))))(ps)
    expected = [everybody(name, [rows[k] for rows in inputs])[rank] for k in range(3)]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5)


@on_every_worker
def test_ranks_in_different_operations_are_told(big_world, rank, size):
    c = of_this_world()
    with pytest.raises(DisagreementError, match=r"rank 2 does allreduce of float32\[4\]"):
        c.allreduce(jnp.zeros(4 if rank == 2 else 3))
    with pytest.raises(DisagreementError, match=r"rank 1 does allreduce of float32\[3\] \(max\)"):
        c.allreduce(jnp.zeros(3), "max" if rank == 1 else "sum")
    assert float(c.allreduce(jnp.ones(()))) == size


@on_every_worker
def test_ranks_that_do_not_come_are_named(big_world, rank, size):
    c = of_this_world()
    c.timeout = 0.3
    if rank != 1:
        with pytest.raises(MissingRanksError, match=r"rank 1 has not come within 0\.3 s") as caught:
            c.allreduce(jnp.ones(3))
        assert caught.value.missing == [1]
    else:
        time.sleep(1.5)
    of_this_world().members.begin(b"x", "the end").wait(20)


gave_up = collections.Counter()  # by rank: how many others have told it so


def one_gave_up():
    gave_up[jd.rank()] += 1


@pytest.mark.parametrize("missing", [0, 1])
@on_every_worker
def test_ranks_that_do_not_come_to_make_collectives_are_named(big_world, missing, rank, size):
    made, gave_up[rank] = [], 0
    of_this_world().barrier()
    while rank == missing and gave_up[rank] < size - 1:
        time.sleep(0.01)
    told = rf"ranks? .*\b{missing}\b.* not come within 0\.3 s"  # on a busy machine another rank may be late, too
    error = pytest.raises(MissingRanksError, match=r"rank \d waits no longer" if rank == missing else told)
    for _ in range(2):
        with error:
            made.append(of_this_world(timeout=0.3))
            made[-1].barrier()
    if rank != missing:
        jd.rpc_sync(missing, one_gave_up)
    assert of_this_world().allgather_object(rank) == list(range(size))
    assert of_this_world([1, 2]).allgather_object(rank) == [1, 2] if rank else True


@on_every_worker
def test_an_object_that_cannot_be_pickled_is_the_error_of_all(world, rank, size):
    # The others, which were inside MPI by then, waited for it for ever.
    c, last = of_this_world(), size - 1
    given = threading.Lock() if rank == last else rank
    error = pytest.raises(CollectiveError)
    for gather in (c.allgather_object, lambda value: c.broadcast_object(value, last)):
        # Threads hand objects over, and so does a rank alone.
        with error if launcher_env.launched() and size > 1 else contextlib.nullcontext():
            gather(given)
    assert c.allgather_object(rank) == list(range(size))


@on_every_worker
def test_wrong_arguments_are_refused(world, rank, size):
    c = of_this_world()
    with pytest.raises(ValueError, match="op must be one of 'sum', 'max', 'min', 'mean', 'prod', not 'median'"):
        c.allreduce(jnp.ones(3), "median")
    with pytest.raises(ValueError, match=r"alltoall: float32\[0?\] has no equal blocks|has no equal blocks of rows"):
        c.alltoall(jnp.ones(()))
    with pytest.raises(ValueError, match=r"splits of .* rows for an array of 1 rows"):
        c.alltoall(jnp.ones(1), [2] * size)
    with pytest.raises(ValueError, match=f"a number of rows for each of {size} ranks"):
        c.alltoall(jnp.ones(1), [1] * (size + 1))
    with pytest.raises(ValueError, match=r"gather_rows\(x, counts=\[...\]\)"):
        jax.jit(c.gather_rows)(jnp.ones(3))
    with pytest.raises(TypeError):
        c.allreduce(jnp.ones(3, bool))
    with pytest.raises(ValueError, match=f"a rank from 0 to {size - 1}, not {size}"):
        c.broadcast(jnp.ones(3), size)


@pytest.mark.world(4)
@on_every_worker
def test_some_of_the_workers(world, rank, size):
    # A group has the order of its list. Other workers take no part, and groups do not mix.
    named = [size - 1, 0] if rank in (0, size - 1) else list(range(1, size - 1))
    some, everybody = of_this_world(named), of_this_world()
    assert (some.rank, some.size) == (named.index(rank), len(named))
    for again in (some, some.twin(), of_this_world(named)):
        np.testing.assert_array_equal(again.allgather(jnp.int32(rank)), named)
    assert float(everybody.allreduce(jnp.ones(()))) == size


@on_every_worker
def test_groups_that_are_none_are_refused(world, rank, size):
    for workers in ([], [rank, rank], [rank, size], [(rank + 1) % size] if size > 1 else [1]):
        with pytest.raises(CollectiveError):
            of_this_world(workers)
    for alone in (f"worker{rank}", rank):
        with pytest.raises(CollectiveError):
            of_this_world(alone)


def test_collectives_of_a_closed_world_are_refused():
    kept = {}

    def main():
        me = jd.init()
        kept[me.rank] = all_of.Local()
        jd.shutdown()
        jd.init()
        with pytest.raises(WorldClosedError, match=r"their world has been shut down. Make new ones in this one"):
            kept[me.rank].allreduce(jnp.ones(3))
        assert float(all_of.Local().allreduce(jnp.ones(()))) == 3
        jd.shutdown()

    jd.spawn(main, 3)


def test_a_wait_ends_when_the_world_fails():
    def main():
        me = jd.init()
        if me.rank == 1:
            raise ZeroDivisionError("rank 1's own")
        of_this_world().allreduce(jnp.ones(3))

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        jd.spawn(main, 3)
    assert threading.active_count() <= before + 5


@pytest.mark.every_rank
@pytest.mark.skipif(not launcher_env.launched(), reason="needs MPI; the runs with mpirun have it")
def test_communicators_that_are_none_are_refused():
    from mpi4py import MPI

    jd.init()

    for comm in (MPI.COMM_NULL, "world"):
        with pytest.raises(CollectiveError):
            all_of.MPI(comm)
    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    assert float(all_of.MPI(half).allreduce(jnp.ones(()))) == half.size
    half.Free()
    jd.shutdown()
    with pytest.raises(jd.NotInitializedError):
        all_of.MPI()


@on_every_worker
def test_large_results_keep_their_memory(big_world, rank, size):
    # Results of 1 MiB and more lie in memory that is used again, once nobody holds them any more.
    c, mine = of_this_world(), np.arange(600_000, dtype=np.float32)
    operations = {
        "sum": lambda x: c.allreduce(x),
        "broadcast": lambda x: c.broadcast(x, 1),
        "gather": lambda x: c.allgather(x)[0],
        "scatter": lambda x: c.allgather(c.reduce_scatter(x)).reshape(-1),
    }
    expected = {"sum": size, "broadcast": 1, "gather": 1, "scatter": size}
    held = [(k, what, run(jnp.asarray(mine + k))) for k in range(3) for what, run in operations.items()]
    for k, what, found in held:
        np.testing.assert_array_equal(found, (mine + k) * expected[what])
