"""Values that can travel: every kind of array and object arrives and returns unchanged."""

import collections
import dataclasses
import enum
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.worlds import needs_pickling, on_worker0

import jdistgrad as jd


def echo(*args, **kwargs):
    return (args, kwargs) if kwargs else args[0]


def summed_later(array):
    time.sleep(0.1)
    return array.sum()


def kinds(tree):
    return [(type(leaf), getattr(leaf, "dtype", None), getattr(leaf, "shape", None)) for leaf in jax.tree.leaves(tree)]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert kinds(a) == kinds(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def round_trip(value):
    return jd.rpc_sync(jd.world_size() - 1, echo, args=(value,))


DTYPES = [
    *("bool", "int8", "uint16", "int32", "float16", "float32", "complex64"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
]


def arrays_of_all_kinds(make):
    arrays = [make(np.arange(6).reshape(2, 3) % 2, dtype) for dtype in DTYPES]
    arrays += [make(np.array(1), dtype) for dtype in DTYPES]
    return [*arrays, make(np.zeros((3, 0, 2)), "float32"), make(np.arange(100_000), "int32")]


@on_worker0
def test_arrays_of_jax_and_numpy(world):
    base = np.arange(400_000, dtype=np.float32).reshape(1000, 400)
    views = [base.T, base[::3, ::-7], np.asfortranarray(base), np.broadcast_to(base[:1], (5, 400)), base[5:5]]
    others = [*views, np.arange(3.0), np.float64(2.5), np.arange(5, dtype=np.int64)]
    for value in (*arrays_of_all_kinds(jnp.asarray), *arrays_of_all_kinds(np.asarray), *others):
        same(value, round_trip(value))


@on_worker0
def test_structured_and_object_arrays(world):
    table = np.array([(1, 2.5), (3, 4.5)], dtype=[("key", "i4"), ("value", "f8")])
    words = np.array(["a", None, {"b": 1}], dtype=object)
    assert round_trip(table)["value"].tolist() == [2.5, 4.5]
    assert round_trip(words).tolist() == ["a", None, {"b": 1}]


@on_worker0
def test_gradients_of_integers(world):
    """JAX gives them a type of its own, which holds nothing. They can be sent on."""
    gradient = jax.grad(lambda x: jnp.sum(2.0 * x), allow_int=True)(jnp.arange(3))
    twice = round_trip(round_trip(gradient))
    assert (twice.dtype, twice.shape) == (jax.dtypes.float0, (3,))
    assert jnp.shape(twice) == (3,)


VIEWS = {  # of one array, all read-only
    "broadcast": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 5),
    "bytes": lambda array: np.frombuffer(memoryview(array).toreadonly()),
}


@pytest.mark.parametrize("length", [8, 20_000])
@pytest.mark.parametrize("kind", VIEWS)
@on_worker0
def test_read_only_views_of_what_changes_after_an_asynchronous_call(world, kind, length):
    array = np.ones(length)
    view = VIEWS[kind](array)
    expected = view.sum()
    calls = [jd.rpc_async(to, summed_later, args=(view,)) for to in (0, jd.world_size() - 1)]
    made = jd.remote(jd.world_size() - 1, summed_later, args=(view,))
    array[:] = 0
    assert [call.result() for call in calls] == [expected, expected]
    assert made.to_here() == expected


@on_worker0
def test_random_keys_weak_types_and_arrays_to_write_to(world):
    """If weak types were lost, a remote function would compute in another dtype than the same function run here."""
    key, half = jax.random.key(7, impl="rbg"), jnp.ones(2, jnp.bfloat16)
    assert round_trip(key).dtype == key.dtype
    assert jax.random.uniform(round_trip(key)) == jax.random.uniform(key)
    same(half * 2.0, half * round_trip(jnp.asarray(2.0)))
    for n in (3, 100_000):
        array = round_trip(np.zeros(n))
        array[0] = 1
        assert array.sum() == 1


@dataclasses.dataclass
class Holder:
    arrays: list
    label: str


Point = collections.namedtuple("Point", "x y")


OBJECTS = [
    *(None, True, 2**100, "text", b"bytes", 1 + 2j, {3, 4}, ..., slice(1, 2)),
    {"nested": [1, (2.0, {"deep": "er"})], 5: "mixed keys"},
    Point(1, {"a": 2}),
    list(range(100_000)),
    "long" * 100_000,
]


@on_worker0
def test_python_objects(world):
    for value in OBJECTS:
        assert round_trip(value) == value
    holder = Holder([jnp.arange(3), np.ones(50_000)], "mine")
    back = round_trip(holder)
    assert back.label == "mine"
    same(back.arrays, holder.arrays)


changed = threading.Event()


def once_changed():
    changed.wait()
    return 0


def held(batch, _, **named):
    return jax.tree.map(lambda leaf: float(np.sum(leaf)), (batch, named))


@pytest.mark.parametrize("length", [0, 3, 100_000])
@on_worker0
def test_what_a_call_gets_may_change_as_soon_as_it_is_under_way(world, length):
    """An array is filled and a list emptied for the next batch. In one process, too, workers get them as they were."""
    changed.clear()
    leaf = np.ones(length) if length else 1
    everybody, late = range(jd.world_size()), jd.remote(0, once_changed)  # a call waits for its arguments
    batch, named = [leaf, ({"x": leaf[1:] if length else leaf},)], {"more": leaf}
    expected = held(batch, 0, **named)
    calls = [jd.rpc_async(to, held, args=(batch, late), kwargs=named) for to in everybody]
    references = [jd.remote(to, held, args=(batch, late), kwargs=named) for to in everybody]
    to_all = jd.rpc_all(everybody, held, args=(batch, late), kwargs=named)
    if length:
        leaf[:] = 2
    batch[1][0]["x"] = named["more"] = 2
    batch.clear()
    changed.set()
    found = [call.result() for call in calls] + [one.to_here() for one in references] + [*to_all.result()]
    assert found == [expected] * len(found)


def fill(batch, named):
    batch.append(1)
    named["batch"].append(2)
    named["more"] = 3


class Side(enum.Enum):
    RIGHT = 2
    LEFT = 1


def entries(mapping):
    return type(mapping), [*mapping.items()], mapping.default_factory


@pytest.mark.parametrize("keys", [[Side.RIGHT, Side.LEFT], [1, "a"], ["b", "a"]], ids=str)
@on_worker0
def test_dicts_with_a_default_keep_their_order_and_any_keys(world, keys):
    mapping = collections.defaultdict(list, {key: [k] for k, key in enumerate(keys)})
    last = jd.world_size() - 1
    assert jd.rpc_sync(last, entries, args=(mapping,)) == entries(mapping)
    assert jd.rpc_async(last, entries, args=(mapping,)).result() == entries(mapping)


@on_worker0
def test_a_called_function_has_lists_and_dicts_of_its_own(world):
    batch, named = [], {"batch": []}
    for to in range(jd.world_size()):
        jd.rpc_sync(to, fill, args=(batch, named))
    assert (batch, named) == ([], {"batch": []})


@pytest.mark.parametrize("nbytes", [(1 << 16) - 8, 1 << 16, pytest.param((1 << 30) + 8, marks=needs_pickling)])
@on_worker0
def test_sizes_around_every_limit(big_world, nbytes):
    array = np.arange(nbytes // 8)
    total = jd.rpc_sync(jd.world_size() - 1, int_sum, args=(array,))
    assert total == int(array.sum())


def int_sum(array):
    return int(array.sum())


def test_more_than_two_gibibytes(mpi_job):
    """A separate job of two ranks, with a copy each, limits the memory that the test needs."""
    mpi_job(
        2,
        """
        import numpy as np
        import jdistgrad as jd

        def last_byte(array):
            return len(array), int(array[-1])

        me = jd.init()
        if me.rank == 0:
            array = np.zeros((2 << 30) + 12345, np.uint8)
            array[-1] = 9
            assert jd.rpc_sync(1, last_byte, args=(array,)) == (len(array), 9)
            print("arrived")
        jd.shutdown()
        """,
    ).expect("arrived")
