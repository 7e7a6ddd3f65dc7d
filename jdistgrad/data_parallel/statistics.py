"""Statistics of a DataParallel: sizes and times of its reductions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdistgrad import events
from jdistgrad.collectives.roll_call import Act
from jdistgrad.data_parallel.buckets import Cap
from jdistgrad.events import Event


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Totals (``steps``, ``buckets_reduced``, ``bytes_reduced``), and the plan and times of the last step.

    Bytes are those of the gradients, before a hook or the choice of rows reduces their number. Times are this rank's,
    in seconds. ``compute``: from the first dispatch until the last gradient was ready. ``communication``: time spent
    reducing, summed over the buckets. ``overlap``: the part of ``communication`` within ``compute``. ``waiting``: time
    spent waiting for other ranks to reach a bucket. ``bucket_cap_mb``: the size in use (None: the default).
    """

    rank: int = 0
    size: int = 1
    steps: int = 0
    buckets_reduced: int = 0
    bytes_reduced: int = 0
    bucket_sizes: tuple[int, ...] = ()
    bucket_leaves: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()
    hook: str = "none"
    compute: float = 0.0
    communication: float = 0.0
    overlap: float = 0.0
    waiting: float = 0.0
    spans: "tuple[BucketTimes, ...]" = ()
    bucket_cap_mb: Cap = None


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """A bucket's times by ``time.perf_counter``: its gradients ready, all ranks there, reduced."""

    bucket: int
    ready: float
    met: float
    reduced: float


def after_step(before: Statistics, plan: Any, step: Any, unused: Sequence[str], rank: int, size: int) -> Statistics:
    """Return the statistics after one more step, and report the step to the timeline.

    Arguments:
      step: the ``Handling`` of its gradients.
    """
    computed = max((span.ready for span in step.spans), default=step.started)
    updated = dataclasses.replace(
        before,
        rank=rank,
        size=size,
        steps=before.steps + 1,
        buckets_reduced=before.buckets_reduced + len(plan.buckets),
        bytes_reduced=before.bytes_reduced + sum(bucket.nbytes for bucket in plan.buckets),
        order=plan.order,
        unused=tuple(unused),
        spans=tuple(step.spans),
        bucket_sizes=tuple(bucket.nbytes for bucket in plan.buckets),
        bucket_leaves=tuple(tuple(slot.index for slot in bucket.slots) for bucket in plan.buckets),
        compute=computed - step.started,
        communication=sum(span.reduced - span.met for span in step.spans),
        overlap=sum(max(0.0, min(span.reduced, computed) - span.met) for span in step.spans),
        waiting=sum(span.met - span.ready for span in step.spans),
    )
    if events.sink is not None and updated.spans:
        if step.act is Act.REDUCE:  # else its gradients were given
            events.pass_on(Event(events.PIECE, rank, "", "backward", computed - updated.compute, computed, {}))
        for span in updated.spans:
            details = {"bytes": updated.bucket_sizes[span.bucket], "waited": span.met - span.ready}
            events.pass_on(Event(events.BUCKET, rank, "", f"bucket {span.bucket}", span.met, span.reduced, details))
    return updated
