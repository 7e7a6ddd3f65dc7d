"""Ranks that are killed, stopped, stuck, or end, while others call them, average with them or run compiled steps."""

import random
import re
from collections.abc import Iterator

from faults import jobs, load
from faults.outcomes import HUNG, NAMED, SURVIVED, WRONG, Outcome, patience

SIZE = 3
SILENCE, TIMEOUT = 4.0, 10.0
SETTINGS = {"JDISTGRAD_SILENCE": str(SILENCE), "JDISTGRAD_HEARTBEAT": "0.3"}
LIMIT = 90.0  # seconds after which a job that has been struck counts as hung

# How long a job may take to end. Nobody notices a rank that stands still before the time the settings give it.
DEAD_SECONDS = 5.0
STILL_SECONDS = 45.0

STANDS_STILL = ("stop", "deadlock", "stick")


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed by SIGKILL, and some that crash: C code reads where there is no memory."""
    yield from struck(("kill", "kill", "kill", "crash"), load.PHASES, count, seed, within=DEAD_SECONDS)


def standing_still(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks stopped, deadlocked, or stuck in C with the lock of the interpreter."""
    yield from struck(STANDS_STILL, load.PHASES, count, seed, within=STILL_SECONDS)


def ending(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks that raise, or end by ``sys.exit`` or ``os._exit``."""
    phases = [phase for phase in load.PHASES if phase != "init"]
    before_init = count // 10
    yield from struck(("raise", "exit", "_exit"), phases, count - before_init, seed, within=DEAD_SECONDS)
    yield from struck(("raise", "exit", "_exit"), ["init"], before_init, seed, within=STILL_SECONDS)


def struck(acts, phases, count: int, seed: int, *, within: float) -> Iterator[Outcome]:
    """Strike one rank in each job: every act in every phase in turn, at moments that the seed draws."""
    chance = random.Random(seed)
    cases = [(act, phase) for phase in phases for act in acts]
    chance.shuffle(cases)
    for number in range(count):
        act, phase = cases[number % len(cases)]
        yield strike(act, phase, chance.randrange(SIZE), chance.choice([0.0, chance.expovariate(200)]), within)


def strike(act: str, phase: str, victim: int, delay: float, within: float) -> Outcome:
    asked = ["--victim", str(victim), "--phase", phase, "--act", act, "--delay", f"{delay:.5f}"]
    arguments = ["-m", "faults.load", *asked, "--timeout", str(TIMEOUT)]
    ended = jobs.run(SIZE, arguments, limit=LIMIT, settings=SETTINGS)
    return judge(act, victim, ended, " ".join(arguments), within)


def judge(act: str, victim: int, ended: jobs.Ended, fault: str, within: float) -> Outcome:
    """Judge a job in which a rank was struck."""
    problem = broken_promise(act, victim, ended, within)
    if problem:
        kind = HUNG if ended.status is None else WRONG
        return Outcome(kind, fault, f"{problem}\n{ended.output[-4000:]}", ended.seconds)
    if ended.status == 0:
        return Outcome(SURVIVED, fault)
    return Outcome(NAMED, fault, seconds=ended.seconds)


def broken_promise(act: str, victim: int, ended: jobs.Ended, within: float) -> str:
    """Return which promise a job has not kept, or an empty text."""
    if ended.status is None:
        return "it stood still"
    if load.WRONG in ended.output:
        return "a number was wrong"
    if ended.left:
        return f"the processes {ended.left} are left"
    if ended.seconds is None:
        return f"no rank was struck, and the exit status was {ended.status}"
    if ended.status == 0:  # right if the rank's program had ended before
        return "" if act in ("kill", "crash", "stop") else "its exit status was 0"
    if not names(victim, ended.output):
        return f"no message names rank {victim}"
    if ended.seconds > within * patience():
        return f"it took {ended.seconds:.1f} s"
    return ""


def names(victim: int, output: str) -> bool:
    """Return whether a job's output says which rank failed, in our words or in those of mpirun."""
    ours = rf"(\(rank {victim}\)|ranks? \[?{victim}\b|rank {victim}\b)"
    launchers = rf"Process name: \[[^\]]*@1,{victim}\]"
    said = re.sub(r"^\[ranks [^\]]*\] ", "", output, flags=re.MULTILINE)  # who printed a line, not whom it names
    return re.search(f"{ours}|{launchers}", said) is not None
