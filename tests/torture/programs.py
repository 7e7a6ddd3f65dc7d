"""Random programs as plain data, which workers send each other. The serial and the remote run are made from it."""

import dataclasses

FEATURES = {
    "remote": "values that stay where they were made, and are passed on by reference",
    "held": "a parameter that lives on a worker, differentiated there",
    "jitted": "called functions that are jitted",
    "compiled": "the whole program inside jd.jit or jax.jit",
    "high": "derivatives of the second and third order",
    "odd_rules": "custom rules that are not the true derivative",
    "weak": "weakly typed numbers beside half precision",
    "keys": "typed random keys among arguments and results",
    "containers": "every class of pytrees, as arguments and results",
    "large": "arrays for which XLA uses its threads",
    "nested": "called functions that call other workers, jitted and plain",
    "vmap": "calls inside jax.vmap",
    "owners": "weight decay, norms, moving averages and masks over references, also as written for arrays",
    "crowd": "all workers run the program at the same time",
    "parallel": "data-parallel steps, from Python and compiled",
    "pipelines": "steps of pipelines: random stages, schedules, placements and batches",
    "orders": "data-parallel programs that run in another order on one rank",
}


@dataclasses.dataclass(frozen=True)
class Node:
    """A value of a program, made from earlier values.

    Attributes:
      how: a method of the interpreter: sync, eventually, fetched, handed, remote, own, kept, mapped, averaged, masked,
        normed, decayed, nested or fast_nested.
      function: the name of a function of the palette.
      to: the worker's rank; taken modulo the size of the world.
      arguments: the indices of earlier values; taken modulo their number.
      pack: the name of the container of the arguments and the results; empty if there is none.
      body: for a nested call, the nodes that the called function makes; the last value is the result.
    """

    how: str
    function: str
    to: int
    arguments: tuple[int, ...]
    pack: str = ""
    body: tuple["Node", ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays, and what to do with it.

    Attributes:
      shape: the shape of most of its arrays.
      weak: whether a half-precision array and a weakly typed number are among the arguments.
      held: the rank of the worker that holds the program's parameter; None if there is no parameter.
      used: the indices of the values that the result depends on; taken modulo their number.
      order: how many times the function is differentiated.
      mode: eager, jd.jit or jax.jit.
      crowd: whether every worker runs the program, or worker 0 only.
    """

    seed: int
    shape: tuple[int, ...]
    weak: bool
    held: int | None
    nodes: tuple[Node, ...]
    used: tuple[int, ...]
    order: int
    mode: str
    crowd: bool


@dataclasses.dataclass(frozen=True)
class PipelineProgram:
    """Steps of a pipeline, of which every stage combines its inputs and its parameters by a function of the palette.

    Attributes:
      shape: that of the batch.
      functions: of each stage, the name of the function.
      inputs: of each stage, the earlier stages whose results it takes; of the first stage none.
      shared: of each stage, the number of its parameters: stages may have the same.
      remat: of each stage, whether it is computed again in the backward pass.
      schedule: in PyTorch's notation. Its workers are those of the world in turn.
      steps: how many are taken in one context.
    """

    seed: int
    shape: tuple[int, ...]
    functions: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]
    remat: tuple[bool, ...]
    schedule: str
    steps: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A data-parallel step: its kind, a method of ``steps.Steps``, and its parameters, a name in ``steps.SHAPES``."""

    kind: str
    tree: str


@dataclasses.dataclass(frozen=True)
class ParallelProgram:
    """Steps that all ranks take; one rank may take them in another order.

    Attributes:
      order: the indices of the steps, in the order in which ranks take them.
      odd_rank: the rank with another order; taken modulo the number of ranks. None if all ranks agree.
      odd_order: the order of the odd rank.
      warm: whether all ranks take every step once before the program.
    """

    seed: int
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    odd_rank: int | None
    odd_order: tuple[int, ...]
    warm: bool

    def order_of(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the order of a rank's steps."""
        odd = self.odd_rank is not None and rank == self.odd_rank % size
        return self.odd_order if odd else self.order

    def agreed(self, size: int) -> bool:
        """Return whether all ranks take the same steps."""
        return self.odd_rank is None or size == 1


AnyProgram = Program | ParallelProgram | PipelineProgram
