"""``on_owners``: optax's transformations of trees of references, which the owners of the values carry out."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.contributions import gradient_of
from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.autograd.values.holes import shape_of
from jdistgrad.errors import ContextError
from jdistgrad.optim.division import HERE
from jdistgrad.optim.optax_extras import with_extra_arguments
from jdistgrad.optim.owners_plan import Method, Piece, Plan
from jdistgrad.optim.values import floats, shapes_of
from jdistgrad.rpc import api
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.on import put
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker

Inputs = Sequence[tuple[Sequence[Piece], Sequence[Any]]]  # of a method: trees as pieces, and what stands for each


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class PlanCopies:
    """References to a plan's copy on each owner."""

    by_owner: Mapping[int, RRef[Any]]


class OwnersState(NamedTuple):
    """The state of a transformation on owners.

    ``inner``: optax's own state, with references in place of what is on owners. ``plan``, ``copies``: how it divides,
    here and on each owner.
    """

    inner: Any
    plan: Plan
    copies: PlanCopies


@dataclasses.dataclass(frozen=True)
class GradientThere:
    """A gradient that is on its owner. ``identified``: the arguments of ``gradient_of``."""

    identified: tuple[Any, ...]


def on_owners(tx: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that does to a tree of references what ``tx`` does to the tree of their values.

    The program of ``tx`` for the whole tree is divided among the owners, which keep their parts of the state: masks,
    schedules, ``MultiSteps`` and clipping by the norm over all parameters mean what they mean in one process. Each
    owner is called once, and once more where numbers over all owners are needed, such as a norm. Arrays do not travel.

    The tree may also have arrays of this worker. Of a value, only float arrays are optimized. ``state.inner`` is
    optax's own state, with references to what is on owners: ``jd.get(state.inner)`` fetches it, and what was fetched
    may stand in its place. ``jax.lax.cond`` computes both branches.

    Arguments:
      tx: any optax transformation but those that combine whole arrays of several parameters, as ``optax.lbfgs`` does.

    Raises:
      ValueError: (``update``) ``tx`` combines arrays of several owners, or a value is not where it was at ``init``.

    Example:
      >>> params = enc, dec
      >>> tx = jd.on_owners(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
      >>> state = tx.init(params)
      >>> loss, gradients = jd.value_and_grad(loss_fn, argnums=(0, 1))(*params)
      >>> updates, state = tx.update(gradients, state, params)
      >>> params = jd.tree_map(optax.apply_updates, params, updates)
    """
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps):
        raise TypeError(f"on_owners takes an optax transformation, as optax.adam(1e-3), not {tx!r:.60}")
    inner = with_extra_arguments(tx)

    def init(params: Any) -> OwnersState:
        _require_no_trace("init")
        leaves, outer = jax.tree.flatten(params, is_leaf=_is_reference)
        shapes = shapes_of(leaves)
        pieces = [Piece(_place(one), jax.tree.structure(shape)) for one, shape in zip(leaves, shapes, strict=True)]
        plan = Plan(inner, jax.tree.unflatten(outer, shapes), pieces)
        copies = PlanCopies({owner: put(owner, plan) for owner in {piece.place for piece in pieces} - {HERE}})
        found = _carried_out(plan, copies, Method("init"), [(pieces, leaves)])
        return OwnersState(jax.tree.unflatten(plan.state_outer, found), plan, copies)

    def update(updates: Any, state: OwnersState, params: Any = None, **extra: Any) -> tuple[Any, OwnersState]:
        _require_no_trace("update")
        arrays, plan = _arrays(extra), state.plan
        method = Method("update", params is not None, tuple((name, shape_of(one)) for name, one in arrays.items()))
        leaves, outer = jax.tree.flatten(updates, is_leaf=_is_reference)
        inputs = [
            (plan.pieces, leaves),
            (plan.state_pieces, _up_to(plan.state_outer, state.inner)),
            *([] if params is None else [(plan.pieces, _up_to(outer, params))]),
            ([Piece(HERE, jax.tree.structure(0))] * len(arrays), list(arrays.values())),
        ]
        found = _carried_out(plan, state.copies, method, inputs)
        new, inside = found[: len(plan.pieces)], found[len(plan.pieces) :]
        return jax.tree.unflatten(outer, new), state._replace(inner=jax.tree.unflatten(plan.state_outer, inside))

    return optax.GradientTransformationExtraArgs(init, update)


def _arrays(extra: Mapping[str, Any]) -> dict[str, Any]:
    functions = [name for name, value in extra.items() if callable(value)]
    if functions:
        raise ValueError(f"on_owners: the extra argument {functions[0]} is a function, which no owner can call")
    return {name: jnp.asarray(value) for name, value in sorted(extra.items())}


def _carried_out(plan: Plan, copies: PlanCopies, method: Method, inputs: Inputs) -> list[Any]:
    """Carry out a method, round after round; return what stands for each piece of its results."""
    division = plan.division(method)
    own, known = _at_places(inputs)
    kept = dict[int, Iterator[Any]]()

    def call(number: int, owners: Sequence[int], sent: Sequence[Any]) -> list[Any]:
        answers = []
        for owner in owners:
            given = {k: known[k] for k in division.rounds[number][owner].here}
            args = copies.by_owner[owner], method, number, own.get(owner, {}), given, sent
            answers.append(api.rpc_async(owner, carry_out_part, args))
        found = [answer.result() for answer in answers]
        kept.update((owner, iter(references)) for owner, (_, references) in zip(owners, found, strict=True))
        return [packed for packed, _ in found]

    with within(_scope_of(inputs)):
        sent = division.carry_out(call)
    if HERE in division.rounds[-1]:
        known.update(division.rounds[-1][HERE].compute(known, sent)[0])
    known.update(division.literals)
    return [
        jnp.asarray(known[numbers[0]]) if piece.place == HERE else next(kept[piece.place])
        for piece, numbers in _numbered(plan, method)
    ]


@shown_as("the part of an optax transformation on an owner")
def carry_out_part(
    plan: Plan, method: Method, number: int, own: Mapping[int, Any], given: Mapping[int, Any], earlier: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Carry out this worker's part of a round; return the bytes of what others get, and references to results, if any.

    Arguments:
      own: what is on this worker: values and gradients, by the numbers of their first leaves.
      given: arrays of the caller, by their numbers.
      earlier: what owners have sent in earlier rounds.
    """
    here, division = current_worker().rank, plan.division(method)
    known = dict(given)
    for first, value in own.items():
        tree = gradient_of(*value.identified) if isinstance(value, GradientThere) else floats(value)
        known.update(enumerate(jax.tree.leaves(tree), first))
    made, sent = division.rounds[number][here].compute(known, earlier)
    if not division.is_last(number, here):
        return sent, []
    made.update(division.literals)
    mine = [(piece, numbers) for piece, numbers in _numbered(plan, method) if piece.place == here]
    return sent, [
        RRef(jax.tree.unflatten(piece.structure, [jnp.asarray(made[k]) for k in numbers])) for piece, numbers in mine
    ]


def _numbered(plan: Plan, method: Method) -> list[tuple[Piece, list[int]]]:
    """Return the pieces of a method's results, with the numbers of their leaves."""
    numbers = iter(plan.division(method).outputs)
    return [(one, [next(numbers) for _ in range(one.structure.num_leaves)]) for one in plan.results(method)]


def _at_places(inputs: Inputs) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return what is on owners, of each by the numbers of first leaves, and what is here, by its numbers."""
    own, here, number = dict[int, dict[int, Any]](), dict[int, Any](), 0
    for pieces, each in inputs:
        for piece, one in zip(pieces, each, strict=True):
            if _place(one) not in (HERE, piece.place):
                raise ValueError(f"on_owners: {one} was on another worker when init was called. Call init again.")
            if piece.place == HERE:
                here[number] = one
            else:
                sent = GradientThere(one.identified()) if isinstance(one, RemoteGradient) else one
                own.setdefault(piece.place, {})[number] = sent
            number += piece.structure.num_leaves
    return own, here


def _scope_of(inputs: Inputs) -> Any:
    """Return the scope of the gradients."""
    scopes = {one.checked_scope() for _, each in inputs for one in each if isinstance(one, RemoteGradient)}
    if len(scopes) > 1:
        raise ContextError("on_owners: the gradients belong to several contexts. Update with those of one context.")
    return scopes.pop() if scopes else current_scope()


def _up_to(structure: Any, tree: Any) -> list[Any]:
    found: list[Any] = structure.flatten_up_to(tree)
    return found


def _is_reference(node: Any) -> bool:
    return isinstance(node, RRef | RemoteGradient)


def _place(one: Any) -> int:
    return one.owner.rank if _is_reference(one) else HERE


def _require_no_trace(method: str) -> None:
    if not trace_state_clean():
        raise TypeError(
            f"on_owners: {method} was called inside a transformation of JAX's (jax.jit, jd.jit, scan ...). Call it "
            "from Python. In a function staged by jd.jit, jd.DistributedOptimizer takes steps."
        )
