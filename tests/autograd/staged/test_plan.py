"""The plan of a staged step, without a transport: the operations have only a name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.staged.equations import has_wire
from jdistgrad.autograd.staged.plan import cut
from jdistgrad.autograd.values.primitive import Operation, wire_p

X = np.ones(3, np.float32)


@dataclasses.dataclass(eq=False)
class Doubling(Operation):
    name: str

    def shapes(self, operands):
        return list(operands)

    def needed(self, operands):
        return operands

    def __str__(self):
        return self.name


def send(name, *operands):
    return wire_p.bind(*operands, operation=Doubling(name))[0]


def plan_of(fun, *args):
    return cut(jax.make_jaxpr(fun)(*args))


def names(plan):
    """Return the names of the units, without the pieces that only copy answers to the step's outputs."""
    return [str(unit.operation) if unit.operation else "piece" for unit in plan.units if not copies(unit)]


def copies(unit):
    return not unit.operation and {equation.eqn.primitive.name for equation in unit.equations} == {"copy"}


def test_a_step_without_messages_is_one_piece():
    assert names(plan_of(lambda x: jnp.sin(x) * 2 + x, 1.0)) == ["piece"]


def test_pieces_stand_between_messages():
    plan = plan_of(lambda x: jnp.sin(send("a", jnp.cos(x))) + 1, 1.0)
    assert names(plan) == ["piece", "a", "piece"]


def test_what_a_message_needs_is_computed_before_the_rest():
    def step(x):
        rest = jnp.tanh(jnp.exp(x))
        return send("a", x * 2) + rest

    plan = plan_of(step, 1.0)
    assert names(plan)[:2] == ["piece", "a"]
    assert [equation.eqn.primitive.name for equation in plan.units[0].equations] == ["mul"]


def test_messages_inside_jitted_functions_are_found():
    inner = jax.jit(lambda x: send("a", x) + 1)
    closed = jax.make_jaxpr(lambda x: inner(x) * 2)(1.0)
    assert has_wire(closed.jaxpr)
    assert "a" in names(cut(closed))


def test_what_can_be_computed_meanwhile_does_not_wait():
    # The product is of constants alone, but it is used together with an answer.
    matrix = np.ones((3, 3), np.float32)

    def step(x):
        return send("a", x) + (jnp.asarray(matrix) @ jnp.asarray(matrix))[0]

    pieces = [unit for unit in plan_of(step, matrix[0]).units if unit.operation is None]
    assert any(not unit.inputs for unit in pieces)


def operands(plan):
    """Return the numbers of the step's inputs that the first message gets."""
    unit = next(unit for unit in plan.units if unit.operation)
    return [plan.inputs.index(atom) for atom in unit.inputs if isinstance(atom, int) and atom in plan.inputs]


def test_nothing_is_multiplied_by_one_before_a_message():
    plan = plan_of(lambda x: send("a", x * jnp.ones(3)), X)
    assert (names(plan), operands(plan)) == (["a"], [0])


def test_what_is_returned_is_no_input():
    # A product with one that the step returns is computed: a caller that donates the result must not lose an input.

    def step(x):
        ones = jnp.ones(3)
        return x * ones, x * ones, send("a", x * ones)

    plan = plan_of(step, X)
    assert operands(plan) == [0]
    assert not set(plan.inputs).intersection(plan.outputs)
    assert len(set(plan.outputs)) == 3


def test_small_answers_that_the_step_returns_are_copied_beside_what_is_computed_of_them():
    def step(x):
        first, second = send("a", x), send("b", x)
        return first, first.sum(), second

    plan = plan_of(step, X)
    pieces = [[one.eqn.primitive.name for one in unit.equations] for unit in plan.units if not unit.operation]
    assert sorted(pieces) == [["copy"], ["reduce_sum", "copy"]]
    assert not {atom for unit in plan.units if unit.operation for atom in unit.outputs}.intersection(plan.outputs)


def test_large_answers_are_returned_as_they_come():
    plan = plan_of(lambda x: send("a", x), jax.ShapeDtypeStruct((1 << 14,), np.float32))
    assert plan.outputs == plan.units[0].outputs
