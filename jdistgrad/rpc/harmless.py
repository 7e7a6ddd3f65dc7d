"""What a message may name that is not the program's own: of Python and this package, as lists; ``packages`` has more.

A message finds data types, and functions whose call changes nothing of note outside of their arguments: nothing that
starts programs, writes files, runs text as code, or looks into the insides of objects.
"""

import functools
import operator
import sys
import types

from jdistgrad.rpc.packages import is_known

# Public names of these modules of the standard library: all are harmless, but for those in ``REFUSED``.
WHOLE = (
    "abc array base64 binascii bisect cmath collections collections.abc colorsys datetime decimal difflib enum "
    "fractions graphlib hashlib heapq hmac html http ipaddress itertools json json.decoder json.encoder keyword math "
    "numbers operator queue random re secrets stat statistics struct textwrap time typing unicodedata urllib.parse "
    "uuid zlib zoneinfo"
)

REFUSED = {
    "collections": "namedtuple",  # runs text as code
    "enum": "EnumMeta EnumType global_enum",  # write into modules
    "decimal": "setcontext",
    "operator": "attrgetter methodcaller",  # read any attribute of anything
    "random": "seed setstate",
    "time": "clock_settime clock_settime_ns tzset",
    "typing": "get_type_hints ForwardRef NamedTuple NamedTupleMeta",  # run text as code
    "zoneinfo": "reset_tzpath",
}

# Names of modules that hold other things too, and private names that pickle uses.
NAMED = {
    "argparse": "Namespace",
    "array": "_array_reconstructor",
    "ast": "literal_eval",
    "builtins": "int float complex bool str bytes bytearray list tuple dict set frozenset range slice object type "
    "memoryview property staticmethod classmethod enumerate filter map zip reversed NotImplemented Ellipsis NoneType "
    "ellipsis NotImplementedType method mappingproxy abs all any ascii bin callable chr divmod format getattr hasattr "
    "hash hex id isinstance issubclass iter len max min next oct ord pow print repr round sorted sum",
    "calendar": "Calendar TextCalendar HTMLCalendar calendar isleap leapdays month monthcalendar monthrange timegm "
    "weekday",
    "collections": "_tuplegetter",
    "contextlib": "closing nullcontext suppress",
    "copy": "copy deepcopy",
    "copyreg": "__newobj__ __newobj_ex__ _reconstructor",
    "dataclasses": "asdict astuple fields is_dataclass replace Field InitVar KW_ONLY MISSING _FIELD_BASE "
    "_HAS_DEFAULT_FACTORY_CLASS _KW_ONLY_TYPE _MISSING_TYPE",
    "functools": "cmp_to_key partial partialmethod reduce",
    "gc": "collect get_count get_stats isenabled",
    "getpass": "getuser",
    "inspect": "BoundArguments Parameter Signature _ParameterKind _empty",
    "io": "BytesIO StringIO",
    "locale": "getlocale getpreferredencoding",
    "logging": "Logger RootLogger critical debug error exception getLevelName getLogger info log warning",
    "os": "cpu_count fspath getcwd getenv getgid getloadavg getlogin getpid getppid getuid listdir sched_getaffinity "
    "stat times uname urandom PathLike",
    "os.path": "abspath basename commonpath commonprefix dirname exists getmtime getsize isabs isdir isfile islink "
    "join lexists normcase normpath realpath relpath samefile split splitext",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pickle": "PickleBuffer",
    "platform": "machine node platform python_implementation python_version release system uname version",
    "re": "_compile",
    "resource": "getrusage",
    "socket": "getfqdn gethostname",
    "string": "Template capwords",
    "sys": "getdefaultencoding getrecursionlimit getsizeof intern",
    "threading": "Barrier BoundedSemaphore Condition Event Lock RLock Semaphore active_count allocate_lock "
    "current_thread get_ident get_native_id lock",
    "traceback": "FrameSummary StackSummary format_exc",
    "tracemalloc": "get_traced_memory",
    "types": "EllipsisType GenericAlias MappingProxyType MethodType NoneType NotImplementedType SimpleNamespace "
    "UnionType",
    "warnings": "warn",
    "weakref": "WeakKeyDictionary WeakSet WeakValueDictionary",
}

# Of these classes, not these methods: they write files.
REFUSED_METHODS = {"numpy.ndarray": "dump tofile"}

# Of these classes, only these methods.
METHODS = {
    "logging.Logger": "critical debug error exception getEffectiveLevel info isEnabledFor log warning",
    "pathlib.Path": "absolute exists expanduser is_dir is_file is_symlink iterdir glob rglob read_bytes read_text "
    "resolve samefile stat",
    "inspect.Signature": "bind bind_partial replace",
}

# The names under which Python implements other modules.
SAME = {
    "_blake2": "hashlib",
    "_collections": "collections",
    "_collections_abc": "collections.abc",
    "_functools": "functools",
    "_hashlib": "hashlib",
    "_heapq": "heapq",
    "_bisect": "bisect",
    "_io": "io",
    "_md5": "hashlib",
    "_operator": "operator",
    "_pickle": "pickle",
    "_queue": "queue",
    "_random": "random",
    "_sha1": "hashlib",
    "_sha2": "hashlib",
    "_sha256": "hashlib",
    "_sha3": "hashlib",
    "_sha512": "hashlib",
    "_socket": "socket",
    "_statistics": "statistics",
    "_struct": "struct",
    "_thread": "threading",
    "genericpath": "os.path",
    "nt": "os",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "ntpath": "os.path",
    "pathlib._local": "pathlib",
    "posix": "os",
    "posixpath": "os.path",
}

# The parts of this package that travel: what calls name, and what its own values are made of.
OWN = (
    "jdistgrad.autograd",
    "jdistgrad.data_parallel",
    "jdistgrad.errors",
    "jdistgrad.events",
    "jdistgrad.modules",
    "jdistgrad.optim",
    "jdistgrad.pipeline.averages",
    "jdistgrad.pipeline.batches",
    "jdistgrad.pipeline.pipeline",
    "jdistgrad.pipeline.plans",
    "jdistgrad.pipeline.report",
    "jdistgrad.pipeline.shares",
    "jdistgrad.pipeline.stages",
    "jdistgrad.pipeline.under_way",
    "jdistgrad.rpc.api",
    "jdistgrad.rpc.cached",
    "jdistgrad.rpc.closures",
    "jdistgrad.rpc.directory",
    "jdistgrad.rpc.functions",
    "jdistgrad.rpc.futures",
    "jdistgrad.rpc.mapping",
    "jdistgrad.rpc.members",
    "jdistgrad.rpc.named",
    "jdistgrad.rpc.references",
    "jdistgrad.rpc.scopes",
    "jdistgrad.rpc.serving.failures",
    "jdistgrad.rpc.work_count",
    "jdistgrad.rpc.worlds.worlds",
    "jdistgrad.saving.desk",
    "jdistgrad.saving.files",
    "jdistgrad.saving.marks",
    "jdistgrad.saving.owners",
    "jdistgrad.saving.parts",
    "jdistgrad.schedules.costs",
    "jdistgrad.schedules.forecasting",
    "jdistgrad.schedules.schedule",
    "jdistgrad.wire.array_block",
    "jdistgrad.wire.arrays",
)
NOT_OWN = frozenset(f"jdistgrad.rpc.{name}" for name in ("functions.lookup", "functions.register"))

UNDERSCORED = ["_asdict", "_make", "_replace", "_unpickle"]  # public, or named in pickles, in spite of that

CODE = frozenset({"cloudpickle", "dill"})  # packages that make functions of code that is sent to them

# Special methods as harmless as the functions of ``operator``, which call them.
OPERATORS = frozenset(
    name for name, value in vars(operator).items() if name[:2] == "__" and type(value) is types.BuiltinFunctionType
) | {"__enter__", "__exit__", "__hash__", "__iter__", "__len__", "__next__", "__repr__", "__round__", "__str__"}


@functools.lru_cache(maxsize=4096)
def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names or f"{module}.".startswith("test.support.")


def refusal(module: str, name: str, *, written: bool) -> str | None:
    """Return why a message may not find what a module holds under a dotted name, or None if it may.

    Arguments:
      written: whether the module is the program's own.
    """
    package = module.partition(".")[0]
    if package in CODE or ".cloudpickle" in module:
        return "it makes functions of code that was sent"
    if package == "jdistgrad":
        return None if _travels(module, name) else "this part of jdistgrad is not for messages"
    if is_special(name.partition(".")[0]) and (written or not is_standard(module)):
        return "it belongs to Python's own machinery"
    if written or _is_harmless(SAME.get(module, module), name):
        return None
    if is_standard(module):
        return "of the standard library, messages find only data types and harmless functions"
    return f"of {package}, an installed package, messages find only what jdistgrad knows to be harmless"


def is_special(name: str) -> bool:
    return name[:2] == "__" and name[-2:] == "__"


def spelled(module: str, name: str) -> str:
    """Return a name for people: ``os.system``, although Python calls it ``posix.system``."""
    return f"{SAME.get(module, module)}.{name}"


def _travels(module: str, name: str) -> bool:
    listed = any(f"{module}.".startswith(f"{one}.") for one in OWN) and f"{module}.{name}" not in NOT_OWN
    return listed and not is_special(name.partition(".")[0])


def _is_harmless(module: str, name: str) -> bool:
    first, *parts = name.split(".")
    listed = first in NAMED.get(module, "").split()
    whole = module in WHOLE.split() and first[:1] != "_" and first not in REFUSED.get(module, "").split()
    return (listed or whole or is_known(module, first)) and _are_harmless(f"{module}.{first}", parts)


def _are_harmless(owner: str, parts: list[str]) -> bool:
    """Return whether attributes of a harmless class are harmless too: methods, and classes inside the class."""
    if owner in METHODS and parts and parts[0] not in OPERATORS:
        return parts[0] in METHODS[owner].split()
    if parts and parts[0] in REFUSED_METHODS.get(owner, "").split():
        return False
    return all(part in OPERATORS if is_special(part) else part[:1] != "_" or part in UNDERSCORED for part in parts)
