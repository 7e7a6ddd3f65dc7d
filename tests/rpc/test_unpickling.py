"""The opening of pickles: what they find, what they do not, and that damage and forgery call nothing else."""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import enum
import functools
import io
import json
import logging
import operator
import os
import pathlib
import pickle
import pickletools
import random
import re
import signal
import subprocess
import sys
import types
import typing
import zoneinfo
from typing import ClassVar

import cloudpickle
import equinox
import flax.linen
import flax.nnx
import flax.struct
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from helpers import imports_others
from helpers.data import damaged
from helpers.forgery import attribute_of, called, calling, named

import jdistgrad as jd
from jdistgrad.rpc import functions, unpickling
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.wire.message import Kind, Parcel

CODEC = PickleCodec(allow_code=False)
MODULE = imports_others.__name__


def carried(value):
    return CODEC.decode(CODEC.encode(value, snapshot=True))


class Color(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Pair(typing.NamedTuple):
    x: int


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    x: int


class RefusedError(Exception):
    pass


class Net(collections.OrderedDict):
    def forward(self):
        return len(self)

    def _private(self):
        return len(self)

    @classmethod
    def make(cls):
        return cls()

    class Inner:
        def method(self):
            pass


@functools.lru_cache
def cached(x):
    return x


@contextlib.contextmanager
def block():
    yield


def top_level(x):
    return x


class Perceptron(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(3)(x)


@flax.struct.dataclass
class Fields:
    a: int


T = typing.TypeVar("T")


ARRAYS = [np.float32(1.5), np.dtype("f4"), np.zeros(2, [("a", "i4")]), np.array([1, "a", None], object)]
ARRAYS += [
    np.random.default_rng(0),
    np.random.RandomState(0),
    np.add,
    np.add.reduce,
    jnp.bfloat16,
    jnp.float32,
    jnp.add,
]
ARRAYS += [jax.random.key(0), jnp.ones((2, 3)), jax.nn.relu, jax.sharding.PartitionSpec("x"), jnp.linalg.norm]
STATES = [optax.adam(1e-3).init({"w": jnp.ones(3)}), equinox.nn.Linear(2, 3, key=jax.random.PRNGKey(0))]
STATES += [flax.core.freeze({"a": 1}), flax.linen.Dense, jax.tree.structure({"a": 1})]
STATES += [flax.linen.BatchNorm(use_running_average=True), Perceptron(), Perceptron().apply]
STATES += [flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0)), flax.nnx.split(flax.nnx.Rngs(0))[0], Fields(1).replace]
STATES += [np.ma.array([1.0, 2.0], mask=[0, 1]), np.array(["a"], np.dtypes.StringDType()), jax.device_count]
STATES += [jax.experimental.sparse.BCOO.fromdense(jnp.eye(2)), optax.huber_loss, jax.scipy.stats.norm.logpdf]
STATES += [optax.sgd(0.1).init(jnp.ones(1))[0]._replace, zoneinfo.ZoneInfo("UTC")]
OWN = [Color.RED, Flags.A | Flags.B, Pair(1), Data(2), RefusedError("x"), Net(a=1), Net(a=1).forward, Net()._private, T]
OWN += [Net.make, Net.Inner, Net.Inner.method, Net(a=1).items, cached, block, imports_others.holder]
PYTHON = [
    typing.Callable[[int], str],
    list[int],
    int | str,
    pathlib.Path("/tmp"),
    pathlib.Path("/tmp").joinpath,
    str.upper,
]
PYTHON += [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1), random.Random(3), random.random]
PYTHON += [logging.getLogger("a"), re.compile("a+"), signal.SIGINT, subprocess.CalledProcessError(1, "x"), os.stat("/")]
PYTHON += [
    json.JSONDecodeError("a", "b", 1),
    ExceptionGroup("a", [ValueError(1)]),
    collections.Counter("aa"),
    [].append,
]
PYTHON += [dict.fromkeys, int.from_bytes, (5).__add__, int.__add__, os.getpid, os.path.join, getattr, print, type(None)]
PYTHON += [scipy.special.erf, argparse.Namespace(rate=0.1)]
PYTHON += [..., functools.partial(operator.add, 1), operator.itemgetter(1), types.SimpleNamespace(a=1), object()]


@pytest.mark.parametrize("value", [*ARRAYS, *STATES, *OWN, *PYTHON], ids=lambda value: str(value)[:40])
def test_what_programs_send_travels(value):
    found = carried(value)
    assert type(found) is type(value) or isinstance(value, jax.Array) or value is getattr


def test_methods_of_objects_that_travel_work():
    assert carried(Net(a=1, b=2).forward)() == 2
    assert carried(imports_others.holder.method)() == "method"
    assert carried(getattr)(Data(3), "x") == 3
    assert carried(getattr)(Data(3), "y", 7) == 7


@pytest.mark.parametrize("value", [os.system, subprocess.Popen, eval, pickle.loads, pathlib.Path("/x").unlink, setattr])
def test_the_sender_learns_that_a_function_is_refused(value):
    with pytest.raises(jd.FunctionError, match=r"may not be named in a message: .*\(jdistgrad.register\)"):
        CODEC.encode((value, (), {}), snapshot=True)


FORGED = [
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("pickle", "loads"),
    ("cloudpickle", "loads"),
    (MODULE, "os.system"),
    (MODULE, "system"),
    (MODULE, "run"),
    (MODULE, "Popen"),
    (MODULE, "loads"),
    (MODULE, "Holder.start"),
    (MODULE, "Holder.system"),
    (MODULE, "Holder.__subclasses__"),
    (MODULE, "holder.system"),
    (MODULE, "doubled.__globals__"),
    (MODULE, "doubled.__class__"),
    (MODULE, "table"),
    (MODULE, "__builtins__"),
    (MODULE, "__loader__.get_code"),
    ("numpy", "ctypeslib.ctypes.CDLL"),
    ("jdistgrad.rpc.functions", "events"),
    ("jdistgrad.rpc.functions", "lookup"),
    ("jdistgrad", "rpc.functions.lookup"),
    ("statistics", "namedtuple"),
    ("logging", "os.system"),
    ("random", "seed"),
    ("jdistgrad.saving.folders", "remove_all_but"),
    ("jdistgrad.observe.chrome", "write"),
    ("test.support.script_helper", "assert_python_ok"),
    ("jax.numpy", "load"),
    ("jax.tree_util", "register_dataclass"),
    ("jaxlib._jax.pytree", "PyTreeRegistry"),
    ("numpy", "memmap"),
    ("numpy", "ndarray.tofile"),
    ("numpy.random", "seed"),
    ("numpy.linalg.tests.test_linalg", "TestSolve"),
    ("optax._src.sharding_test", "ShardingTest"),
    ("scipy.special._precompute.hyp2f1_data", "main"),
    ("flax.linen.module", "ModuleBase.__init_subclass__"),
    ("enum", "EnumType._convert_"),
    ("enum", "EnumType"),
    ("logging", "Logger.addHandler"),
    ("jdistgrad.rpc.functions", "register"),
]


@pytest.mark.parametrize(("module", "name"), FORGED)
def test_a_forged_pickle_finds_nothing_else(module, name):
    with pytest.raises(jd.FunctionError, match="may not be named in a message"):
        unpickling.loads(calling(module, name, "echo forged"))


@pytest.mark.parametrize(
    "owner",
    [
        attribute_of(named(MODULE, "holder"), "modules"),
        attribute_of(named(MODULE, "doubled"), "__globals__"),
        attribute_of(named(MODULE, "Holder"), "system"),
        attribute_of(named(MODULE, "holder"), "__class__"),
        attribute_of(named("builtins", "object"), "__subclasses__"),
        attribute_of(named(MODULE, "Holder"), "table"),
    ],
)
def test_a_forged_pickle_walks_nowhere_by_getattr(owner):
    with pytest.raises(jd.FunctionError, match="may not be named in a message"):
        unpickling.loads(called(owner))


class ByAttribute:
    """Pickles a member of an enumeration as Python before 3.11.4 does."""

    def __reduce__(self):
        return getattr, (Kind, "RESULT")


def test_members_of_enumerations_are_found_however_they_are_pickled():
    assert unpickling.loads(pickle.dumps(ByAttribute())) is Kind.RESULT
    assert unpickling.find("signal", "SIGINT") is signal.SIGINT


def test_a_forged_pickle_makes_no_types():
    """A class statement runs the hooks of base classes, which may evaluate annotations."""
    for found in (unpickling.loads(named_and_end("builtins", "type")), unpickling.kind(int), unpickling.kind(Color)):
        assert found("text") is str
        with pytest.raises(TypeError):
            found("Made", (flax.nnx.Module,), {"__annotations__": {"a": "1 / 0"}})


def test_a_name_is_no_object_that_only_looks_like_one():
    class Lie(str):
        def __getitem__(self, place):
            return "zz"

    for found in (lambda name: unpickling.attribute(object, name), lambda name: unpickling.find("builtins", name)):
        with pytest.raises(jd.FunctionError, match="is no plain text: it was forged"):
            found(Lie("__subclasses__"))


@pytest.mark.parametrize("dtype", [np.float64, [("key", np.int32), ("value", np.float64)]], ids=["plain", "fields"])
def test_an_array_that_lies_in_a_file_arrives_as_an_array(tmp_path, dtype):
    there = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", dtype, shape=(4, 2))
    there[:] = 3
    found = carried(there[1:])
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, np.full((3, 2), 3, dtype))


def test_names_sent_for_jitted_functions_obey_the_same_rule():
    for name in ("os.system", "run", "table"):
        with pytest.raises(jd.FunctionError, match="may not be named in a message"):
            unpickling.loads(calling("jdistgrad.rpc.named", "by_name", MODULE, name))


def test_forged_pickles_are_no_sham():
    """The same bytes do what they say where everything is found."""
    assert pickle.loads(calling(MODULE, "os.getpgid", 0)) == os.getpgid(0)
    assert pickle.loads(attribute_and_end(MODULE, "doubled", "__globals__")) is vars(imports_others)
    assert unpickling.loads(calling(MODULE, "doubled", 4)) == 8


def named_and_end(module, name):
    return pickle.PROTO + b"\x05" + named(module, name) + pickle.STOP


def attribute_and_end(module, name, attribute):
    return pickle.PROTO + b"\x05" + attribute_of(named(module, name), attribute) + pickle.STOP


def test_a_function_that_carries_the_name_of_another_is_its_modules():
    assert unpickling.find(MODULE, "own") is imports_others.own


def test_a_registered_function_is_found_whatever_its_module():
    jd.register(os.getpgid, "a registered function of the standard library")
    assert carried(os.getpgid) is os.getpgid


def test_a_world_that_allows_code_finds_everything():
    codec = PickleCodec(allow_code=True)
    assert codec.decode(codec.encode(os.system, snapshot=True)) is os.system


def test_a_file_of_the_program_may_have_the_name_of_a_standard_module(tmp_path, monkeypatch):
    (tmp_path / "sndhdr.py").write_text("def mine(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sndhdr", raising=False)
    import sndhdr

    assert carried(sndhdr.mine)(1) == 2
    monkeypatch.delitem(sys.modules, "sndhdr")


def test_a_function_that_was_defined_anew_is_found():
    stream = pickle.dumps(top_level)
    before = unpickling.loads(stream)
    try:
        globals()["top_level"] = cached
        assert unpickling.loads(stream) is cached
    finally:
        globals()["top_level"] = before


WATCHED = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.kill"}
WATCHED |= {"socket.connect", "shutil.rmtree", "ctypes.dlopen", "webbrowser.open"}

_heard = None


def _listen(event, args):
    if _heard is not None and event in WATCHED:
        _heard.append((event, args))


sys.addaudithook(_listen)


@contextlib.contextmanager
def watched():
    global _heard
    _heard = []
    try:
        yield _heard
    finally:
        _heard = None


NAMES = re.compile(rb"\x8c.([\w.]+)\x94\x8c.([\w.]+)\x94\x93", re.DOTALL)


def mutant(stream, chance):
    """Return a damaged stream, or one in which a name has been replaced by one that is refused."""
    if chance.random() < 0.7:
        return bytes(damaged(stream, chance))
    place, forged = chance.choice(list(NAMES.finditer(stream))), named(*chance.choice(FORGED))
    return stream[: place.start()] + forged + stream[place.end() :]


def needs_no_memory(stream):
    """Return whether a pickle asks for no large memo, which pickle would allocate."""
    with contextlib.suppress(Exception):
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name == "LONG_BINPUT" and argument > 1 << 16:
                return False
    return True


VALUES = [
    (top_level, (np.ones(2), jnp.ones(3)), {"a": Data(2)}),
    (operator.add, (Pair(1), Color.RED), {}),
    (functools.partial(top_level, 3), (Net(a=1).forward, pathlib.Path("/tmp")), {}),
    (jnp.add, ([1.5, "text", None], {"k": datetime.timedelta(1)}), {}),
]


class Recording(unpickling.Opening):
    found: ClassVar = []

    def find_class(self, module, name):
        found = super().find_class(module, name)
        self.found.append(found)
        return found


FORBIDDEN = {os.system, subprocess.Popen, subprocess.run, eval, pickle.loads, cloudpickle.loads, functions.lookup}
FORBIDDEN |= {collections.namedtuple, getattr, type(vars(imports_others)["doubled"])}


@pytest.mark.parametrize("value", VALUES, ids=["arrays", "tuples", "methods", "containers"])
def test_damaged_and_forged_parcels_call_nothing_else(value):
    """Hundreds of mutants: each is opened or refused with an error of ours, and starts and removes nothing."""
    codec, chance, refused = PickleCodec(allow_code=False), random.Random(7), 0
    codec._loads = lambda stream, buffers: Recording(io.BytesIO(stream), buffers=buffers).load()
    whole = codec.encode(value, snapshot=True)
    Recording.found.clear()
    with watched() as heard:
        for one in [mutant(bytes(whole.stream), chance) for _ in range(500)]:
            if needs_no_memory(one):
                try:
                    codec.decode(Parcel(memoryview(one), whole.buffers))
                except jd.DistgradError:
                    refused += 1
    assert refused > 100
    assert heard == []
    assert len(Recording.found) > 100
    assert [one for one in Recording.found if isinstance(one, types.ModuleType | dict)] == []
    assert FORBIDDEN.isdisjoint(one for one in Recording.found if callable(one) and type(one).__hash__)
