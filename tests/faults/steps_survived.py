"""Ranks that are killed in data-parallel steps of jobs that survive: the others go on, with the right bits."""

from collections.abc import Iterator
from typing import Any

from faults.outcomes import Outcome, patience
from faults.survivors import Struck, found_in, judged_kills, struck_jobs, unlike

SECONDS = 1.0
GOOD_STEP_SECONDS = 1.0


def killed(count: int, seed: int) -> Iterator[Outcome]:
    """Ranks killed at random moments of a training."""
    return judged_kills(judge, struck_jobs("faults.steps_survived_load", SECONDS, count, seed))


def judge(struck: Struck) -> Outcome:
    """Judge a job by what its survivors say."""
    if struck.ended.status is None:
        return struck.outcome("it stood still", None)
    moments, reports = found_in(struck.ended.output)
    waits = [wait for report in reports.values() for wait in first_good(struck.size, report, moments)]
    return struck.outcome(broken_promise(struck, moments, reports, waits), max(waits, default=None))


def first_good(size: int, report: dict[str, Any], moments: dict[int, float]) -> list[float]:
    """Return the seconds from the last strike before each loss until the first step without the lost had ended."""
    sizes = report["sizes"]
    smaller = [report["ended"][k] for k in range(len(sizes)) if sizes[k] < (sizes[k - 1] if k else size)]
    return [end - max((at for at in moments.values() if at <= end), default=end) for end in smaller]


def broken_promise(struck: Struck, moments: Any, reports: Any, waits: list[float]) -> str:
    """Return which promise a job has not kept, or an empty text."""
    if problem := unlike(struck, moments, reports):
        return problem
    first = next(iter(reports.values()))
    for rank, report in reports.items():
        if report["left"]:
            return f"rank {rank}: {report['left'][:3]}"
        if (report["sizes"], report["digests"]) != (first["sizes"], first["digests"]):
            return f"rank {rank} has taken other steps: {parted(report, first)}"
        if report["sizes"][-1] != struck.size - len(struck.victims):
            return f"rank {rank}: the last step was one of {report['sizes'][-1]} ranks"
        if report["again"] != report["digests"][-len(report["again"]) :]:
            return f"rank {rank}: the steps without the lost have other bits"
    return f"the first good step came after {max(waits):.2f} s" if max(waits) > GOOD_STEP_SECONDS * patience() else ""


def parted(report: dict[str, Any], first: dict[str, Any]) -> str:
    """Return where two ranks' steps begin to differ."""
    each = zip(report["sizes"], first["sizes"], report["digests"], first["digests"], strict=False)
    at = next((k for k, (size, its, digest, other) in enumerate(each) if (size, digest) != (its, other)), None)
    return f"{len(report['sizes'])} and {len(first['sizes'])} in number, different from the one with index {at} on"
