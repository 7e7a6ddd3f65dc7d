"""The torture test's parts: the generator draws everything, the same each time; comparison and verdicts find faults."""

import functools
import json

import jax.numpy as jnp
import pytest

from torture import containers, generator, interpreter, judging, palette, pipelines, steps
from torture.programs import FEATURES, ParallelProgram, PipelineProgram, Program
from torture.watching import Ended, World, judged

MANY = range(400)


def all_nodes(nodes):
    for node in nodes:
        yield node
        yield from all_nodes(node.body)


@functools.cache
def drawn():
    return [generator.draw(seed) for seed in MANY]


def test_a_seed_is_a_program():
    assert drawn() == [generator.draw(seed) for seed in MANY]
    assert len(set(drawn())) == len(MANY)


def test_everything_is_drawn():
    programs = [one for one in drawn() if isinstance(one, Program)]
    nodes = list(all_nodes(node for one in programs for node in one.nodes))
    names = (*palette.PLAIN, *palette.ODD_RULES, *palette.OF_TYPES, "many", "inside", "noisy")
    ways = {name for name in vars(interpreter.Serial) | vars(interpreter.Remote) if name[0] != "_"} - {"local"}
    assert {node.how for node in nodes} == ways
    assert {node.function for node in nodes} - {""} == {part + name for name in names for part in ("", "fast_")}
    assert {node.pack for node in nodes} - {""} == set(containers.MAKERS)
    assert {(one.order, one.mode) for one in programs} == {
        (k, m) for k in range(4) for m in ("eager", "jd.jit", "jax.jit")
    }
    assert {one.crowd for one in programs} == {one.weak for one in programs} == {True, False}


def test_every_step_is_drawn():
    programs = [one for one in drawn() if isinstance(one, ParallelProgram)]
    assert {step.kind for one in programs for step in one.steps} == set(generator.KINDS)
    assert {step.tree for one in programs for step in one.steps} == set(steps.SHAPES)
    for program in programs:
        odd = program.odd_rank is not None
        assert odd == (program.order_of(1, 2) != program.order_of(0, 2)) == (not program.agreed(2))


def test_every_pipeline_is_drawn():
    programs = [one for one in drawn() if isinstance(one, PipelineProgram)]
    assert {name for one in programs for name in one.functions} == set(pipelines.STAGES)
    assert {len(one.functions) for one in programs} == {1, 2, 3, 4, 5}
    assert {flag for one in programs for flag in one.remat} == {True, False}
    assert any("W" in one.schedule and "B" in one.schedule for one in programs)
    assert any(len(set(one.shared)) < len(one.shared) for one in programs)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"a": jnp.array([1.0, 2.001]), "n": 3}, "off by"),
        ({"a": jnp.array([1.0, jnp.nan]), "n": 3}, "off by"),
        ({"a": jnp.array([1.0, 2.0], jnp.float16), "n": 3}, "result_type"),
        ({"a": jnp.array([[1.0, 2.0]]), "n": 3}, "shape"),
        ({"a": jnp.array([1.0, 2.0]), "n": 4}, "off by"),
        ({"a": jnp.array([1.0, 2.0])}, "structure"),
    ],
)
def test_what_differs_is_found(found, text):
    expected = {"a": jnp.array([1.0, 2.0]), "n": 3}
    (problem,) = judging.compare(found, expected, exactly=False, least_bytes=4)
    assert problem.kind == judging.MISMATCH
    assert text in problem.text


def test_the_last_digit_counts_where_the_same_operations_run():
    one, other = jnp.float32(1.0), jnp.float32(1.0 + 2**-23)
    assert judging.compare(one, other, exactly=False, least_bytes=4) == []
    assert judging.compare(one, other, exactly=True, least_bytes=4) != []


def ended(folder, status, *notes, output=""):
    for rank, entries in enumerate(notes):
        (folder / f"notes-{rank}").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "output").write_text(output)
    return Ended(folder, status, len(notes))


def done(seed, *problems):
    return {"ends": seed, "problems": problems}


def test_what_any_rank_found_counts(tmp_path):
    left = ended(tmp_path, 0, [done(1), done(2)], [done(1, ["mismatch", "of rank 1"]), done(2)])
    first, second = judged(World("mpi-2"), [1, 2], list(FEATURES), left)
    assert (first.kind, first.text, second.kind) == ("mismatch", "of rank 1", "")


@pytest.mark.parametrize(("status", "kind"), [(None, "hang"), (134, "crash"), (0, "crash")])
def test_a_batch_that_stops_at_a_program(tmp_path, status, kind):
    # One rank has not finished the second program, and the third has not begun.
    left = ended(tmp_path, status, [done(1), done(2)], [done(1)], output="the last words")
    first, second = judged(World("mpi-2"), [1, 2, 3], list(FEATURES), left)
    assert (first.kind, second.kind) == ("", kind)
    assert second.before == (1,)
    assert "the last words" in second.text
