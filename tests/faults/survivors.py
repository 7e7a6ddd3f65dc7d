"""Ranks that are killed in jobs that survive: the others go on, know who is lost, and hold nothing at the end."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from faults import jobs, survivors_load
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome, patience

SIZE = 4
SECONDS = 1.5
KNOWN_SECONDS = 0.5
LIMIT = 60.0
SHARES = 0.4, 0.4, 0.2  # of the jobs in which one rank is killed, two, and all but one
UNRULY = 0.25  # the share of the jobs in which messages come late and twice

Struck = tuple[set[int], jobs.Ended, str]  # who was killed, the end of the job, and the fault


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed at random moments of a load of calls, references and contexts."""
    return judged_kills(judge, struck_jobs("faults.survivors_load", SECONDS, count, seed, unruly=UNRULY))


def judged_kills(judge: Callable[..., Outcome], struck: Iterable[Struck]) -> Iterator[Outcome]:
    """Yield an outcome for each kill: that of its job."""
    for victims, ended, fault in struck:
        yield from [judge(victims, ended, fault)] * len(victims)


def struck_jobs(program: str, seconds: float, kills: int, seed: int, *, unruly: float = 0.0) -> Iterator[Struck]:
    """Run jobs of a program that survive kills at random moments; a share of them over an unruly transport."""
    chance = random.Random(seed)
    while kills:
        number = min(kills, chance.choices((1, 2, 3), SHARES)[0])
        kills -= number
        asked = ["--victims", *map(str, chance.sample(range(SIZE), number))]
        asked += ["--after", *(f"{moment:.4f}" for moment in moments(chance, number, seconds))]
        asked += ["--unruly"] * (chance.random() < unruly)
        arguments = ["-m", program, *asked, "--seconds", str(seconds), "--seed", str(chance.randrange(1 << 20))]
        ended = jobs.run(SIZE, arguments, limit=LIMIT, settings={}, options=["--survive"])
        yield set(map(int, asked[1 : 1 + number])), ended, " ".join(arguments)


def moments(chance: random.Random, number: int, seconds: float) -> list[float]:
    """Draw the moments of kills: every other time, the later ones while the first is dealt with."""
    first, *later = (chance.uniform(0.0, 0.9 * seconds) for _ in range(number))
    if chance.random() < 0.5:
        later = [first + chance.expovariate(100) for _ in later]
    return [first, *later]


def judge(victims: set[int], ended: jobs.Ended, fault: str) -> Outcome:
    """Judge a job by what its survivors say."""
    if ended.status is None:
        return Outcome(HUNG, fault, f"it stood still\n{ended.output[-4000:]}")
    struck, reports = found_in(ended.output)
    told = [(int(lost), at) for report in reports.values() for lost, at in report["known"].items()]
    known = [at - struck[lost] for lost, at in told if lost in struck]
    problem = broken_promise(victims, ended, struck, reports, known)
    slowest = max(known, default=None)
    return Outcome(
        WRONG if problem else SURVIVED, fault, f"{problem}\n{ended.output[-4000:]}" if problem else "", slowest
    )


def found_in(output: str) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Return when each victim was struck, and the reports of the survivors, by rank."""
    lines = output.splitlines()
    found = []
    for mark in (survivors_load.STRUCK, survivors_load.SURVIVOR):
        entries = [json.loads(line.partition(mark)[2]) for line in lines if mark in line]
        found.append(dict(entries))
    return found[0], found[1]


def broken_promise(victims: set[int], ended: jobs.Ended, struck: Any, reports: Any, known: list[float]) -> str:
    """Return which promise a job has not kept, or an empty text."""
    if ended.status != 0:
        return f"its exit status was {ended.status}"
    if set(struck) != victims or set(reports) != set(range(SIZE)) - victims:
        return f"the ranks {sorted(struck)} were struck, and {sorted(reports)} came to their end"
    if ended.left:
        return f"the processes {ended.left} are left"
    for rank, report in reports.items():
        if report["wrong"] or report["left"]:
            return f"rank {rank}: {report['wrong'][:3]} {report['left'][:3]}"
        if set(map(int, report["known"])) != victims:
            return f"rank {rank} knows of {sorted(report['known'])}"
    return f"it took {max(known):.2f} s to know" if max(known) > KNOWN_SECONDS * patience() else ""
