"""Ranks that are killed in data-parallel steps of jobs that survive: the others go on, with the right bits."""

from collections.abc import Iterator
from typing import Any

from faults import jobs
from faults.outcomes import HUNG, SURVIVED, WRONG, Outcome, patience
from faults.survivors import SIZE, found_in, judged_kills, struck_jobs

SECONDS = 1.0
GOOD_STEP_SECONDS = 1.0


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed at random moments of a training."""
    return judged_kills(judge, struck_jobs("faults.steps_survived_load", SECONDS, count, seed))


def judge(victims: set[int], ended: jobs.Ended, fault: str) -> Outcome:
    """Judge a job by what its survivors say."""
    if ended.status is None:
        return Outcome(HUNG, fault, f"it stood still\n{ended.output[-4000:]}")
    struck, reports = found_in(ended.output)
    waits = [wait for report in reports.values() for wait in first_good(report, struck)]
    problem = broken_promise(victims, ended, struck, reports, waits)
    text = f"{problem}\n{ended.output[-4000:]}" if problem else ""
    return Outcome(WRONG if problem else SURVIVED, fault, text, max(waits, default=None))


def first_good(report: dict[str, Any], struck: dict[int, float]) -> list[float]:
    """Return the seconds from the last strike before each loss until the first step without the lost had ended."""
    sizes = report["sizes"]
    smaller = [report["ended"][k] for k in range(len(sizes)) if sizes[k] < (sizes[k - 1] if k else SIZE)]
    return [end - max((at for at in struck.values() if at <= end), default=end) for end in smaller]


def broken_promise(victims: set[int], ended: jobs.Ended, struck: Any, reports: Any, waits: list[float]) -> str:
    """Return which promise a job has not kept, or an empty text."""
    if ended.status != 0:
        return f"its exit status was {ended.status}"
    if set(struck) != victims or set(reports) != set(range(SIZE)) - victims:
        return f"the ranks {sorted(struck)} were struck, and {sorted(reports)} came to their end"
    if ended.left:
        return f"the processes {ended.left} are left"
    first = next(iter(reports.values()))
    for rank, report in reports.items():
        if report["left"]:
            return f"rank {rank}: {report['left'][:3]}"
        if (report["sizes"], report["digests"]) != (first["sizes"], first["digests"]):
            return f"rank {rank} has taken other steps: {parted(report, first)}"
        if report["sizes"][-1] != SIZE - len(victims):
            return f"rank {rank}: the last step was one of {report['sizes'][-1]} ranks"
        if report["again"] != report["digests"][-len(report["again"]) :]:
            return f"rank {rank}: the steps without the lost have other bits"
    return f"the first good step came after {max(waits):.2f} s" if max(waits) > GOOD_STEP_SECONDS * patience() else ""


def parted(report: dict[str, Any], first: dict[str, Any]) -> str:
    """Return where two ranks' steps begin to differ."""
    each = zip(report["sizes"], first["sizes"], report["digests"], first["digests"], strict=False)
    at = next((k for k, (size, its, digest, other) in enumerate(each) if (size, digest) != (its, other)), None)
    return f"{len(report['sizes'])} and {len(first['sizes'])} in number, different from the one with index {at} on"
