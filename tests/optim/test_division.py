"""Programs divided among owners: what runs where, and what travels. No world."""

import jax
import jax.numpy as jnp
import pytest

from jdistgrad.optim.division import HERE, Division, MixedError, inlined

A, B, C = 1, 2, 3


def program(function, *args):
    return inlined(jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args))


def divided(function, places, wanted, *args):
    return Division(program(function, *args), places, wanted)


def carried_out(division, places, args):
    """Carry out a division's rounds; return its outputs, and how often each place had a part."""
    known, own, counts, sent = {}, {}, {}, []
    for k, (place, arg) in enumerate(zip(places, args, strict=True)):
        own.setdefault(place, {})[k] = arg
    made = {place: {} for place in own}
    known.update(own.get(HERE, {}))
    for parts in division.rounds:
        earlier = list(sent)
        for place, part in sorted(parts.items(), key=lambda one: (one[0] == HERE, one)):
            inputs = own.get(place, {}) | {k: known[k] for k in part.here}
            found, packed = part.compute(inputs, sent if place == HERE else earlier)
            made.setdefault(place, {}).update(found)
            sent += [packed] if part.sent else []
            counts[place] = counts.get(place, 0) + 1
    everything = {k: one for each in made.values() for k, one in each.items()} | division.literals
    return [everything[k] for k in division.outputs], counts


def test_elementwise_programs_run_where_their_inputs_are():
    args, places = [jnp.arange(3.0), jnp.arange(4.0), jnp.float32(2)], [A, B, HERE]
    found, counts = carried_out(
        divided(lambda a, b, s: (a * s, b - s, s + 1), places, [A, B, HERE], *args), places, args
    )
    assert [one.tolist() for one in found] == [[0, 2, 4], [-2, -1, 0, 1], 3]
    assert counts == {A: 1, B: 1, HERE: 1}


def test_a_norm_over_all_owners_takes_one_more_round():
    def clipped(a, b, c):
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in (a, b, c)))
        return a / norm, b / norm, c / norm

    args, places = [jnp.full(3, 2.0), jnp.ones((2, 2)), jnp.float32(0)], [A, B, A]
    division = divided(clipped, places, places, *args)
    found, counts = carried_out(division, places, args)
    assert [one.tolist() for one in found] == [[0.5] * 3, [[0.25] * 2] * 2, 0]
    assert counts == {A: 2, B: 2}
    assert {one.shape for part in division.senders(1) for one in part.sent.values()} == {()}


def test_numbers_of_several_owners_by_turns_take_no_round_each():
    args, places = [jnp.full(3, float(k)) for k in range(6)], [A, B, C, A, B, C]
    division = divided(lambda *each: sum(jnp.sum(one) for one in each), places, [HERE], *args)
    found, counts = carried_out(division, places, args)
    assert found == [45]
    assert counts == {A: 1, B: 1, C: 1, HERE: 1}


def test_a_branch_that_changes_arrays_of_several_owners():
    def every_second(count, a, b):
        after = jax.lax.cond(count % 2 == 1, lambda: (a + jnp.sum(b), b), lambda: (a * 0, b * 2))
        return count + 1, *after

    places = [HERE, A, B]
    for count, expected in ((0, [1, [0, 0], [2, 2, 2]]), (1, [2, [4, 4], [1, 1, 1]])):
        args = [jnp.int32(count), jnp.ones(2), jnp.ones(3)]
        found, _ = carried_out(divided(every_second, places, places, *args), places, args)
        assert [one.tolist() for one in found] == expected


def test_outputs_that_no_input_reaches_are_made_where_they_are_wanted():
    args, places = [jnp.ones(2), jnp.ones(3)], [A, B]
    division = divided(lambda a, b: (jnp.zeros_like(a), False, jnp.zeros(())), places, [A, B, HERE], *args)
    found, counts = carried_out(division, places, args)
    assert [jnp.asarray(one).tolist() for one in found] == [[0, 0], False, 0]
    assert counts[B] == 1  # it has a part, though its output is a literal


def test_an_owner_makes_its_outputs_in_its_last_round():
    def late(a, b):
        both = jnp.sum(a) + jnp.sum(b)
        return a * 2, b + jnp.sum(a * both)

    args, places = [jnp.ones(2), jnp.ones(3)], [A, B]
    division = divided(late, places, places, *args)
    found, counts = carried_out(division, places, args)
    assert [one.tolist() for one in found] == [[2, 2], [11] * 3]
    assert counts == {A: 2, B: 2}
    assert division.outputs[0] in division.rounds[1][A].outputs
    assert division.is_last(1, A)


def test_what_is_of_no_owner_is_on_all_of_them():
    def counted(count, a, b):
        return count + 1, a + jnp.sum(b), b

    args, places = [jnp.int32(0), jnp.ones(2), jnp.ones(3)], [HERE, A, B]
    division = Division(program(counted, *args), places, places, [A, B])
    assert all(division.outputs[0] in parts[place].outputs for parts in division.rounds[1:] for place in parts)
    assert set().union(*division.rounds) == {A, B}


def test_what_a_reduction_does_to_its_numbers_is_no_call():
    def halved(a, b):
        each = [jax.lax.reduce(one, 0.0, lambda x, y: x / 2 + y, [0]) for one in (a, b)]
        return a + each[1], b + each[0]

    args, places = [jnp.arange(3.0), jnp.arange(4.0)], [A, B]
    found, _ = carried_out(divided(halved, places, places, *args), places, args)
    for one, expected in zip(found, halved(*args), strict=True):
        assert one.tolist() == expected.tolist()


def test_arrays_of_several_owners_are_not_combined():
    with pytest.raises(MixedError, match=r"add takes arrays of ranks \[1, 2\] together"):
        divided(lambda a, b: a + b, [A, B], [A], jnp.ones(2), jnp.ones(2))
