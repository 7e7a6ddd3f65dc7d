"""Data-parallel programs: steps of several kinds, and their expected results, computed from the data of all ranks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jdistgrad as jd
from torture import judging, palette
from torture.judging import MISMATCH, Problem
from torture.programs import ParallelProgram, Step

# Two trees have the same size: MPI would add them up without an error.
SHAPES = {"one": {"a": (2, 2)}, "two": {"b": (4,)}, "three": {"c": (3, 2), "s": ()}, "deep": {"w": (300, 300)}}


def parameters(tree: str) -> dict[str, Any]:
    return {name: palette.drawn(name.encode(), shape) for name, shape in SHAPES[tree].items()}


def numbers(program: ParallelProgram, tree: str, rank: int, position: int) -> dict[str, Any]:
    """Return a rank's data for the step at one position of the program."""
    seed = (program.seed, position + len(program.steps), rank)
    return {name: palette.drawn((*seed, *name.encode()), shape) for name, shape in SHAPES[tree].items()}


def loss(params: dict[str, Any], data: dict[str, Any]) -> Any:
    large = {name: palette.many if value.size > 100 else palette.mix for name, value in params.items()}
    return sum(jnp.mean(large[name](params[name], data[name]) ** 2) for name in params)


gradient = jax.jit(jax.grad(loss))


class Steps:
    """The steps of a program on one rank: each is a function of this rank's numbers."""

    def __init__(self, program: ParallelProgram, timeout: float):
        self._parallel = jd.DataParallel(timeout=timeout)
        self._functions = [getattr(self, step.kind)(step.tree) for step in program.steps]

    def take(self, k: int, own: dict[str, Any]) -> Any:
        return jax.block_until_ready(self._functions[k](own))

    def compiled(self, tree: str) -> Callable[..., Any]:
        return jax.jit(self.python(tree))

    def python(self, tree: str) -> Callable[..., Any]:
        step = self._parallel.value_and_grad(loss)
        return lambda own: step(parameters(tree), own)[1]

    def average(self, tree: str) -> Callable[..., Any]:
        return jax.jit(self._parallel.average)

    def sums(self, tree: str) -> Callable[..., Any]:
        return jax.jit(lambda own: jax.tree.map(self._parallel.collectives.allreduce, own))

    def optimizer(self, tree: str) -> Callable[..., Any]:
        return updates(optax.chain(jd.average_gradients(), optax.sgd(0.1)), tree)

    def sharded(self, tree: str) -> Callable[..., Any]:
        return updates(optax.chain(jd.average_gradients(), jd.shard_state(optax.adam(0.1))), tree)


def updates(optimizer: Any, tree: str) -> Callable[..., Any]:
    state = optimizer.init(parameters(tree))
    return jax.jit(lambda own: optimizer.update(gradient(parameters(tree), own), state)[0])


def expected(step: Step, everybody: list[dict[str, Any]]) -> Any:
    """Return the serial program's result, computed from the numbers of all ranks."""
    summed = jax.tree.map(lambda *parts: sum(parts), *everybody)
    gradients = [gradient(parameters(step.tree), own) for own in everybody]
    mean = jax.tree.map(lambda *parts: sum(parts) / len(parts), *gradients)
    if step.kind in ("sums", "average"):
        return summed if step.kind == "sums" else jax.tree.map(lambda leaf: leaf / len(everybody), summed)
    optimizer = {"optimizer": optax.sgd(0.1), "sharded": optax.adam(0.1)}.get(step.kind)
    return mean if optimizer is None else optimizer.update(mean, optimizer.init(mean))[0]


def run(program: ParallelProgram, rank: int, size: int, timeout: float) -> list[Problem]:
    """Take this rank's steps; return the problems. No number may be wrong; ranks that disagree must get an error."""
    steps, order, problems = Steps(program, timeout), program.order_of(rank, size), []
    places = [(-1 - k, k) for k in range(len(program.steps))] if program.warm else []
    try:
        for position, k in [*places, *enumerate(order)]:
            step = program.steps[k]
            found = steps.take(k, numbers(program, step.tree, rank, position))
            everybody = [numbers(program, step.tree, one, position) for one in range(size)]
            right = expected(step, everybody)
            off = judging.compare(found, right, exactly=False, least_bytes=jnp.result_type(float).itemsize)
            problems += [Problem(kind, f"step {position} ({step}): {text}") for kind, text in off]
    except Exception as error:
        return problems if told(program, error, size) else [*problems, judging.failure(error)]
    return [*problems, *untold(program, rank, size)]


def told(program: ParallelProgram, error: Exception, size: int) -> bool:
    """Return whether an error is expected: the ranks take different steps, and it names an error of the project."""
    return not program.agreed(size) and judging.names_an_error(judging.failure(error).text)


def untold(program: ParallelProgram, rank: int, size: int) -> list[Problem]:
    """Return a problem if an error is missing. A rank that only leaves out the last step may end without an error."""
    if program.agreed(size) or (program.order_of(rank, size) == program.order[:-1]):
        return []
    return [Problem(MISMATCH, "the ranks took different steps, and this one was told nothing")]
