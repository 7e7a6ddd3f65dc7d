"""Stages of a pipeline, and their compiled forward and backward passes on a microbatch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.derivatives import Outputs, explained
from jdistgrad.autograd.values.holes import can_be_traced, is_differentiable, strong
from jdistgrad.collectives.descriptions import Enclosed, opened
from jdistgrad.data_parallel.segments import Segmented
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.current import once_for_all
from jdistgrad.rpc.fingerprints import fingerprint
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.wire.pinned import accelerated

SHARED = 64  # compiled forward passes kept after their stages are gone: some MiB each
BATCH = -1  # in a stage's inputs: the arguments of the step itself

Wanted = tuple[bool | tuple[bool, ...], ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: ``function(parameters, *inputs)`` returns the next stages' inputs, any pytree.

    Arguments:
      function: must be pure; it is compiled, once for each shape of its inputs. A ``RemoteFunction`` or
        ``RemoteModule`` brings its parameters.
      parameters: a reference to the parameters, or a tree of references (``[block, embedding]``), whose values the
        function gets, or None. The stage runs on the owner of the first reference; values of other owners are fetched
        in each step. The gradients of stages that share a reference add up: two stages may tie their embeddings.
      inputs: the earlier stages whose results the function takes, by number, in the order of its arguments; ``BATCH``
        stands for the arguments of the step. Default: the stage before, or for the first stage the step's arguments.
      remat: whether to rematerialize: a recording keeps only the inputs, and the backward pass runs the stage again.
      average: a reference to a ``DataParallel``, made by the stage's worker with those of the stage's replicas in other
        pipelines. Gradients are averaged as soon as they are complete, while other stages compute.

    Example:
      >>> Stage(block, block_ref, inputs=(0, 2))      # block(parameters, result of stage 0, result of stage 2)
    """

    function: Callable[..., Any]
    parameters: Any = None
    inputs: tuple[int, ...] | None = None
    remat: bool = False
    average: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting(Enclosed):
    """A function, a text or a flag among parameters: static in what is compiled, and compared by ``key``."""

    value: Any = dataclasses.field(compare=False)
    key: tuple[Any, ...]


def with_settings(parameters: Any) -> Any:
    """Replace each leaf that JAX cannot trace, or that is a flag, by a setting; see ``opened``."""

    def setting(leaf: Any) -> Any:
        if can_be_traced(leaf) and not isinstance(leaf, bool):
            return leaf
        # Equal values may be of different types. A partial equals no other, but is fetched as a new object in every
        # step: its fingerprint identifies it, if there is one.
        kind: Any = type(leaf)
        content = fingerprint(leaf)
        identifies = kind.__eq__ is object.__eq__ and isinstance(content, tuple) and len(content) > 2
        return Setting(leaf, content if identifies else (kind, leaf))

    return jax.tree.map(setting, parameters)


@dataclasses.dataclass(frozen=True)
class StageFunction(ServedFunction):
    """The function that JAX differentiates and compiles: a stage's, for the last stage with the loss.

    Compiled code is kept as long as this object. Equal functions with equal fingerprints share it, among the last 64.
    """

    function: Callable[..., Any]
    remat: bool = False
    loss: Callable[..., Any] | None = None
    _compiled: dict[Wanted, Callable[..., Any]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    pure = True

    def __reduce__(self) -> Any:
        return StageFunction, (self.function, self.remat, self.loss)

    def compiled(self, wanted: Wanted) -> Callable[..., tuple[list[Any], Enclosed]]:
        """Return the compiled forward pass, with its pullback if any gradients are wanted.

        It returns its new arrays, and a ``Known``.
        """
        found = self._compiled.get(wanted)
        if found is None:
            made_of = self.function, self.remat, self.loss
            found = self._compiled[wanted] = _forward(tuple((one, fingerprint(one)) for one in made_of), wanted)
        return found

    @property
    def label(self) -> str:
        return describe(self.function)

    def __call__(self, parameters: Any, inputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        if not self.remat:
            return self._result(parameters, inputs, targets)
        found = jax.checkpoint(self._result)(parameters, inputs, targets)
        return jax.tree.map(jnp.asarray, found)  # JAX returns a constant as a Python number

    def _result(self, parameters: Any, inputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        output = _in_arrays(self.function, self.function(opened(parameters), *inputs))
        if self.loss is None:
            return output
        found = _in_arrays(self.loss, self.loss(output, *targets))
        _check_loss(self.loss, found)
        return found


def _in_arrays(function: Callable[..., Any], result: Any) -> Any:
    def array(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return strong(leaf)
        if isinstance(leaf, int | float | complex):
            return jnp.asarray(leaf)
        where = f" at {jax.tree_util.keystr(path)}" if path else ""
        raise TypeError(f"{describe(function)} returned {leaf!r:.60}{where}: stages return arrays and numbers")

    return jax.tree_util.tree_map_with_path(array, result)


def _check_loss(loss: Callable[..., Any], found: Any) -> None:
    scalar = scalar_of(found)
    kind = getattr(scalar, "dtype", None)
    is_tuple = isinstance(found, tuple) and len(found) != 2
    if is_tuple or kind is None or np.shape(scalar) or not jnp.issubdtype(kind, np.floating):
        raise DifferentiationError(
            f"the loss {describe(loss)} returned {jax.tree.map(jax.typeof, found)}, expected a float scalar, or a pair "
            "of it and auxiliary data. Take the mean of the microbatch's losses."
        )


@dataclasses.dataclass(eq=False)
class Known:
    """A stage's traced forward pass, for all microbatches of the same shapes.

    Arguments:
      sources, tree: of the result and the pullback together, as in ``Outputs``.
      weights, inputs: how many float arrays the parameters, and each of the inputs, have.
    """

    sources: tuple[int, ...]
    tree: Any
    weights: int
    inputs: tuple[int, ...]
    _halves: Segmented | None = None

    def halves(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Segmented:
        """Return the pullback in two halves: of the inputs, then of the parameters. The arguments give its types."""
        if self._halves is None:

            def pull(*arguments: Any) -> Any:
                pullback = jax.tree.unflatten(self.tree.children()[1], arguments[: len(residuals)])
                return pullback(list(arguments[len(residuals) :]))[0]

            types = map(jax.typeof, (*residuals, *cotangents))  # a Python number may be a residual
            end = self.weights + sum(self.inputs)
            halves = [range(self.weights, end), range(self.weights)]
            self._halves = Segmented(jax.make_jaxpr(pull)(*types), halves)
        return self._halves


class StageRecording:
    """A stage's forward pass on one microbatch: its result, and both halves of its pullback.

    A whole backward pass runs the same two halves, so all schedules give the same bits.

    Arguments:
      parts: the parameters and the inputs.
      wanted: for each part, whether its float arrays have gradients; or the same for each of its leaves.
    """

    def __init__(self, function: StageFunction, parts: tuple[Any, ...], wanted: Wanted, targets: tuple[Any, ...]):
        with explained(function):
            made, enclosed = function.compiled(wanted)(parts, targets)
        self._known = known = enclosed.value
        found = [*jax.tree.leaves((parts, targets)), *made]  # NumPy arrays may stay: compiled code takes them
        result = known.tree.children()[0]
        leaves, count = [found[place] for place in known.sources], result.num_leaves
        self.result, self._residuals = jax.tree.unflatten(result, leaves[:count]), leaves[count:]
        self._values: dict[Any, Any] = {}

    def pull_inputs(self, cotangents: list[Any]) -> list[list[Any]]:
        """Return the cotangents of each input, given those of the result's float arrays, or of the loss."""
        known = self._known
        if not known.weights and not any(known.inputs):
            return [[] for _ in known.inputs]
        self._halves = known.halves(self._residuals, cotangents)
        self._values, self._residuals = self._halves.begin([*self._residuals, *cotangents]), []
        found = iter(self._halves.run(0, self._values) if any(known.inputs) else [])
        return [[next(found) for _ in range(count)] for count in known.inputs]

    def pull_parameters(self) -> list[Any]:
        """Return the gradients of the parameters; the cotangents have been given to ``pull_inputs``."""
        if not self._known.weights:
            return []
        return self._halves.run(1, self._values)


@functools.lru_cache(maxsize=SHARED)
def _forward(made_of: tuple[tuple[Any, Any], ...], wanted: Wanted) -> Callable[..., Any]:
    function = StageFunction(*(one for one, _ in made_of))  # not the stage's, which holds what is compiled

    def forward(parts: tuple[Any, ...], targets: tuple[Any, ...]) -> Any:
        # Weak types are lost between processes, and the placement must not change results.
        parts, targets = jax.tree.map(strong, (parts, targets))
        leaves, tree = jax.tree.flatten(parts)
        each = [
            one if isinstance(one, tuple) else [one and is_differentiable(leaf) for leaf in jax.tree.leaves(part)]
            for one, part in zip(wanted, parts, strict=True)
        ]
        floats, counts = [*itertools.chain(*each)], (sum(each[0]), tuple(map(sum, each[1:])))

        def primal(variables: list[Any]) -> tuple[list[Any], Any]:
            rest = iter(variables)
            parameters, *inputs = jax.tree.unflatten(
                tree, [next(rest) if chosen else leaf for chosen, leaf in zip(floats, leaves, strict=True)]
            )
            result = function(parameters, inputs, targets)
            primals = jax.tree.leaves(result if function.loss is None else scalar_of(result))
            return [leaf for leaf in primals if is_differentiable(leaf)], result

        variables = [leaf for chosen, leaf in zip(floats, leaves, strict=True) if chosen]
        pullback, result = None, None
        if any(wanted):
            _, pullback, result = jax.vjp(primal, variables, has_aux=True)
        else:
            _, result = primal(variables)
        outputs = Outputs.of((result, pullback), jax.tree.leaves((parts, targets)))
        return outputs.made, Enclosed(Known(outputs.sources, outputs.tree, *counts))

    return jax.jit(forward)


def scalar_of(found: Any) -> Any:
    """Return the scalar of what a loss function has returned: a scalar, or a pair of it and auxiliary data."""
    return found[0] if isinstance(found, tuple) and found else found


def _plus(total: list[Any], more: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(total, more, strict=True)]


plus, added = once_for_all(jax.jit(_plus)), once_for_all(jax.jit(_plus, donate_argnums=0))


class Sum:
    """The sum of a stage's gradients, in the order of the microbatches, in whatever order they come."""

    def __init__(self, microbatches: int):
        self.leaves: list[Any] = []
        self._early: dict[int, list[Any]] = {}
        self._next, self._microbatches = 0, microbatches

    def add(self, microbatch: int, gradients: list[Any]) -> bool:
        """Add the gradients of a microbatch; return whether the sum is complete."""
        self._early[microbatch] = gradients
        while self._next in self._early:
            more = self._early.pop(self._next)
            self.leaves = added(self.leaves, more) if self._next else more
            self._next += 1
        return self._next == self._microbatches

    def wait(self) -> None:
        """Block until the sum is computed; raise if that has failed.

        On CPUs errors raise at dispatch, and the sum is mostly ready: blocking would let other threads run.
        """
        for leaf in self.leaves:
            if accelerated() or not leaf.is_ready():
                leaf.block_until_ready()
