"""Events as a trace file: tracks, merging, and files that are not traces."""

import itertools

import pytest
from hypothesis import given, strategies as st

from jdistgrad.cli.main import main
from jdistgrad.errors import TimelineError
from jdistgrad.events import Event
from jdistgrad.observe import timeline as chrome

SPANS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)).map(lambda one: (one[0], one[0] + one[1])))


def event(kind="call", rank=0, start=1.0, end=2.0, **details):
    return Event(kind, rank, f"worker{rank}", "f", start, end, details)


@given(SPANS.map(sorted))
def test_what_overlaps_stands_beside_each_other_and_nothing_else_does(spans):
    lanes = chrome.beside(spans)
    for lane in set(lanes):
        mine = [span for span, place in zip(spans, lanes, strict=True) if place == lane]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    at_once = [sum(a <= start < b for a, b in spans) for start, _ in spans]
    assert len(set(lanes)) <= max(at_once, default=0) + sum(a == b for a, b in spans)


def test_a_rank_has_the_names_of_all_its_workers():
    events = [event(), event(start=3.0, end=4.0)._replace(worker="learner"), event(rank=1)._replace(worker="")]
    entries = chrome.to_trace(events, host="a", epoch=0.0)["traceEvents"]
    names = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {0: "worker0, learner", 1: "rank 1"}


def test_merged_files_share_a_clock_that_begins_at_zero():
    one = chrome.to_trace([event(rank=0, start=5.0, end=6.0, call="0:1")], host="a", epoch=100.0)
    same_host = chrome.to_trace([event("serve", rank=1, start=5.5, end=5.6, call="0:1")], host="a", epoch=100.2)
    other_host = chrome.to_trace([event("serve", rank=2, start=90.0, end=91.0)], host="b", epoch=16.0)
    merged = chrome.merge({"one": one, "two": same_host, "three": other_host})
    starts = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert starts == {0: 0.0, 1: pytest.approx(0.5e6), 2: pytest.approx(1e6)}
    assert {e["ph"]: e["id"] for e in merged["traceEvents"] if "id" in e} == {"s": "0:1", "f": "0:1"}


def test_one_rank_twice_is_refused():
    trace = chrome.to_trace([event(rank=1)], host="a", epoch=0.0)
    with pytest.raises(TimelineError):
        chrome.merge({"a.json": trace, "b.json": trace})


def test_the_command_merges_and_draws(tmp_path, capsys):
    for rank in range(3):
        trace = chrome.to_trace([event(rank=rank, start=rank, end=rank + 1)], host="a", epoch=0.0)
        chrome.write(trace, tmp_path / f"{rank}.json")
    files = [str(tmp_path / f"{rank}.json") for rank in range(3)]
    assert main(["trace", *files, "-o", str(tmp_path / "all.json"), "--plot", str(tmp_path / "all.png")]) == 0
    assert "3 events of 3 workers" in capsys.readouterr().out
    assert len(chrome.read(tmp_path / "all.json")["traceEvents"]) == 9
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("{", "is not a timeline of jdistgrad"), ('{"a": 1}', "is not a timeline of jdistgrad")],
)
def test_a_file_that_is_none(text, message, tmp_path, capsys):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    assert main(["trace", str(path), "-o", str(tmp_path / "out.json")]) == 2
    assert message in capsys.readouterr().err


def test_the_plot_has_a_row_for_each_track_and_says_where_nothing_is(tmp_path):
    trace = chrome.to_trace([event(), event(start=1.5), event("serve", rank=1)], host="a", epoch=0.0)
    trace["traceEvents"][0]["args"]["name"] = "$a_{$"  # a name stands there as it is
    axes = chrome.plot(trace)
    axes.figure.savefig(tmp_path / "plot.png")
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["$a_{$ calls", "$a_{$ calls (2)", "worker1 served"]
    with pytest.raises(TimelineError):
        chrome.plot(chrome.to_trace([], host="a", epoch=0.0))
