"""The recorded graph of a context: which messages its workers sent each other, and where gradients came back."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from jdistgrad.autograd.graph.pairs import CALL, GRADIENT, RESULT, Pair, pairs
from jdistgrad.autograd.graph.picture import draw
from jdistgrad.autograd.tape.links import Link
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.current import within
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import spell


@dataclasses.dataclass(frozen=True)
class Graph:
    """The result of ``ctx.graph()``; it outlives the context. ``str`` gives a table, and a notebook shows the picture.

    Example:
      >>> with jd.context() as ctx:
      ...     loss, gradients = jd.value_and_grad(loss_fn)(params)
      ...     print(ctx.graph())
      ...     ctx.graph().save("graph.svg")
    """

    context: int
    workers: Mapping[int, str]  # names by rank
    pairs: tuple[Pair, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, as SVG."""
        pathlib.Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return draw(f"context {spell(self.context)}", self.workers, self.pairs)

    def __str__(self) -> str:
        table = [("message", "forward", "backward", "what"), *map(self._row, self.pairs)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        title = f"context {spell(self.context)}: {len(self.workers)} workers, {len(self.pairs)} messages"
        return "\n".join(line.rstrip() for line in [title, *lines])

    def _row(self, pair: Pair) -> tuple[str, str, str, str]:
        source, target = self.workers[pair.source], self.workers[pair.target]
        forward = "" if pair.kind is GRADIENT else f"{source} -> {target}"
        backward = f"{source} <- {target}{times(pair.pulled)}" if pair.pulled else ""
        return spell(pair.message), "  " * pair.depth + forward, backward, in_words(pair)


def in_words(pair: Pair) -> str:
    """Describe in words what a pair carries."""
    return {CALL: "call of ", RESULT: "result of "}.get(pair.kind, "") + pair.what


def times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def gather(scope: Scope) -> Graph:
    """Gather the graph of a context from this worker and every worker that was called in the context."""
    worker = current_worker()
    found: dict[int, list[Link]] = {}
    wave = {worker.rank}
    with within(None):  # reading a context must not make a worker take part in it
        while wave:
            asked = {rank: worker.rpc_async(rank, part_of, (scope.id,), {}, None) for rank in sorted(wave)}
            parts = {rank: future.result() for rank, future in asked.items()}
            found |= {rank: links for rank, (links, _) in parts.items()}
            wave = {peer for _, peers in parts.values() for peer in peers} - set(found)
    names = {rank: worker.directory.workers[rank].name for rank in sorted(found)}
    return Graph(scope.id, names, tuple(pairs([link for links in found.values() for link in links])))


def part_of(context: int) -> tuple[list[Link], set[int]]:
    """Return this worker's part of a context: the links it sent, and the ranks it called."""
    scope = current_worker().scopes.find(context)
    return scope.content(Tape).links.all(), scope.peers()
