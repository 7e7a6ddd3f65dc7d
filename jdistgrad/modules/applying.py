"""Application of a module on the owner of its parameters: one compiled function for each module.

A module travels as a blueprint. flax modules hold functions that cannot be pickled (``kernel_init``'s default, for
example), so the arguments of their class travel instead. Blueprints can be compared and hashed, so each worker makes
the module of a blueprint only once.
"""

import collections
import functools
import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from jdistgrad.autograd.callee.functions import StateOfCall, changing_state, lost
from jdistgrad.autograd.callee.pullbacks import pays
from jdistgrad.autograd.values.holes import is_array
from jdistgrad.rpc.by_value import from_code
from jdistgrad.rpc.fingerprints import fingerprint
from jdistgrad.rpc.functions import Args, Kwargs, ServedFunction
from jdistgrad.rpc.rref import RRef

Made = tuple[Any, Any]  # parameters, and the module's other arrays, its state
Mode = tuple[Any, ...]


class Blueprint(NamedTuple):
    """A module's class and its arguments, by which other workers make it: a pickle, without functions and classes.

    A pickle has only the names of functions and classes, which may be defined again, so ``functions`` are compared as
    objects. A function that no name leads to is pickled by value there (``code_of``).
    """

    label: str
    pickled: bytes
    functions: tuple[Any, ...]

    def make(self) -> Any:
        unpickler = _Unpickler(io.BytesIO(self.pickled))
        unpickler.functions = self.functions
        return unpickler.load()


class _Unpickler(pickle.Unpickler):
    functions: tuple[Any, ...]

    def persistent_load(self, pid: Any) -> Any:
        found = self.functions[pid]
        return from_code(found) if isinstance(found, bytes) else found


class Apply(ServedFunction):
    """A module's application, as a function of its parameters. It travels as the blueprint of the module.

    Attributes:
      stateful: whether the module has other arrays, its state. A reference to it follows the parameters.
      mode: the method that sets a mode in flax ("train" or "eval") and its arguments; empty: the module's own mode.
    """

    pure = True
    has_modes = False

    def __init__(self, blueprint: Blueprint, *, stateful: bool, mode: Mode = ()):
        self.blueprint, self.stateful, self.mode = blueprint, stateful, mode
        self.state_argument = 1 if stateful else None
        self._compiled = functools.lru_cache(maxsize=64)(lambda *program: jax.jit(self._program(*program)))
        self._compiled_for: dict[Hashable, set[Hashable]] = collections.defaultdict(set)

    @property
    def label(self) -> str:
        return self.blueprint.label

    @functools.cached_property
    def made(self) -> Any:
        """The module of linen; of nnx, the function that makes it."""
        return self.blueprint.make()

    def init(self, rng: Any, args: Args) -> Made:
        """Return new parameters and the new state."""
        raise NotImplementedError

    def run(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Return the module's result, and the state after the call: the same leaves where nothing has changed."""
        raise NotImplementedError

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the module. A call that gets a reference to the state changes the state there."""
        if not self.stateful:
            return self._applied(parameters, None, args, kwargs)
        with changing_state(self, (parameters, *args)) as ((_, state, *rest), _):
            return self._applied(parameters, state, tuple(rest), kwargs)

    def _applied(self, parameters: Any, state: Any, args: Args, kwargs: Kwargs) -> Any:
        """Apply the module, compiled for each value of its static arguments: ``train=True``, ``method=f``.

        Static arguments that keep changing, such as the number of a step, are not compiled for.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        fixed = tuple(
            (fingerprint(leaf), leaf)
            if isinstance(leaf, Hashable) and not isinstance(leaf, float | complex) and not is_array(leaf)
            else None
            for leaf in leaves
        )
        arrays = [leaf for leaf, one in zip(leaves, fixed, strict=True) if one is None]
        value = state.value if isinstance(state, StateOfCall) else state
        seen = self._compiled_for[structure, tuple(one is None for one in fixed)]
        program = self._compiled if pays(seen, fixed) else self._program
        result, changed = program(structure, fixed)(parameters, {} if value is None else value, arrays)
        if changed:
            if not isinstance(state, StateOfCall):
                raise lost(self)
            before, tree = jax.tree.flatten(value)
            state.left = jax.tree.unflatten(tree, [changed.get(k, leaf) for k, leaf in enumerate(before)])
        return result

    def _program(self, structure: Any, fixed: Sequence[Any]) -> Callable[..., Any]:
        def run(parameters: Any, state: Any, arrays: list[Any]) -> tuple[Any, dict[int, Any]]:
            rest = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(rest) if one is None else one[1] for one in fixed])
            result, after = self.run(parameters, state, args, kwargs)
            known: Any
            found: Any
            (before, known), (now, found) = jax.tree.flatten(state), jax.tree.flatten(after)
            if known != found:
                raise ValueError(
                    f"{self.label} made other variables in this call than when it was initialized: {found}, expected "
                    f"{known}. Create all of them in the initialization, or return those that a call makes (sow)."
                )
            each = enumerate(zip(before, now, strict=True))
            return result, {k: jax.lax.stop_gradient(new) for k, (old, new) in each if new is not old}

        return run

    def __reduce__(self) -> Any:
        return apply_of, (type(self), self.blueprint, self.stateful, self.mode)


@functools.cache
def apply_of(kind: Any, blueprint: Any, stateful: bool, mode: Mode) -> Apply:  # noqa: FBT001 pickle passes it by position
    """Return the one application of a module in this process."""
    return kind(blueprint, stateful=stateful, mode=mode)


def make(apply: Apply, rng: Any, args: Args) -> tuple[RRef[Any], RRef[Any] | None]:
    """Make a module on its owner; return references to its parameters and, if there is any, to its state."""
    parameters, state = apply.init(rng, args)
    return RRef(parameters), RRef(state) if jax.tree.leaves(state) else None
