"""What messages may name of the standard library, of packages and of this one, decided by names alone."""

import importlib

import pytest

from jdistgrad.rpc.harmless import METHODS, NAMED, REFUSED, SAME, WHOLE, refusal, spelled

REFUSED_NAMES = """
    os.system os.remove os.kill os.environ os.fork posix.system posix.execv nt.system subprocess.Popen subprocess.run
    builtins.eval builtins.exec builtins.compile builtins.open builtins.__import__ builtins.setattr builtins.globals
    builtins.breakpoint builtins.vars pickle.loads pickle.Unpickler _pickle.loads marshal.loads shutil.rmtree
    importlib.import_module runpy.run_path code.interact ctypes.CDLL operator.attrgetter _operator.methodcaller
    dataclasses.make_dataclass typing.get_type_hints typing._eval_type collections.namedtuple types.FunctionType
    types.CodeType sys.exit sys.modules sys.settrace threading.Thread multiprocessing.Process socket.socket
    webbrowser.open timeit.timeit antigravity.fly io.open io.FileIO copyreg.pickle copyreg.add_extension
    functools.update_wrapper string.Formatter logging.basicConfig gc.get_objects time.clock_settime uuid._load_system
    pathlib.Path.unlink pathlib.Path.write_text inspect.Signature.from_callable builtins.object.__subclasses__
    builtins.str.__class__ builtins.function.__globals__ test.support.script_helper.assert_python_ok
    cloudpickle.loads cloudpickle.cloudpickle.subimport dill.loads joblib.externals.cloudpickle.loads
    jdistgrad.rpc.functions.lookup jdistgrad.rpc.by_value.own_or_sent jdistgrad.rpc.unpickling.loads
    jdistgrad.rpc.by_value.own_alike_or_sent jdistgrad.rpc.by_value._loaded
    jdistgrad.rpc.codec.PickleCodec jdistgrad.cli.launch.run jdistgrad.rpc.current.current_resident
    mymodule.__builtins__ jdistgrad.errors.__loader__
    numpy.load numpy.savez numpy.fromfile numpy.memmap numpy.ndarray.tofile numpy.ndarray.__reduce_ex__ numpy.seterrcall
    numpy.testing.rundocs numpy.lib.format.read_array numpy.ctypeslib.load_library numpy.__loader__
    jax.profiler.start_server jax.distributed.initialize jax._src.config.update jax._src.debugger.core.run_debugger
    jax._src.compilation_cache.set_cache_dir jax.tools.jax_to_ir.main jaxlib._jax.get_c_api_client
    jaxlib.xla_client.load_pjrt_plugin_dynamically flax.io.rmtree flax.training.checkpoints.save_checkpoint
    optaxes.adam pip.main IPython.utils.process.system unknown_package.function
"""

FOUND_NAMES = """
    builtins.dict builtins.getattr builtins.print builtins.str.upper builtins.int.__add__
    collections.OrderedDict collections.Counter.update datetime.datetime decimal.Decimal fractions.Fraction
    pathlib.PosixPath pathlib.PurePath.joinpath pathlib.Path.exists uuid.UUID math.sin _operator.add operator.itemgetter
    functools.partial _functools.reduce time.time time.sleep posix.getpid os.cpu_count _random.Random
    random.Random.random posixpath.join genericpath.exists re._compile copyreg._reconstructor types.GenericAlias
    _thread.get_ident
    platform.node _socket.gethostname logging.getLogger gc.collect
    numpy.core.multiarray.scalar numpy._core.numeric._frombuffer numpy.ndarray.sum numpy.ndarray.__add__ numpy.sum
    numpy.linalg.norm numpy.random._pickle.__generator_ctor numpy.rec.recarray ml_dtypes.bfloat16 scipy.special.erf
    jax.numpy.add jax.numpy.linalg.norm jax.grad jax._src.api.grad jax._src.nn.functions.relu jaxlib._jax.pytree.DictKey
    optax._src.alias.adam optax._src.transform.ScaleByAdamState flax.core.frozen_dict.FrozenDict flax.linen.Dense
    mymodule.function mymodule.Class.method __main__.run
    jdistgrad.errors.WireError jdistgrad.rpc.api.rpc_sync jdistgrad.rpc.functions.registered
    jdistgrad.wire.arrays.rebuild_jax
"""


@pytest.mark.parametrize("name", REFUSED_NAMES.split())
def test_refused(name):
    assert refused(name)


@pytest.mark.parametrize("name", FOUND_NAMES.split())
def test_found(name):
    assert not refused(name)


def refused(name):
    return refusal(*split(name), written=name.startswith(("mymodule", "__main__"))) is not None


def split(name):
    """Return the module and the name in it: names of modules are the parts that are no class's."""
    parts = name.split(".")
    last = next((k for k, part in enumerate(parts) if k and part[0].isupper()), len(parts) - 1)
    if parts[0] == "builtins" or parts[:2] == ["numpy", "ndarray"]:
        last = 1
    return ".".join(parts[:last]), ".".join(parts[last:])


@pytest.mark.parametrize("module", [*WHOLE.split(), *NAMED])
def test_the_lists_name_what_there_is(module):
    held = importlib.import_module(module)
    others = {"builtins": {"NoneType", "ellipsis", "NotImplementedType", "method", "mappingproxy"}}
    others |= {"threading": {"lock", "allocate_lock"}}  # of ``_thread``
    names = set(f"{NAMED.get(module, '')} {REFUSED.get(module, '')}".split()) - others.get(module, set())
    assert [name for name in names if not hasattr(held, name)] == []


@pytest.mark.parametrize("owner", METHODS)
def test_the_methods_listed_exist(owner):
    module, name = owner.split(".")
    kind = getattr(importlib.import_module(module), name)
    assert [method for method in METHODS[owner].split() if not hasattr(kind, method)] == []


def test_people_read_the_names_they_know():
    assert [spelled("posix", "system"), spelled("mymodule", "f")] == ["os.system", "mymodule.f"]
    assert SAME["_operator"] == "operator"
