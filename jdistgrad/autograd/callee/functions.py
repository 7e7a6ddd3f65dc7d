"""Functions derived from functions, run by the callee: pullbacks, batched functions, shapes. And functions with state.

Each of them can itself be called, recorded and differentiated, which gives derivatives of any order.
"""

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax

from jdistgrad._compat import MODULES_OF_FUNCTIONS, static_arguments, weakly_typed
from jdistgrad.autograd.callee.derivatives import Orders, differentiated, explained, named_among, pulled, transposed
from jdistgrad.autograd.tape.tape import current_tape, replaying
from jdistgrad.autograd.values.holes import (
    Hole,
    Layout,
    ReferenceHole,
    has_gradient,
    is_array,
    is_differentiable,
    split,
)
from jdistgrad.errors import DifferentiationError
from jdistgrad.leaves import LeafSpec, as_jax_array, check_kept, is_key, plain as plain_data
from jdistgrad.rpc import trees
from jdistgrad.rpc.codec import hides_traced
from jdistgrad.rpc.fingerprints import equals_only_alike
from jdistgrad.rpc.functions import JITTED, Args, ServedFunction, describe
from jdistgrad.rpc.futures import answer_of
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.server import with_values
from jdistgrad.rpc.traced_hook import is_traced
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import from_token

# What jax.jit does with an argument: takes it as a part of the program (static); traces it; or never sees it.
STATIC, TRACED, OTHER = "static", "traced", "other"
SEEN_THROUGH = Hole | ReferenceHole | str | bytes | int | float | complex | None


@dataclasses.dataclass(frozen=True)
class MadeOf(ServedFunction):
    """A function made of another one. ``title``: its label, with the other one's in place of the braces."""

    function: Any
    title: ClassVar[str] = "{}"

    @property
    def label(self) -> str:
        return self.title.format(describe(self.function))


@dataclasses.dataclass(frozen=True)
class Around(MadeOf):
    """A function around another one, which it calls with its own arguments."""

    @property
    def same_arguments_as(self) -> Any:
        return self.function


def is_pure(function: Any) -> bool:
    """Return whether a function is pure by contract: jitted, JAX's own, declared ``pure``, or made of a pure one."""
    function = made_of(function)
    if isinstance(function, ServedFunction) and function.pure:
        return True
    return isinstance(function, JITTED) or _is_jaxs_own(function)


def _is_jaxs_own(function: Any) -> bool:
    """Return whether a function is JAX's own: ``functools.wraps`` gives the module of one to what others make of it."""
    if not str(getattr(function, "__module__", "")).startswith(MODULES_OF_FUNCTIONS):
        return False
    while function is not None:
        kind = type(function)
        made_in = str(function.__globals__.get("__name__") if kind is types.FunctionType else kind.__module__)
        if made_in.partition(".")[0] not in ("jax", "jaxlib"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def made_of(function: Any) -> Any:
    """Return the function that derivatives, batched functions and the like are made of; or the function itself."""
    while isinstance(function, MADE_OF_ANOTHER):
        function = function.function
    return function


def handled_by_jit(function: Any, args: Any, kwargs: Any) -> list[str]:
    """Return what ``jax.jit`` does with each leaf of the arguments, if the function is jitted or made of such a one."""
    jitted = made_of(function)
    if not isinstance(jitted, JITTED):
        return [OTHER] * len(jax.tree.leaves((args, kwargs)))
    if function is jitted and not any(static_arguments(function)):  # mostly; there may be thousands of leaves
        return [TRACED] * len(jax.tree.leaves((args, kwargs)))
    found: list[str] = jax.tree.leaves(_handled(function, args, kwargs))
    return found


def _handled(function: Any, args: Any, kwargs: Any) -> Any:
    """Return a tree like the arguments. Of a derived function, those of the function it is derived from count."""
    if isinstance(function, PullbackOf | PushforwardOf):
        first = 2 if isinstance(function, PullbackOf) else 1
        inner = _handled(function.function, *args[first : first + 2])
        return (*_flagged(args[:first], OTHER), *inner, *_flagged(args[first + 2 :], OTHER)), {}
    if isinstance(function, ServedFunction):
        return _handled(function.same_arguments_as, args, kwargs)
    numbers, names = static_arguments(function)
    by_number = ({k, k - len(args)} & {*numbers} for k in range(len(args)))
    found = tuple(_flagged(arg, STATIC if given else TRACED) for arg, given in zip(args, by_number, strict=True))
    return found, {name: _flagged(arg, STATIC if name in names else TRACED) for name, arg in kwargs.items()}


def _flagged(tree: Any, how: str) -> Any:
    return jax.tree.map(lambda _: how, tree)


def numbered(tree: Any, positions: Iterable[int]) -> tuple[Layout, list[Any]]:
    """Split a tree, with holes at the leaves with these numbers; of a reference, the handle is the operand."""
    chosen, numbers = set(positions), iter(range(1 << 30))
    return split(tree, lambda leaf: next(numbers) in chosen)


def differentiable_arrays(result: Any) -> list[Any]:
    """Return the arrays of a result that have derivatives, in order; handles of references too."""
    arrays = [result] if isinstance(result, jax.Array) else split(result, is_array)[1]
    return list(filter(is_differentiable, arrays))


@dataclasses.dataclass(frozen=True)
class PullbackOf(MadeOf):
    """The pullback of the outermost derivative of a function.

    ``orders``: for each derivative, the leaves of the arguments it is taken of, by number. ``live``: the numbers of the
    results with a cotangent, among the results that have derivatives.
    """

    orders: Orders
    live: tuple[int, ...]
    title = "the pullback of {}"

    def __call__(self, tag: Any, number: Any, args: Any, kwargs: Any, *cotangents: Any) -> list[Any]:
        _, pullback = pulled_back(tag, self.function, self.orders, self.live, args, kwargs)
        with replaying(number):
            return pulled(pullback, cotangents)


@dataclasses.dataclass(frozen=True)
class PushforwardOf(MadeOf):
    """The derivative along tangents, for the outermost derivative of a function: the transpose of its pullback.

    ``orders``: as for ``PullbackOf``.
    """

    orders: Orders
    title = "the tangents of {}"

    def __call__(self, tag: Any, args: Any, kwargs: Any, *tangents: Any) -> list[Any]:
        results, pullback = pulled_back(tag, self.function, self.orders, None, args, kwargs)
        return transposed(pullback, tangents, [(one.shape, one.dtype) for one in results])


def pulled_back(
    tag: Any, function: Any, orders: Orders, live: Sequence[int] | None, args: Any, kwargs: Any
) -> tuple[list[Any], Any]:
    """Return the live results (``live`` None: all with derivatives), and the pullback of the outermost derivative.

    ``tag``: of the recorded call that is run again.
    """
    args = with_state_of(tag, function, args)
    layout, operands = numbered((args, kwargs), {leaf for order in orders for leaf in order})

    def primal(*variables: Any) -> tuple[list[Any], None]:
        args, kwargs = with_values(layout.fill(variables), RRef.to_here)
        result = answer_of(function(*args, **kwargs))
        results = differentiable_arrays(result)
        _refuse_new_references(result, (args, kwargs), function)
        return results if live is None else [results[k] for k in live], None

    results, pullbacks, _ = differentiated(primal, operands, named_among(layout.positions, orders))
    return results, pullbacks[-1]


def _refuse_new_references(result: Any, given: Any, function: Any) -> None:
    """Refuse a reference that a function has made in a run that is not the call itself: it would have no holder.

    The caller's contributions go to the reference that the call has made.
    """
    known = {leaf.id for leaf in trees.leaves(given) if isinstance(leaf, RRef)}
    if any(isinstance(leaf, RRef) and is_traced(leaf) and leaf.id not in known for leaf in trees.leaves(result)):
        raise DifferentiationError(
            f"{describe(function)} returns a new reference in each run, but has to run again: for a second derivative, "
            "or for the shapes of its results inside jax.jit and jd.jit. Return the value, and let the caller keep it "
            "there: jd.on(worker, f).keep(...)."
        )


@dataclasses.dataclass(frozen=True)
class BatchedOf(Around):
    """A function over a batch. ``batched``: the paths of the leaves whose first dimension is the batch.

    Leaves are given by path: references arrive as their values, so the caller's numbers of leaves do not hold here.
    """

    batched: tuple[tuple[int, ...], ...]
    size: int

    @property
    def label(self) -> str:
        return f"{describe(self.function)} in a batch of {self.size}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = with_state(self.function, args)
        positions = [number for number, path in enumerate(trees.paths((args, kwargs))) if path in self.batched]
        layout, operands = numbered((args, kwargs), positions)
        found: list[Layout] = []

        def each(*operands: Any) -> list[Any]:
            args, kwargs = layout.fill(operands)
            results, arrays = split(answer_of(self.function(*args, **kwargs)), is_array)
            found.append(results)
            return arrays

        with explained(self.function):
            arrays = jax.vmap(each, axis_size=self.size)(*operands)
        state = state_among(self.function, args)
        if state is not None and state.left is not None:
            raise DifferentiationError(
                f"{describe(self.function)} changes its state (batch statistics, random generators), which jax.vmap "
                "cannot do for each element of a batch. Call the module on the whole batch, or call it in eval mode."
            )
        return found[0].fill(arrays)


# Arrays whose type is more than a dtype: weakly typed ones, which JAX treats as Python numbers, and random keys. Host
# callbacks of compiled code get plain arrays, of NumPy. So traced arguments are sent as plain arrays, and the callee
# restores their types before it calls the function: a function that runs as written gets the arrays of JAX for which it
# is written. Operators of NumPy's arrays give other dtypes, and change arrays in place.

WEAK, ARRAY = "weak", "array"

# By the paths of leaves: WEAK, ARRAY for other arrays of JAX, or the implementation of a random key.
Types = tuple[tuple[tuple[int, ...], str], ...]


@dataclasses.dataclass(frozen=True)
class Typed(Around):
    """A function called with plain arrays; it restores their original types first."""

    types: Types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        types, paths = dict(self.types), trees.paths((args, kwargs))

        def restore(leaf: Any) -> Any:
            kind = types.get(next(paths))
            if kind is None:
                return leaf
            if kind in (WEAK, ARRAY):
                return weakly_typed(leaf) if kind == WEAK else as_jax_array(leaf)
            return jax.random.wrap_key_data(leaf, impl=kind)

        args, kwargs = trees.map_leaves(restore, (args, kwargs))
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return typed, (self.function, self.types)


# Those in use, by compiled code for example. A function may hold a batch, so this table must not keep it alive.
_known: "weakref.WeakValueDictionary[tuple[Any, Types], Typed]" = weakref.WeakValueDictionary()


def typed(function: Any, types: Types) -> Typed:
    """Return the same Typed for the same function and types: JAX caches compiled code by the function."""
    called, made = function, Typed(function, types)
    while isinstance(called, ServedFunction) and hasattr(called, "function"):
        called = called.function
    try:
        return _known.setdefault((function, types), made) if equals_only_alike(called) else made
    except TypeError:  # a function that cannot be hashed
        return made


def plain(function: Any, args: Any, kwargs: Any, *, arrays: bool) -> tuple[Any, Any, Any]:
    """Turn the arguments of a traced call into plain arrays, and its function into one that restores their types.

    Arguments:
      arrays: whether the function needs arrays of JAX. Compiled ones make them faster themselves.
    """
    types, paths = list[tuple[tuple[int, ...], Any]](), trees.paths((args, kwargs))

    def change(leaf: Any) -> Any:
        path, traced = next(paths), isinstance(leaf, jax.core.Tracer)
        if is_key(leaf):
            types.append((path, LeafSpec.of(leaf).impl))
            return plain_data(leaf)
        if traced and getattr(leaf, "weak_type", False):
            types.append((path, WEAK))
        elif traced and arrays:
            types.append((path, ARRAY))
        return leaf

    args, kwargs = trees.map_leaves(change, (args, kwargs))
    return typed(function, tuple(types)) if types else function, args, kwargs


# What has the derivatives of another function, or calls it in another way.
MADE_OF_ANOTHER = PullbackOf | PushforwardOf | BatchedOf | Typed


@dataclasses.dataclass(frozen=True)
class ShapesOf(MadeOf):
    """A function that traces another where it would run, for the layout and shapes of its results.

    It takes references as such.
    """

    takes_references = True
    title = "{} (traced for the shapes of its results)"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Layout, list[jax.ShapeDtypeStruct]]:
        layout, operands = split((args, kwargs), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        found: list[Layout] = []
        for one in operands:
            check_kept(one.dtype, jax.dtypes.canonicalize_dtype(one.dtype))

        def trace(*operands: Any) -> list[Any]:
            args, kwargs = with_values(layout.fill(operands), RRef.to_here)
            args = with_state(self.function, args)
            result = answer_of(self.function(*args, **kwargs))
            _refuse_new_references(result, (args, kwargs), self.function)
            results, arrays = split(result, is_array)
            found.append(nothing_hidden(results, self.function))
            return arrays

        with explained(self.function):
            shapes = jax.eval_shape(trace, *operands)
        return found[0], list(shapes)


def nothing_hidden(results: Layout, function: Any) -> Layout:
    """Return the results. Raises DifferentiationError if they hide a traced array from JAX."""
    for leaf in trees.leaves(results.tree):
        if not isinstance(leaf, SEEN_THROUGH) and hides_traced(leaf):
            raise DifferentiationError(
                f"{describe(function)} returned a {type(leaf).__name__} with an array inside, which has no derivative: "
                "the object is no pytree. Return a pytree; jax.tree_util.register_dataclass registers your class as "
                "one."
            )
    return results


def own_parts(value: Any) -> list[bool]:
    """Return which parts of a value's gradient belong to its float arrays, and not to references that it holds."""
    layout, _ = split(value, has_gradient)
    return [isinstance(hole, Hole) for hole in layout.holes()]


# State that a function changes where it runs: batch statistics, counters of random generators. State is a value that
# its owner keeps under a reference, which is an argument of the function. JAX may trace the function, more than once
# even. So a traced run gets the state in a StateOfCall and leaves the new state there. The new state is stored when the
# call has run.


@dataclasses.dataclass(slots=True, eq=False)
class StateOfCall:
    """The state that a call starts from, and the state that the call leaves (None: the same)."""

    value: Any
    left: Any = None


jax.tree_util.register_pytree_node(StateOfCall, lambda one: ((one.value,), None), lambda _, of: StateOfCall(*of))
trees.OPAQUE.add(StateOfCall)  # the object that the function gets is the one that is read afterwards


def state_argument(function: Any) -> int | None:
    """Return the number of the argument that refers to state which a function changes, or None."""
    while isinstance(function, ServedFunction) and function.same_arguments_as is not None:
        function = function.same_arguments_as
    return function.state_argument if isinstance(function, ServedFunction) else None


def state_among(function: Any, args: Args) -> StateOfCall | None:
    """Return the state that a function which runs in a trace has been given."""
    number = state_argument(function)
    return args[number] if number is not None and isinstance(args[number], StateOfCall) else None


def with_state(function: Any, args: Args) -> Args:
    """Return the arguments with the current state, for a run that stores nothing."""
    reference = _reference(function, args)
    return args if reference is None else _replaced(function, args, StateOfCall(reference.to_here()))


def with_state_of(tag: Any, function: Any, args: Args) -> Args:
    """Return the arguments with the state that a recorded call started from, to run the call again."""
    if _reference(function, args) is None or isinstance(tag, jax.core.Tracer):
        return with_state(function, args)
    recording = current_tape(lambda: describe(function)).find(from_token(tag)[1], last=False).derived
    return _replaced(function, args, StateOfCall(recording.state))


@contextlib.contextmanager
def changing_state(function: Any, args: Args) -> Iterator[tuple[Args, StateOfCall | None]]:
    """Give a block the arguments with the current state, and store the state that the block leaves there.

    Calls that change one state take turns. If the block raises an exception, nothing is stored.
    """
    reference = _reference(function, args)
    if reference is None:
        yield args, None
        return
    owned = current_worker().references.owned
    with owned.lock(reference.id):
        state = StateOfCall(reference.to_here())
        yield _replaced(function, args, state), state
        if state.left is not None:
            if not reference.is_owner():
                raise lost(function)
            owned.replace(reference.id, state.left)


def lost(function: Any) -> TypeError:
    """Return the error for a call that changes state which is not on the worker that it runs on."""
    return TypeError(
        f"{describe(function)} changes state (batch statistics, random generators) which lives on another worker, so "
        "the change would be lost. Call the module itself, which runs where its state is, or call it in eval mode."
    )


def _reference(function: Any, args: Args) -> RRef[Any] | None:
    number = state_argument(function)
    argument = None if number is None else args[number]
    while isinstance(argument, ByReference):
        argument = argument.rref
    return argument if isinstance(argument, RRef) else None


def _replaced(function: Any, args: Args, state: StateOfCall) -> Args:
    number = state_argument(function)
    assert number is not None
    return *args[:number], state, *args[number + 1 :]
