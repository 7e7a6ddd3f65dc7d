"""The check of one random program: worker 0 or all workers run it, and its results must be the serial ones."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from torture import interpreter, judging, pipelines, steps
from torture.judging import CRASH, Problem
from torture.programs import AnyProgram, Node, ParallelProgram, PipelineProgram, Program

MODES: dict[str, Callable[..., Any]] = {"eager": lambda f: f, "jd.jit": jd.jit, "jax.jit": jax.jit}


def check(program: AnyProgram, timeout: float) -> list[Problem]:
    """Run a program as one worker of a new world, and return the problems. Every worker calls this function.

    Arguments:
      timeout: seconds for each call and each collective. The shutdown has no timeout: other workers wait in it.
    """
    me = jd.init(timeout=timeout)
    told, problems = may_fail(program), []
    try:
        problems += on_worker(program, me.rank, timeout)
        jd.shutdown()
    except Exception as error:
        problems += [] if told and not problems else [judging.failure(error)]
        leave()
    return problems


def may_fail(program: AnyProgram) -> bool:
    """Return whether the world may fail to shut down, because its ranks take different steps."""
    return isinstance(program, ParallelProgram) and not program.agreed(jd.world_size())


def leave() -> None:
    """Let the others go on without this worker."""
    try:
        jd.shutdown(graceful=False)
    except jd.DistgradError:
        return


def on_worker(program: AnyProgram, rank: int, timeout: float) -> list[Problem]:
    if isinstance(program, ParallelProgram):
        return steps.run(program, rank, jd.world_size(), timeout)
    if isinstance(program, PipelineProgram):
        return pipelines.run(program) if rank == 0 else []
    return compare_rounds(program) if program.crowd or rank == 0 else []


def compare_rounds(program: Program) -> list[Problem]:
    """Compare each round of a program. Compiled programs run twice: the second time nothing is traced."""
    try:
        remotely = MODES[program.mode](interpreter.derivative(program, interpreter.Remote()))
        serially = interpreter.derivative(program, interpreter.Serial())
        problems = [
            p for k in range(1 if program.mode == "eager" else 2) for p in compare(program, k, remotely, serially)
        ]
    except Exception as error:
        return [judging.failure(error)]
    scopes = [] if program.crowd else current_worker().scopes.identifiers()
    return problems + ([Problem(CRASH, f"contexts left open: {scopes}")] if scopes else [])


def compare(program: Program, round_: int, remotely: Callable[..., Any], serially: Callable[..., Any]) -> list[Problem]:
    given = interpreter.arguments(program, round_)
    expected = serially(given, interpreter.parameter(program, interpreter.Serial()))
    with jd.context():
        found = remotely(given, interpreter.parameter(program, interpreter.Remote()))
        found = jax.block_until_ready(fetched(found))
    exactly = program.order == 0 and program.mode == "eager" and not compiled(program.nodes)
    least = 2 if program.weak else jnp.result_type(float).itemsize

    def moved() -> Any:
        return serially(judging.a_little_off(given), interpreter.parameter(program, interpreter.Serial()))

    return judging.compare(found, expected, exactly=exactly, least_bytes=least, moved=moved)


def compiled(nodes: Sequence[Node]) -> bool:
    """Return whether a node compiles what the serial program runs one operation at a time: XLA fuses ``a * b + c``."""
    return any(node.how == "fast_nested" or compiled(node.body) for node in nodes)


def fetched(tree: Any) -> Any:
    """Fetch the gradients in a tree that are on other workers."""
    remote = lambda leaf: isinstance(leaf, jd.RemoteGradient)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.to_here() if remote(leaf) else leaf, tree, is_leaf=remote)
