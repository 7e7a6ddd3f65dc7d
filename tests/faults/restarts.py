"""A job whose ranks are killed at random steps, and in the middle of saving, and which is started again each time."""

import dataclasses
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator

from faults import jobs
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

EVERY = 4  # steps from one checkpoint to the next
AHEAD = 3 * EVERY  # most steps that an attempt makes before it is killed, counted from its start

# The plan says, for each attempt, which rank is killed, how many steps after its start, and how many seconds after
# that. A checkpoint is written after each multiple of EVERY.
PROGRAM = """
import os, pathlib, signal, sys, threading, time
sys.path.insert(0, {examples!r})
import resuming
import jdistgrad as jd

resuming.EVERY = {every}
folder, plan = pathlib.Path({folder!r}), {plan!r}
attempt = int(os.environ["JDISTGRAD_RESTART"])
rank, ahead, seconds = plan[attempt] if attempt < len(plan) else (None, 0, 0)
counted = 0


def kill():
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def watch(step, loss):
    global counted
    counted += 1
    if jd.rank() == rank and counted == ahead:
        threading.Thread(target=kill, daemon=True).start()


if jd.rank() == 0:
    print("torn", len(list(folder.glob(".saving-*"))), flush=True)
resuming.main(folder, {steps}, watch)
"""


TO_TRAIN = 300.0  # seconds, and for each kill as many as a start takes
TO_START = 60.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """What came of a job: the digests of all ranks' results, how often it was started again, and torn checkpoints."""

    digests: list[str]
    restarts: int
    torn: int
    output: str


def planned(count: int, seed: int) -> list[tuple[int, int, float]]:
    """Return whom to kill, after how many steps, and how many seconds later: half of them while they save."""
    chance = random.Random(seed)
    plan = []
    for _ in range(count):
        in_save = chance.random() < 0.5
        steps = EVERY * chance.randint(1, 2) if in_save else chance.randint(1, AHEAD)
        plan.append((chance.randrange(3), steps, chance.uniform(0, 0.15) if in_save else chance.uniform(0, 0.02)))
    return plan


def run(plan: list[tuple[int, int, float]], steps: int, compiled: str) -> Ended:
    """Run the example on three ranks as the plan says; return what came of it."""
    with tempfile.TemporaryDirectory() as scratch:
        program = pathlib.Path(scratch, "program.py")
        folder = str(pathlib.Path(scratch, "checkpoints"))
        program.write_text(PROGRAM.format(examples=str(EXAMPLES), every=EVERY, folder=folder, plan=plan, steps=steps))
        options = ["-n", "3", "--restarts", str(len(plan)), "--cache", compiled]
        mark = uuid.uuid4().hex
        try:
            done = subprocess.run(
                [sys.executable, "-m", "jdistgrad", "run", *options, str(program)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=jobs.environment(mark, {}),
                timeout=TO_TRAIN + TO_START * len(plan),
                check=False,
            )
            assert jobs.outlived(mark) == []
        finally:
            jobs.end_all(mark)
    assert done.returncode == 0, done.stdout
    digests = [re.search(rf"worker{rank}: .* result (\w+)", done.stdout).group(1) for rank in range(3)]
    torn = sum(int(number) > 0 for number in re.findall(r"^torn (\d+)", done.stdout, re.MULTILINE))
    return Ended(digests, done.stdout.count("; starting it again"), torn, done.stdout)


def killed_at_random_steps(count: int, seed: int) -> tuple[Ended, Ended]:
    """Run a job that is killed so often, and one that is not; return what came of both.

    Raises:
      AssertionError: they end with other bits, or a job did not end well.
    """
    steps = 2 * AHEAD * count + EVERY  # more than all attempts can make before they are killed
    with tempfile.TemporaryDirectory() as compiled:
        killed = run(planned(count, seed), steps, compiled)
        unbroken = run([], steps, compiled)
    assert killed.restarts == count, killed.output
    assert killed.digests == unbroken.digests, f"seed {seed}: other bits after {count} kills\n{killed.output}"
    return killed, unbroken


def resumed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed in one job, which is started again each time."""
    fault = f"killed_at_random_steps({count}, {seed})"
    try:
        killed_at_random_steps(count, seed)
    except AssertionError as error:
        yield Outcome(WRONG, fault, str(error)[-4000:])
    except subprocess.TimeoutExpired as error:
        yield Outcome(HUNG, fault, str(error.output or "")[-4000:])
    else:
        yield from (Outcome(SURVIVED, fault) for _ in range(count))
