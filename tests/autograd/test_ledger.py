"""The tape: which contributions a take gets and when, their order, and recorded pullbacks by message."""

import itertools
import random
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.autograd.tape.ledger import (
    CONTRIBUTION,
    EXACT,
    REFERENCE,
    REPLACED,
    Contribution,
    Ledger,
    Target,
    mark,
    total,
)
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.errors import ContextError

NODE = Target(REFERENCE, 7)


def part(number, value=1.0, lanes=()):
    return Contribution(number, lanes, [jnp.full((*lanes, 2), value, jnp.float32)])


def marks(*members):
    """Return the sum of the marks of contributions: numbers, or pairs of a number and how often it counts."""
    pairs = [one if isinstance(one, tuple) else (one, 1) for one in members]
    return sum((times * np.array(mark(number)) for number, times in pairs), np.zeros(5)).tolist()


def numbers(contributions):
    return [one.number for one in contributions]


def test_a_gradient_that_is_read_is_a_sum_of_contributions_that_have_come():
    ledger = Ledger()
    for one in (part(1), part(2, lanes=(4,)), part(3)):
        ledger.put(NODE, one)
    for right in (marks(), marks(1), marks(3, 1), marks((2, 4)), marks(1, (2, 4), 3)):
        assert ledger.find(NODE, tuple(right)) is not None
    for wrong in (marks((1, 2)), marks((1, 0.5)), marks((1, -1)), marks(2), marks(4), [1.0, *marks(1, 3)[1:]]):
        assert ledger.find(NODE, tuple(wrong)) is None


def test_what_has_replaced_contributions_can_be_read_as_any_of_them():
    ledger = Ledger()
    ledger.put(NODE, part(1))
    ledger.put(NODE, part(2))
    ledger.write(NODE, [jnp.full(2, 9.0)])
    assert ledger.find(NODE, tuple(marks(1))) is not None
    np.testing.assert_array_equal(total(ledger.read(NODE))[0], [9.0, 9.0])


def test_so_many_that_their_marks_are_not_exact_are_counted():
    ledger, many = Ledger(), EXACT + 2
    for number in range(many):
        ledger.put(NODE, part(number))
    assert len(ledger.take(NODE, np.array([many, 0, 0])).result(0)) == many
    for number in range(many, 2 * many + 1):
        ledger.put(NODE, part(number))
    with pytest.raises(jd.DifferentiationError):
        ledger.take(NODE, np.array([many, 0, 0])).result(0)


def test_the_same_number_counts_once():
    ledger = Ledger()
    taken = ledger.take(NODE, marks(1, 2))
    for value in (1.0, 5.0):
        ledger.put(NODE, part(1, value))
    assert not taken.done()
    assert ledger.take(NODE, marks()).result(0) == []  # who takes none leaves those of others
    ledger.put(NODE, part(2))
    np.testing.assert_array_equal(total(taken.result(0))[0], [2.0, 2.0])


@pytest.mark.parametrize(
    ("wanted", "lanes", "parts"),
    [(((1, 6), 2), (), (part(1, lanes=(2, 3)), part(2))), ((1, 2), (3,), (part(1, lanes=(3,)), part(2, lanes=(3,))))],
    ids=["each lane counts", "a batched taker counts each once"],
)
def test_batched_contributions(wanted, lanes, parts):
    ledger = Ledger()
    taken = ledger.take(NODE, marks(*wanted), lanes)
    ledger.put(NODE, parts[0])
    assert not taken.done()
    ledger.put(NODE, parts[1])
    assert numbers(taken.result(0)) == [1, 2]


def test_different_batches_are_refused():
    with pytest.raises(jd.DifferentiationError):
        total([part(1, lanes=(2,))], (3,))


def test_leaves_nobody_contributed_to_stay_empty():
    one, two = jnp.ones(2), jnp.full(3, 2.0)
    found = total([Contribution(1, (), [one, None, None]), Contribution(2, (), [None, None, two])])
    assert found[1] is None
    np.testing.assert_array_equal(found[0], one)
    np.testing.assert_array_equal(found[2], two)


def sum_of(arrivals):
    ledger = Ledger()
    taken = ledger.take(NODE, marks(*(one.number for one in arrivals)))
    for one in arrivals:
        ledger.put(NODE, one)
    return np.asarray(total(taken.result(0))[0])


def test_sums_are_the_same_to_the_bit_whatever_the_order_of_arrival():
    chance = np.random.default_rng(3)
    scales = [1e8, 1.0, 1e-8, -1e8, 3.0]
    parts = [Contribution(k, (), [chance.normal(size=4).astype(np.float32) * s]) for k, s in enumerate(scales)]
    sums = {sum_of(order).tobytes() for order in itertools.permutations(parts)}
    assert len(sums) == 1
    in_another_order = sum((one.leaves[0] for one in reversed(parts)), np.zeros(4, np.float32))
    assert in_another_order.tobytes() not in sums  # the order does matter for these numbers


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_puts_and_takes_tells_everybody_what_is_theirs(seed):
    # Each target gets the contributions and the takes of three passes.
    chance = random.Random(seed)
    ledger, wanted, events = Ledger(), {}, []
    for k in range(chance.randint(1, 4)):
        target = Target(chance.choice([REFERENCE, CONTRIBUTION]), k)
        drawn = chance.sample(range(100), chance.randint(3, 9))
        for turn in range(3):
            wanted[target, turn] = sorted(drawn[turn::3])
            events += [("put", target, number) for number in wanted[target, turn]] + [("take", target, turn)]
    chance.shuffle(events)
    taken = {}
    for what, target, which in events:
        if what == "put":
            ledger.put(target, part(which))
        else:
            taken[target, which] = ledger.take(target, marks(*wanted[target, which]))
    assert {key: numbers(future.result(0)) for key, future in taken.items()} == wanted
    assert ledger.targets() == []


def test_giving_up_ends_every_wait_now_and_later():
    ledger = Ledger()
    waits = [ledger.take(Target(REFERENCE, k), marks(1)) for k in range(3)]
    ledger.put(Target(REFERENCE, 1), part(1))
    ledger.give_up(jd.ContextError("closed"))
    assert numbers(waits[1].result(0)) == [1]
    later = ledger.take(Target(REFERENCE, 3), marks(1))
    for one in (waits[0], waits[2], later):
        assert isinstance(one.exception(0), jd.ContextError)


def test_uses_after_an_average_take_what_has_replaced_their_gradient():
    ledger = Ledger()
    ledger.put(NODE, part(1))
    assert numbers(ledger.take(NODE, marks(1), keep=True).result(0)) == [1]
    for average in (8.0, 9.0):
        ledger.write(NODE, [jnp.full(2, average)])
        (found,) = ledger.take(NODE, marks(1), keep=True).result(0)
        np.testing.assert_array_equal(found.leaves[0], [average, average])


def found_by_a_thread(tape, message):
    found = []

    def find():
        try:
            found.append(tape.find(message, last=False))
        except ContextError as error:
            found.append(error)

    thread = threading.Thread(target=find)
    thread.start()
    return thread, found


def test_a_pull_waits_for_its_recording_and_for_no_other_and_the_last_takes_it_away():
    tape = Tape()
    thread, found = found_by_a_thread(tape, 7)
    tape.record(8, "another")
    thread.join(0.05)
    assert thread.is_alive()
    tape.record(7, "mine")
    thread.join(5)
    assert found == ["mine"]
    assert len(tape.recordings) == 2
    assert tape.find(7, last=True) == "mine"
    with pytest.raises(ContextError):
        tape.find(7, last=False)


def test_closing_ends_every_wait():
    tape = Tape()
    thread, found = found_by_a_thread(tape, 7)
    tape.close()
    thread.join(5)
    assert isinstance(found[0], ContextError)
    with pytest.raises(ContextError):
        tape.find(9, last=True)


MANY = 1500
SUMS = {
    "two places in turn": range(1, MANY, 2),
    "the first and the third pass": [*range(1, 500), *range(1000, MANY)],
    "all but one": [*range(1, MANY - 2), MANY - 1],
    "the first pass": range(1, 12),
}


@pytest.mark.parametrize("name", SUMS)
def test_contributions_of_many_are_found(name):
    ledger = Ledger()
    for number in range(1, MANY):
        ledger.put(NODE, part(number))
    assert numbers(ledger.find(NODE, tuple(marks(*SUMS[name])))) == list(SUMS[name])


def test_any_of_many_are_not_searched_for_ever():
    ledger, some = Ledger(), np.random.default_rng(0).permutation(np.arange(1, MANY))[:700]
    for number in range(1, MANY):
        ledger.put(NODE, part(number))
    with pytest.raises(jd.DifferentiationError):
        ledger.find(NODE, tuple(marks(*map(int, some))))


def test_a_pass_after_an_average_has_its_own_gradient():
    ledger, first, second = Ledger(), tuple(marks(1)), tuple(marks(2))
    ledger.put(NODE, part(1))
    ledger.write(NODE, [jnp.full(2, 9.0)])
    ledger.put(NODE, part(2))
    for _ in range(2):
        assert numbers(ledger.find(NODE, second)) == [2]
        assert numbers(ledger.find(NODE, first)) == [REPLACED]
        assert numbers(ledger.take(NODE, second, keep=True).result(0)) == [2]
