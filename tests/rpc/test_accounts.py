"""The weight of lost workers comes back to the owners, in a simulation of workers that copy, drop, send and die."""

import dataclasses
import random

import pytest

from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.directory import Directory
from jdistgrad.rpc.references.accounts import Accounts
from jdistgrad.rpc.references.owned import OwnerTable
from jdistgrad.rpc.references.settling import Settling
from jdistgrad.rpc.references.weights import NOTHING, WHOLE, Weight
from jdistgrad.rpc.worker import Worker
from jdistgrad.rpc.worlds.opening import THREADS
from jdistgrad.wire.ids import COUNTER_BITS, worker_of
from jdistgrad.wire.local import Hub, LocalTransport, LocalWorld
from jdistgrad.wire.message import Kind, Message

SIZE = 4


@dataclasses.dataclass
class Sent:
    """A message: ``what`` is a copy, a drop, the creation of a value, or a settlement with ``lost``."""

    what: str
    source: int
    target: int
    weights: list[tuple[int, int, Weight]]
    lost: int = -1


class Simulated:
    """A worker as far as its references go: what it holds, owns, and has noted."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.held: dict[tuple[int, int], Weight] = {}
        self.owned, self.accounts, self.settling = OwnerTable(), Accounts(rank), Settling(rank, SIZE)
        self.lost: set[int] = set()
        self.count = 0

    def create(self, owner):
        identifier = self.rank << COUNTER_BITS | self.count
        self.count += 1
        self.held[identifier, owner] = WHOLE
        self.world.send(Sent("create", self.rank, owner, [(identifier, owner, WHOLE)]))

    def copy(self, reference, target):
        self.held[reference], given = self.held[reference].split()
        gifts = [(*reference, given)]
        if target != self.rank and not self.accounts.give(target, gifts):
            self.held[reference] = self.held[reference] + given  # it could not be sent
        else:
            self.world.send(Sent("copy", self.rank, target, gifts))

    def drop(self, reference):
        weight = self.held.pop(reference)
        self.world.send(Sent("drop", self.rank, reference[1], [(*reference, weight)]))

    def receive(self, message):
        if message.what == "settle":
            self.lose(message.lost)
        if message.what == "create":
            ((identifier, owner, weight),) = message.weights
            noted = message.source == owner or self.accounts.give(message.source, message.weights)
            self.owned.announce(identifier, NOTHING if noted else weight)
            return
        if message.source != self.rank and not self.accounts.take(message.source, message.weights):
            return
        if message.what == "copy":
            for identifier, owner, weight in message.weights:
                self.held[identifier, owner] = self.held.get((identifier, owner), NOTHING) + weight
        elif message.what == "drop":
            self.freed(self.owned.release_all([(identifier, weight) for identifier, _, weight in message.weights]))
        else:
            self.owned.settle([(identifier, weight) for identifier, _, weight in message.weights])
            self.settling.settled(message.source, message.lost)
            self.sweep()

    def lose(self, lost):
        if lost in self.lost:
            return
        self.lost.add(lost)
        self.settling.lose(lost)
        self.owned.hold(held=True)
        balances = self.accounts.settle(lost)
        self.owned.settle(balances.pop(self.rank, []))
        self.owned.give_up(lost, RuntimeError("lost"))
        for peer in set(range(SIZE)) - {self.rank, *self.lost}:
            weights = [(identifier, peer, weight) for identifier, weight in balances.get(peer, ())]
            self.world.send(Sent("settle", self.rank, peer, weights, lost))
        self.sweep()

    def sweep(self):
        if not self.settling.open():
            self.owned.hold(held=False)
            self.freed(self.owned.sweep())

    def freed(self, entries):
        self.accounts.forget(entries)
        for identifier in entries:
            assert self.world.alive_weight(identifier, self.rank) == NOTHING, "a value was freed while it was held"

    def act(self, chance):
        what = chance.choice(["create", "copy", "copy", "drop"])
        if what == "create":
            self.create(chance.randrange(SIZE))
        elif self.held:
            reference = chance.choice(sorted(self.held))
            self.copy(reference, chance.randrange(SIZE)) if what == "copy" else self.drop(reference)


class World:
    """The workers, and the messages on their way, which overtake each other."""

    def __init__(self, chance):
        self.chance, self.under_way, self.dead = chance, [], set()
        self.workers = [Simulated(rank, self) for rank in range(SIZE)]

    @property
    def alive(self):
        return [worker for worker in self.workers if worker.rank not in self.dead]

    def send(self, message):
        self.under_way.append(message)

    def deliver(self):
        message = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        refused = message.source in self.workers[message.target].lost
        if message.target not in self.dead and not refused:
            self.workers[message.target].receive(message)

    def kill(self):
        victim = self.chance.choice(self.alive)
        self.dead.add(victim.rank)
        self.under_way = [one for one in self.under_way if one.source != victim.rank or self.chance.random() < 0.5]

    def notice(self):
        if self.dead:
            self.chance.choice(self.alive).lose(self.chance.choice(sorted(self.dead)))

    def alive_weight(self, identifier, owner):
        """Return the weight of a reference that survivors hold or send each other."""
        held = [worker.held.get((identifier, owner), NOTHING) for worker in self.alive]
        sent = [
            weight
            for message in self.under_way
            if message.what == "copy" and not {message.source, message.target} & self.dead
            for one, _, weight in message.weights
            if one == identifier
        ]
        return sum([*held, *sent], NOTHING)

    def finish(self):
        for worker in self.alive:
            for dead in self.dead:
                worker.lose(dead)
        while self.under_way:
            self.deliver()


def history(seed, deaths):
    """Run a random history with so many deaths to its end, with all messages delivered."""
    chance = random.Random(seed)
    world = World(chance)
    for step in range(150):
        if step in range(40, 40 + 20 * deaths, 20):
            world.kill()
        action = chance.random()
        if action < 0.5:
            chance.choice(world.alive).act(chance)
        elif action < 0.9 and world.under_way:
            world.deliver()
        else:
            world.notice()
    world.finish()
    return world


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(100))
def test_values_live_exactly_as_long_as_survivors_hold_them(seed, deaths):
    world = history(seed, deaths)
    for owner in world.alive:
        held = {identifier for worker in world.alive for identifier, of in worker.held if of == owner.rank}
        made = {one for one in held if one in owner.owned.identifiers() or worker_of(one) not in world.dead}
        assert set(owner.owned.identifiers()) == made
    for worker in world.alive:
        for reference in list(worker.held):
            worker.drop(reference)
    world.finish()
    assert [len(owner.owned) for owner in world.alive] == [0] * len(world.alive)


def test_nothing_is_freed_before_the_last_settlement():
    """The dead creator gave half of its weight away: the balance of the receiver with it is negative."""
    table, settling = OwnerTable(), Settling(0, 3)
    identifier = 1 << COUNTER_BITS
    table.announce(identifier)
    settling.lose(1)
    table.hold(held=True)
    table.settle([(identifier, WHOLE)])  # the owner's account with the creator
    assert settling.open() == {(2, 1)}
    assert table.identifiers() == [identifier]
    kept, given = WHOLE.split()
    table.settle([(identifier, -given)])
    settling.settled(2, 1)
    assert settling.open() == set()
    table.hold(held=False)
    assert table.sweep() == {}
    assert list(table.release_all([(identifier, given)])) == [identifier]
    assert kept


def test_an_account_that_is_settled_takes_no_more_entries():
    accounts = Accounts(0)
    assert accounts.give(1, [(7, 2, WHOLE)])
    assert accounts.settle(1) == {2: [(7, WHOLE)]}
    assert not accounts.give(1, [(7, 2, WHOLE)])
    assert not accounts.take(1, [(7, 2, WHOLE)])
    assert len(accounts) == 0


def test_what_went_to_its_owner_and_what_came_back_leaves_no_account():
    accounts = Accounts(0)
    accounts.give(1, [(7, 1, WHOLE)])
    accounts.give(2, [(8, 1, WHOLE)])
    accounts.take(2, [(8, 1, WHOLE)])
    assert len(accounts) == 0


def test_references_of_a_lost_owner_are_forgotten():
    accounts = Accounts(0)
    accounts.give(2, [(7, 1, WHOLE)])
    assert accounts.settle(1) == {}
    assert len(accounts) == 0


def test_a_value_that_its_lost_creator_never_made_is_given_up():
    table, error = OwnerTable(), RuntimeError("lost")
    identifier = 1 << COUNTER_BITS
    promise = table.value(identifier)
    assert [entry.value for entry in table.give_up(1, error)] == [promise]
    assert table.value(identifier).exception() is error
    table.release_all([(identifier, WHOLE)])
    table.announce(identifier)
    assert len(table) == 0


def test_a_value_that_is_free_when_it_is_announced_leaves_no_accounts_anywhere():
    """Its creator has passed it on; both drops overtake the call that makes it."""
    directory = Directory(["first", "owner", "third"])
    transport = LocalTransport(LocalWorld(Hub(3)), 1)
    codec = PickleCodec(allow_code=False)
    owner = Worker("", 1, directory, transport, codec, timeout=9.0, process=THREADS, survives=True)
    identifier = 0 << COUNTER_BITS | 5
    kept, given = WHOLE.split()
    for source, weight, noted in [(2, given, False), (0, kept, True)]:
        assert owner.receive(Message(Kind.DROP, source, 0, [(identifier, weight.units, weight.scale, noted)])) is None
    assert owner.references.announce(identifier).freed
    assert owner.references.to_forget() == {0: [identifier]}
    assert len(owner.references.accounts) == 0
    owner.close_threads()


def test_a_sum_that_passes_zero_between_settlements_frees_nothing():
    """Two survivors hold parts. One drops its part after its settlement, before that of the other has come."""
    table, identifier = OwnerTable(), 1 << COUNTER_BITS
    table.announce(identifier)
    rest, first = WHOLE.split()
    rest, second = rest.split()
    table.hold(held=True)
    table.settle([(identifier, WHOLE)])
    table.settle([(identifier, -first)])
    assert table.release_all([(identifier, first)]) == {}
    table.settle([(identifier, -second)])
    table.hold(held=False)
    assert table.sweep() == {}
    assert list(table.release_all([(identifier, second)])) == [identifier]
    assert rest
