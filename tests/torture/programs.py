"""What a random program is: plain data, which workers send each other, and from which both runs are made."""

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
    "crowd": "all workers run the program at the same time",
    "parallel": "data-parallel steps, from Python and compiled",
    "orders": "data-parallel programs that run in another order on one rank",
}


@dataclasses.dataclass(frozen=True)
class Node:
    """One value, made of earlier ones.

    Attributes:
      how: a method of the interpreter: sync, eventually, fetched, handed, remote, own, kept, mapped, nested or
        fast_nested.
      function: which function of the palette.
      to: the worker; taken modulo the size of the world.
      arguments: which of the values so far; taken modulo their number.
      pack: the container that the arguments and the results lie in; none where empty.
      body: of a nested call, what the called function does itself; its last value is the result.
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
      shape: that of most of its arrays.
      weak: whether a half-precision array and a weakly typed number are among the arguments.
      held: the worker with a parameter of the program; none where it is None.
      used: which of the values the result depends on.
      order: how many times the function is differentiated.
      mode: eager, jd.jit or jax.jit.
      crowd: whether every worker runs it, or worker 0 only.
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
class Step:
    """One data-parallel step: what does it (a method of ``steps.Steps``), and with which parameters."""

    kind: str
    tree: str


@dataclasses.dataclass(frozen=True)
class ParallelProgram:
    """Steps that all ranks take, all but one rank in the same order.

    Attributes:
      order: which steps, one after the other.
      odd_rank: the rank with an order of its own; taken modulo the number of ranks. None where they agree.
      odd_order: that rank's steps.
      warm: whether every step was taken once by all ranks before.
    """

    seed: int
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    odd_rank: int | None
    odd_order: tuple[int, ...]
    warm: bool

    def order_of(self, rank: int, size: int) -> tuple[int, ...]:
        """The steps of a rank."""
        odd = self.odd_rank is not None and rank == self.odd_rank % size
        return self.odd_order if odd else self.order

    def agreed(self, size: int) -> bool:
        """Whether all ranks do the same."""
        return self.odd_rank is None or size == 1
