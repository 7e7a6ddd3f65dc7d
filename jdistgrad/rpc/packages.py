"""What a message may name of installed packages that are known: NumPy, JAX, optax, flax and a few others.

Functions of modules that compute, and types. Not what reads or writes files, compiles text, or changes settings of the
process; nor tests and examples that packages contain.
"""

from jdistgrad._compat import MODULES_THAT_COMPUTE, NAMES_IN_MESSAGES

# Modules whose functions compute, with those below them, unless marked by "=": many public names are defined in private
# modules. ``NAMED`` and ``REFUSED`` say more.
COMPUTING = (
    f"{MODULES_THAT_COMPUTE} "
    "=numpy numpy.char numpy.dtypes numpy.exceptions numpy.fft numpy.linalg numpy.ma numpy.polynomial numpy.random "
    "=numpy.rec numpy.strings ml_dtypes scipy.special =jax jax.dtypes jax.errors jax.flatten_util jax.image jax.lax "
    "jax.nn jax.numpy jax.ops jax.random jax.scipy jax.sharding jax.tree jax.tree_util optax flax.core flax.linen "
    "flax.nnx flax.struct flax.training.dynamic_scale flax.training.train_state flax.traverse_util =equinox "
    "equinox.nn equinox._ad equinox._eval_shape equinox._filters equinox._jit equinox._module equinox._tree "
    "equinox._update equinox._vmap_pmap"
)

# Names in other modules.
NAMED = {
    **NAMES_IN_MESSAGES,
    "flax.ids": "FlaxId",
    "flax.typing": "HashableMapping",
    "numpy._core._internal": "_convert_to_stringdtype_kwargs",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "scipy.sparse._coo": "coo_array coo_matrix",
    "scipy.sparse._csc": "csc_array csc_matrix",
    "scipy.sparse._csr": "csr_array csr_matrix",
}

# Names that are refused wherever they are: what reads and writes files, and settings of the process.
REFUSED = (
    "DataSource clear_backends clear_caches fromfile fromregex genfromtxt live_arrays load loadtxt memmap save savetxt "
    "savez savez_compressed seed set_bit_generator set_current_trace set_default_printstyle set_graph_mode set_mesh "
    "set_printoptions set_state setbufsize seterr seterrcall test tree_deserialise_leaves tree_serialise_leaves"
)

# Packages whose types may be named whatever their modules. Metaclasses, which make types of text, are none.
WITH_TYPES = "chex equinox flax jax jaxtyping optax"

INSIDE = "tests testing _examples _precompute test_util _mptestutils"  # of packages, which do not offer them


def is_known(module: str, first: str) -> bool:
    """Return whether a message may name what a module of a package holds under a name without dots."""
    if first in NAMED.get(module, "").split():
        return True
    return _computes(module) and first not in REFUSED.split() and not first.startswith("register")


def is_known_type(found: type) -> bool:
    """Return whether a message may name a type for what it is, whatever the module that defines it."""
    package = found.__module__.partition(".")[0]
    return package in WITH_TYPES.split() and found.__name__ not in REFUSED.split() and _is_offered(found.__module__)


def _computes(module: str) -> bool:
    listed = (module == one[1:] if one[0] == "=" else f"{module}.".startswith(f"{one}.") for one in COMPUTING.split())
    return any(listed) and _is_offered(module)


def _is_offered(module: str) -> bool:
    return not any(
        part in INSIDE.split() or part.startswith("test_") or part.endswith("_test") for part in module.split(".")
    )
