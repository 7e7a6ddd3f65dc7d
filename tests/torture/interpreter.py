"""The interpreter of programs. ``Serial`` makes every node in this process, ``Remote`` by calls to other workers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdistgrad as jd
from torture import containers, palette
from torture.programs import Node, Program


class Serial:
    """The serial interpreter: a call is a local call, and a reference is its value."""

    def local(self, value: Any) -> Any:
        return value

    def sync(self, node: Node, given: Sequence[Any]) -> Any:
        function, arguments = target(node, given)
        return palette.finish(function(*arguments))

    eventually = fetched = handed = remote = kept = sync

    def own(self, node: Node, given: Sequence[Any]) -> Any:
        return given[0]

    def averaged(self, node: Node, given: Sequence[Any]) -> Any:
        return jd.tree_map(palette.averaged, {"value": given[0]}, {"value": given[1]})["value"]

    def masked(self, node: Node, given: Sequence[Any]) -> Any:
        return jd.tree_map(palette.masked, [given[0]], [given[1]])[0]

    def normed(self, node: Node, given: Sequence[Any]) -> Any:
        """Scale by a norm over several owners, each of which returns a number."""
        total = sum(jax.tree.leaves(jd.get(jd.tree_map(palette.squared, list(given)))))
        return self.local(given[0]) * jnp.tanh(total)

    def decayed(self, node: Node, given: Sequence[Any]) -> Any:
        """Write weight decay as for arrays; where that is refused, with a copy of the value."""
        try:
            total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(given[0]))
        except TypeError:
            total = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jd.get(given[0])))
        return self.local(given[1]) * jnp.tanh(total)

    def mapped(self, node: Node, given: Sequence[Any]) -> Any:
        rows = jnp.broadcast_arrays(*map(self.local, given))
        return (jax.vmap if rows[0].ndim else lambda f: f)(lambda *rows: self.sync(node, rows))(*rows)

    def nested(self, node: Node, given: Sequence[Any]) -> Any:
        return run(node.body, given, self)[-1]

    fast_nested = nested


class Remote(Serial):
    """The interpreter that calls other workers. Values are arrays or references to arrays."""

    def local(self, value: Any) -> Any:
        return value.to_here() if isinstance(value, jd.RRef) else value

    def sync(self, node: Node, given: Sequence[Any]) -> Any:
        return palette.finish(jd.rpc_sync(worker(node.to), *target(node, given)))

    def eventually(self, node: Node, given: Sequence[Any]) -> Any:
        return palette.finish(jd.rpc_async(worker(node.to), *target(node, given)).result())

    def remote(self, node: Node, given: Sequence[Any]) -> Any:
        return jd.remote(worker(node.to), *target(node, given))

    def fetched(self, node: Node, given: Sequence[Any]) -> Any:
        return palette.finish(self.remote(node, given).to_here())

    def handed(self, node: Node, given: Sequence[Any]) -> Any:
        """Pass the result from its owner to another worker, which finishes it."""
        return jd.rpc_sync(worker(node.to + 1), palette.finish, args=(self.remote(node, given),))

    def own(self, node: Node, given: Sequence[Any]) -> Any:
        return given[0] if isinstance(given[0], jd.RRef) else jd.RRef(given[0])

    def kept(self, node: Node, given: Sequence[Any]) -> Any:
        """Pass references as references; the function on the worker fetches them."""
        return jd.rpc_sync(worker(node.to), opened, args=(node, *by_reference(given)))

    def nested(self, node: Node, given: Sequence[Any]) -> Any:
        return jd.rpc_sync(worker(node.to), perform, args=(node.body, *by_reference(given)))

    def fast_nested(self, node: Node, given: Sequence[Any]) -> Any:
        return jd.rpc_sync(worker(node.to), fast_perform, args=(node.body, *given))


def worker(to: int) -> int:
    return to % jd.world_size()


def by_reference(given: Sequence[Any]) -> list[Any]:
    return [jd.by_reference(value) if isinstance(value, jd.RRef) else value for value in given]


def target(node: Node, given: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that a node calls, and the arguments."""
    if node.pack:
        given = (containers.MAKERS[node.pack](*given),)
    if "noisy" in node.function:
        given = (*given, jax.random.key(node.to))
    return palette.function(node.function), tuple(given)


def run(nodes: Sequence[Node], values: Sequence[Any], calls: Serial) -> list[Any]:
    """Run nodes; return the given values and those of all nodes."""
    values = list(values)
    for node in nodes:
        given = [values[k % len(values)] for k in node.arguments]
        values.append(getattr(calls, node.how)(node, given))
    return values


def opened(node: Node, *given: Any) -> Any:
    """Fetch references and run a node's function on their values: the task of ``kept`` on its worker."""
    return Serial().sync(node, [Remote().local(value) for value in given])


def perform(body: tuple[Node, ...], *given: Any) -> Any:
    """Run the body of a nested call on its worker."""
    calls = Remote()
    return calls.local(run(body, given, calls)[-1])


fast_perform = jax.jit(perform, static_argnums=0)


# A whole program: its arguments, the scalar that is differentiated, and the derivative.


def arguments(program: Program, round_: int) -> tuple[Any, ...]:
    """Return the program's arguments, with other numbers in each round."""
    seed = (program.seed, round_)
    found = [palette.drawn((*seed, k), shape) for k, shape in enumerate((program.shape, program.shape, ()))]
    if program.weak:
        found += [palette.drawn((*seed, 3), program.shape, jnp.float16), jnp.asarray(0.5 + 0.25 * round_)]
    return tuple(found)


def parameter(program: Program, calls: Serial) -> tuple[Any, ...]:
    """Return a tuple of the parameter that a worker holds, or an empty one if the program has no parameter."""
    if program.held is None:
        return ()
    seed = (program.seed,)
    if isinstance(calls, Remote):
        return (jd.remote(worker(program.held), palette.drawn, args=(seed, program.shape)),)
    return (palette.drawn(seed, program.shape),)


def chosen(program: Program, calls: Serial, given: Sequence[Any]) -> list[Any]:
    """Run the program; return the values that its result depends on, fetched."""
    values = run(program.nodes, given, calls)
    picked = sorted({k % len(values) for k in program.used} | {len(values) - 1})
    return [calls.local(values[k]) for k in picked]


def loss(program: Program, calls: Serial) -> Callable[..., Any]:
    """Return a scalar function that weighs no two elements alike; it is not linear: higher derivatives need values."""

    def of(given: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        values = [value.astype(given[0].dtype) for value in chosen(program, calls, (*given, *held))]
        return sum((k + 1) * jnp.sum((x + x * x / 2) * weights(x.shape)) for k, x in enumerate(values))

    return of


def weights(shape: tuple[int, ...]) -> Any:
    size = math.prod(shape)
    return ((jnp.cos(jnp.arange(size) + 1.0) + 2) / size).reshape(shape)


def raised(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scalar function of a gradient; its derivative is of the next order."""

    def of(given: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        return sum(
            jnp.sum(jnp.sin(one.astype(given[0].dtype) * one.size) * weights(one.shape))
            for one in gradient(given, held)
        )

    return of


def derivative(program: Program, calls: Serial) -> Callable[..., Any]:
    """Return the function that the program computes."""
    if program.order == 0:
        return lambda given, held: chosen(program, calls, (*given, *held))
    function = loss(program, calls)
    for _ in range(program.order - 1):
        function = raised(jax.grad(function))
    if differentiates_held(program):
        transformed = jd.value_and_grad if isinstance(calls, Remote) else jax.value_and_grad
        return transformed(function, argnums=(0, 1))
    return jax.value_and_grad(function)


def differentiates_held(program: Program) -> bool:
    """Return whether the program takes the parameter's gradient: of first order, it stays with the parameter."""
    return program.order == 1 and program.held is not None and program.mode != "jax.jit"
