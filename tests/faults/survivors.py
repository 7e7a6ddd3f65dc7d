"""Ranks that are killed in jobs that survive: the others go on, know who is lost, and hold nothing at the end."""

import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from faults import jobs, survivors_load
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome, patience

SECONDS = 1.5
KNOWN_SECONDS = 0.5
LIMIT = 60.0
UNRULY = 0.25  # the share of the jobs in which messages come late
MOST, FEWEST_RANKS = 7, 4


class Struck(NamedTuple):
    """A job of ``size`` ranks after its end, in which some were killed."""

    size: int
    victims: set[int]
    ended: jobs.Ended
    fault: str

    def outcome(self, problem: str, seconds: float | None) -> Outcome:
        kind = HUNG if self.ended.status is None else WRONG if problem else SURVIVED
        text = f"{problem}\n{self.ended.output[-4000:]}" if problem else ""
        return Outcome(kind, self.fault, text, seconds)


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed at random moments of a load of calls, references and contexts."""
    ratios: list[float] = []
    yield from judged_kills(
        lambda one: judge(one, ratios), struck_jobs("faults.survivors_load", SECONDS, count, seed, unruly=UNRULY)
    )
    if len(ratios) > 1:
        *_, most = statistics.quantiles(ratios, n=10)
        median = statistics.median(ratios)
        print(f"survivors' next calls: {median:.2f} times the median of their calls, nine of ten below {most:.2f}")


def judged_kills(judge: Callable[[Struck], Outcome], struck: Iterable[Struck]) -> Iterator[Outcome]:
    """Yield an outcome for each kill: that of its job."""
    for one in struck:
        yield from [judge(one)] * len(one.victims)


def struck_jobs(program: str, seconds: float, kills: int, seed: int, *, unruly: float = 0.0) -> Iterator[Struck]:
    """Run jobs of a program that survive kills at random moments; a share of them over an unruly transport.

    In a job up to ``MOST`` ranks are killed, since to start a rank takes longer than to survive its death.
    """
    chance = random.Random(seed)
    while kills:
        number = min(kills, chance.randint(1, MOST))
        kills -= number
        size = max(FEWEST_RANKS, number + chance.randint(1, 3))
        victims = chance.sample(range(size), number)
        asked = ["--victims", *map(str, victims)]
        asked += ["--after", *(f"{moment:.4f}" for moment in moments(chance, number, seconds))]
        asked += ["--unruly"] * (chance.random() < unruly)
        arguments = ["-m", program, *asked, "--seconds", str(seconds), "--seed", str(chance.randrange(1 << 20))]
        ended = jobs.run(size, arguments, limit=LIMIT, settings={}, options=["--survive"])
        yield Struck(size, set(victims), ended, f"{size} ranks, {' '.join(arguments)}")


def moments(chance: random.Random, number: int, seconds: float) -> list[float]:
    """Draw the moments of kills: every other time, the later ones while the first is dealt with."""
    first, *later = (chance.uniform(0.0, 0.9 * seconds) for _ in range(number))
    if chance.random() < 0.5:
        later = [first + chance.expovariate(100) for _ in later]
    return [first, *later]


def judge(struck: Struck, ratios: list[float]) -> Outcome:
    """Judge a job by what its survivors say; add to ``ratios`` how their calls went on."""
    if struck.ended.status is None:
        return struck.outcome("it stood still", None)
    moments, reports = found_in(struck.ended.output)
    told = [(int(lost), at) for report in reports.values() for lost, at in report["known"].items()]
    known = [at - moments[lost] for lost, at in told if lost in moments]
    ratios.extend(next_calls(moments, reports))
    return struck.outcome(broken_promise(struck, moments, reports, known), max(known, default=None))


def found_in(output: str) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Return when each victim was struck, and the reports of the survivors, by rank."""
    lines = output.splitlines()
    found = []
    for mark in (survivors_load.STRUCK, survivors_load.SURVIVOR):
        entries = [json.loads(line.partition(mark)[2]) for line in lines if mark in line]
        found.append(dict(entries))
    return found[0], found[1]


def unlike(struck: Struck, moments: Any, reports: Any) -> str:
    """Return how the end of a job was not that of its survivors, or an empty text."""
    if struck.ended.status != 0:
        return f"its exit status was {struck.ended.status}"
    if set(moments) != struck.victims or set(reports) != set(range(struck.size)) - struck.victims:
        return f"the ranks {sorted(moments)} were struck, and {sorted(reports)} came to their end"
    return f"the processes {struck.ended.left} are left" if struck.ended.left else ""


def broken_promise(struck: Struck, moments: Any, reports: Any, known: list[float]) -> str:
    """Return which promise a job has not kept, or an empty text."""
    if problem := unlike(struck, moments, reports):
        return problem
    for rank, report in reports.items():
        if report["wrong"] or report["left"]:
            return f"rank {rank}: {report['wrong'][:3]} {report['left'][:3]}"
        if set(map(int, report["known"])) != struck.victims:
            return f"rank {rank} knows of {sorted(report['known'])}"
    if max(known) > KNOWN_SECONDS * patience():
        return f"it took {max(known):.2f} s to know"
    late = max(waits(moments, reports), default=0.0)
    return f"a wait for the dead went on for {late:.2f} s" if late > KNOWN_SECONDS * patience() else ""


def waits(moments: Any, reports: Any) -> Iterator[float]:
    """Yield for how long after its end, or after the beginning of the wait, somebody waited for a lost worker."""
    for report in reports.values():
        for lost, begun, ended in report["waits"]:
            yield ended - max(begun, moments[lost])


def next_calls(moments: Any, reports: Any) -> Iterator[float]:
    """Yield how much longer than usual each survivor's first call to another took that it made after a death."""
    for report in reports.values():
        calls = [(start, seconds) for to, start, seconds in report["calls"] if to in reports]
        usual = statistics.median([seconds for _, seconds in calls] or [0.0])
        for moment in moments.values():
            yield from [seconds / usual for start, seconds in calls if start > moment][:1]
