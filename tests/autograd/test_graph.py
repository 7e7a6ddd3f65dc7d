"""The recorded graph of a context: its pairs, their order, and the picture of them."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.autograd.graph import CALL, GRADIENT, LONGEST, RESULT, VALUE, Pair, draw, pairs, placed, short
from jdistgrad.autograd.tape.tape import Link
from jdistgrad.wire.message import spell, worker_of


def square(x):
    return x * x


def square_elsewhere(x, rank):
    return jd.rpc_sync(rank, square, args=(x,)) + x


def both(p, q):
    return p * q


def routes(graph):
    return [(pair.kind, pair.source, pair.target, pair.depth, pair.pulled) for pair in graph.pairs]


def recorded(loss, *args):
    """Return the graph of a loss's derivative."""
    with jd.context() as ctx:
        jd.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)
        return ctx.graph()


X = jnp.arange(3.0) + 1


@on_worker0
def test_a_call_is_two_pairs_and_both_are_pulled(world):
    graph = recorded(lambda x: jnp.sum(jd.rpc_sync(last(), square, args=(x,))), X)
    assert routes(graph) == [(CALL, 0, last(), 0, 1), (RESULT, last(), 0, 0, 1)]
    assert [worker_of(pair.message) for pair in graph.pairs] == [0, last()]
    assert all("test_graph.square" in pair.what for pair in graph.pairs)
    assert graph.workers == {rank: f"worker{rank}" for rank in sorted({0, last()})}


@on_worker0
def test_nested_calls_stand_inside_the_call_that_made_them(big_world):
    graph = recorded(lambda x: jnp.sum(jd.rpc_sync(1, square_elsewhere, args=(x, 2))), X)
    assert routes(graph) == [(CALL, 0, 1, 0, 1), (CALL, 1, 2, 1, 1), (RESULT, 2, 1, 1, 1), (RESULT, 1, 0, 0, 1)]


@on_worker0
def test_a_value_has_one_pair_and_its_gradient_goes_back_on_it(big_world):
    def loss(x):
        made = jd.remote(2, square, args=(x,))
        return jnp.sum(jd.rpc_sync(1, both, args=(made, x)) * made.to_here())

    graph = recorded(loss, X)
    assert routes(graph) == [
        (CALL, 0, 2, 0, 1),
        (CALL, 0, 1, 0, 1),
        (VALUE, 2, 1, 1, 1),
        (RESULT, 1, 0, 0, 1),
        (VALUE, 2, 0, 0, 1),
    ]


@on_worker0
def test_many_pullbacks_of_one_call_are_counted(world):
    with jd.context() as ctx:
        value, pull = jax.vjp(lambda x: jd.rpc_sync(last(), square, args=(x,)), X)
        for scale in (1, 2, 3):
            pull(value * scale)
        graph = ctx.graph()
    assert [pair.pulled for pair in graph.pairs] == [3, 3]
    assert "(3 times)" in str(graph)
    assert ">x3<" in graph._repr_svg_()


@on_worker0
def test_the_staged_step_records_the_same_graph(world):
    def loss(x):
        return jnp.sum(jd.rpc_sync(last(), square, args=(x,)))

    with jd.context() as ctx:
        jd.jit(jd.value_and_grad(loss))(X)
        graph = ctx.graph()
    assert routes(graph) == routes(recorded(loss, X))


@on_worker0
def test_a_closed_context_has_no_graph_but_one_taken_before_stays(world):
    with jd.context() as ctx:
        jd.value_and_grad(lambda x: jnp.sum(jd.rpc_sync(last(), square, args=(x,))))(X)
        graph, shown = ctx.graph(), ctx._repr_svg_()
    assert graph._repr_svg_() == shown
    assert ctx._repr_svg_() is None
    with pytest.raises(jd.ContextError):
        ctx.graph()


@on_worker0
def test_the_file_is_an_svg_with_every_id_and_name(world, tmp_path):
    graph = recorded(lambda x: jnp.sum(jd.rpc_sync(last(), square_elsewhere, args=(x, 0))), X)
    graph.save(tmp_path / "graph.svg")
    root = ElementTree.parse(tmp_path / "graph.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    ids = {spell(pair.message) for pair in graph.pairs}
    assert texts >= {f"{end} {one}" for end in ("send", "recv") for one in ids}
    assert texts >= {"square", "square_elsewhere", *graph.workers.values()}


# Pure functions, without a world.


def chain(length):
    """Return the links of nested calls, in which worker k calls worker k + 1 while it serves the call before."""
    calls = [Link(k, k, k + 1, f"f{k}", caused_by=k - 1 if k else None) for k in range(length)]
    answers = [Link(100 + k, k + 1, k, f"f{k}", caused_by=k, answers=k) for k in range(length)]
    return calls + answers


def test_causes_come_first_however_deep():
    found = pairs(chain(40))
    assert [pair.message for pair in found] == [*range(40), *range(139, 99, -1)]
    assert [pair.depth for pair in found] == [*range(40), *range(39, -1, -1)]


def test_a_gradient_whose_value_was_not_seen_to_come_stands_by_itself():
    found = pairs([Link(7, 1, 0, "gradient of 0:3", backward=True, reference=3)] * 2)
    assert found == [Pair(7, 0, 1, "gradient of 0:3", GRADIENT, pulled=1)]
    assert 'class="backward" d="M' in draw("", {0: "a", 1: "b"}, found)


def test_no_two_boxes_share_a_place():
    boxes, _ = placed(pairs([*chain(5), Link(50, 2, 2, "own"), Link(51, 2, 2, "own", answers=50)]))
    assert len({(box.rank, box.row) for box in boxes}) == len(boxes)


def test_long_names_are_shortened_and_escaped():
    name = "module.<locals>." + "a" * 80
    assert len(short(name)) == LONGEST
    assert name.replace("<", "&lt;").replace(">", "&gt;") in draw("", {0: "a", 1: "b"}, [Pair(1, 0, 1, name, CALL)])
