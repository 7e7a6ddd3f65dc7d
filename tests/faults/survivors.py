"""Ranks that are killed in jobs that survive: the others go on, know who is lost, and hold nothing at the end."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from faults import jobs, survivors_load
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome, patience

SIZE = 4
SECONDS = 1.5
KNOWN_SECONDS = 0.5
LIMIT = 60.0
TWICE = 0.3  # the share of jobs in which two ranks are killed


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed at random moments of a load of calls, references and contexts."""
    return itertools.starmap(judge, struck_jobs("faults.survivors_load", SECONDS, count, seed))


def struck_jobs(program: str, seconds: float, count: int, seed: int) -> Iterator[tuple[set[int], jobs.Ended, str]]:
    """Run jobs of a program that survive kills at random moments; yield who was killed, the end, and the fault."""
    chance = random.Random(seed)
    for _ in range(count):
        victims = chance.sample(range(SIZE), 2 if chance.random() < TWICE else 1)
        moments = [chance.uniform(0.0, 0.9 * seconds) for _ in victims]
        if len(victims) == 2 and chance.random() < 0.5:
            moments[1] = moments[0] + chance.expovariate(100)  # while the others deal with the first death
        after = [f"{moment:.4f}" for moment in moments]
        asked = ["--victims", *map(str, victims), "--after", *after, "--seconds", str(seconds)]
        arguments = ["-m", program, *asked, "--seed", str(chance.randrange(1 << 20))]
        ended = jobs.run(SIZE, arguments, limit=LIMIT, settings={}, options=["--survive"])
        yield set(victims), ended, " ".join(arguments)


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
