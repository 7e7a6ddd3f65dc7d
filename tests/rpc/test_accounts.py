"""The weight of lost workers comes back to the owners, in a simulation of workers that copy, drop, send and die."""

import contextvars
import random

import pytest

from jdistgrad.errors import WorkerLostError
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.directory import Directory
from jdistgrad.rpc.rref import RRef, by_reference
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.message import worker_of

SIZE = 4


class Wire:
    """The transport of one worker of a simulated world: what it sends stays on its way until the world delivers it."""

    hands_over = False
    wait_for = None  # nobody waits

    def __init__(self, rank, world):
        self.rank, self.world, self.lost = rank, world, set()

    def send(self, peer, message):
        if peer in self.lost:
            raise WorkerLostError(f"rank {peer} is lost")
        if peer == self.rank:
            self.world.workers[peer].handle(message)
        else:
            self.world.under_way.append((peer, message))

    def lose(self, peer):
        self.lost.add(peer)


class Simulated(Worker):
    """A worker whose tasks run at once, on the thread of the simulation. ``held``: its references."""

    def __init__(self, rank, world):
        directory = Directory([f"worker{rank}" for rank in range(world.size)])
        codec = PickleCodec()
        super().__init__("", rank, directory, Wire(rank, world), codec, timeout=9.0, survives=True)
        self.held = []

    def run(self, task):
        self.on_own_thread(task)

    def on_own_thread(self, task):
        def bound():
            self.enter_thread()
            task()

        contextvars.copy_context().run(bound)

    def handle(self, message):
        task = self.receive(message)
        if task is not None:
            self.run(task)

    def create(self, owner):
        self.held.append(RRef._of(self.references.call_remote(owner, int, (), {}, None)))

    def copy(self, reference, target):
        try:
            self.on_own_thread(lambda: self.rpc_async(target, hold, (by_reference(reference),), {}, None))
        except WorkerLostError:
            assert target in self.peers.lost

    def lose(self, lost):
        self.lost(lost, "it was killed")

    def tick_once(self):
        self.releasing.tick()
        self.losses.tick(0.0)

    def act(self, chance):
        what = chance.choice(["create", "copy", "copy", "drop"])
        if what == "create":
            owner = chance.randrange(SIZE)
            if owner not in self.peers.lost:
                self.create(owner)
        elif self.held:
            k = chance.randrange(len(self.held))
            self.copy(self.held[k], chance.randrange(SIZE)) if what == "copy" else self.held.pop(k)
        self.tick_once()


def hold(reference):
    current_worker().held.append(reference)


class World:
    """The workers, and the messages on their way, which overtake each other."""

    def __init__(self, chance, size=SIZE):
        self.chance, self.size, self.under_way, self.dead = chance, size, [], set()
        self.workers = [Simulated(rank, self) for rank in range(size)]

    @property
    def alive(self):
        return [worker for worker in self.workers if worker.rank not in self.dead]

    def deliver(self, k=None):
        target, message = self.under_way.pop(self.chance.randrange(len(self.under_way)) if k is None else k)
        if target not in self.dead:
            self.workers[target].handle(message)

    def deliver_all(self):
        """Deliver everything, and what the workers send then."""
        while True:
            for worker in self.alive:
                worker.tick_once()
            if not self.under_way:
                return
            while self.under_way:
                self.deliver()

    def kill(self, victim=None):
        victim = self.chance.choice(self.alive).rank if victim is None else victim
        self.dead.add(victim)
        self.under_way = [one for one in self.under_way if one[1].source != victim or self.chance.random() < 0.5]

    def notice(self):
        if self.dead:
            self.chance.choice(self.alive).lose(self.chance.choice(sorted(self.dead)))

    def finish(self):
        for worker in self.alive:
            for dead in self.dead:
                worker.lose(dead)
        self.deliver_all()

    def left(self):
        """Return what the tables of the survivors still hold."""
        return [(len(one.references.owned.entries), one.references.accounts.balances) for one in self.alive]


def history(seed, deaths):
    """Run a random history with so many deaths to its end, with all messages delivered."""
    chance = random.Random(seed)
    world = World(chance)
    for step in range(150):
        if step in range(40, 40 + 20 * deaths, 20):
            world.kill()
        action = chance.random()
        if action < 0.3:
            chance.choice(world.alive).act(chance)
        elif action < 0.95 and world.under_way:
            world.deliver()
        else:
            world.notice()
    world.finish()
    return world


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 100))])
def test_values_live_exactly_as_long_as_survivors_hold_them(seed, deaths):
    world = history(seed, deaths)
    for owner in world.alive:
        held = {rref.id for worker in world.alive for rref in worker.held if rref.owner.rank == owner.rank}
        made = {one for one in held if one in owner.references.owned.entries or worker_of(one) not in world.dead}
        assert set(owner.references.owned.entries) == made
    for worker in world.alive:
        worker.held.clear()
    world.finish()
    assert world.left() == [(0, {})] * len(world.alive)


@pytest.mark.parametrize("seed", range(5))
def test_a_value_that_is_freed_just_before_its_last_holder_dies_leaves_no_account(seed):
    """The creator learns of the death before its owner tells it to forget the value, which arrives early or late."""
    world = World(random.Random(seed), size=3)
    owner, creator, victim = world.workers
    creator.create(0)
    creator.copy(creator.held[0], 2)
    world.deliver_all()
    for worker in (creator, victim):
        worker.held.clear()
        worker.releasing.tick()
    while world.under_way:
        world.deliver()
    assert len(owner.references.owned.entries) == 0
    world.dead.add(2)
    world.finish()
    assert world.left() == [(0, {}), (0, {})]


def test_a_value_that_its_lost_creator_never_made_leaves_no_account():
    """The creator passes it on, and it goes from hand to hand."""
    world = World(random.Random(0), size=4)
    _, creator, second, third = world.workers
    creator.create(0)
    world.under_way.clear()  # it never comes to its owner
    creator.copy(creator.held[0], 2)
    world.deliver()
    second.copy(second.held[0], 3)
    world.deliver_all()
    world.dead.add(1)
    world.finish()
    assert len(second.references.accounts.balances) == len(third.references.accounts.balances) == 1
    second.held.clear()
    third.held.clear()
    world.finish()
    assert world.left() == [(0, {})] * 3
