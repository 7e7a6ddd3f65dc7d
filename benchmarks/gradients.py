"""Benchmark of gradients across calls: jdistgrad's staged step against PyTorch's distributed autograd.

    python benchmarks/gradients.py            # make bench

PyTorch (2.13) is optional: without PyTorch, its columns stay empty.
"""

import statistics

from measure import compare, ended, microseconds, milliseconds, options, row, section, take_turns


def table(found):
    ours, torch = found["jdistgrad"], found.get("torch", {})
    cases = [
        ("the note's 3x3 example, a whole context", "note", "<= 0.3 x", microseconds),
        ("chain of 8 calls in one context", "chain_8", "<= 0.3 x", microseconds),
        ("1024x1024 elementwise, both arguments sent", "large", "<= 0.7 x", milliseconds),
        ("the note's end-to-end loop, an iteration", "end_to_end", "<= 0.4 x", microseconds),
    ]
    cases.append(("eager value_and_grad of a call of 1,000 numbers, no context", "eager", "<= 0.7 x", milliseconds))
    for what, figure, target, unit in cases:
        compare(what, unit, ours[figure], "torch", torch.get(figure), target)
    what = "the same, the optimizer's step staged too"
    compare(what, microseconds, ours["step_inside"], "apart", ours["end_to_end"], "<= 0.85 x")
    what = "a loop whose loss is computed there, the step staged too"
    compare(what, microseconds, ours["loss_there_inside"], "apart", ours["loss_there"], "<= 0.85 x")
    what = "diffrax's Tsit5 over a remote function, its gradient"
    compare(what, milliseconds, ours["solver"], "bare calls", ours["solver_calls"], "<= 1.5 x")
    bare, note = statistics.median(ours["bare"]), statistics.median(ours["note"])
    own = f"{(note - 2 * bare) / 2 * 1e6:.0f} us"
    row("the same, without its two bare calls, per boundary", own, f"bare {bare * 1e6:.0f} us", "", "<= 30 us")
    for count in (1, 10, 100):
        seconds = [value / count for value in ours[f"chain_{count}"]]
        others = [value / count for value in torch[f"chain_{count}"]] if torch else None
        compare(f"per call, {count} calls in one context", microseconds, seconds, "torch", others, "constant")
    for count in (1, 10, 100):
        row(
            f"the note's example beside {count} open contexts",
            microseconds(ours[f"contexts_{count}"]),
            "",
            "",
            "constant",
        )


def main(chosen):
    names = ["jdistgrad", *(["torch"] if chosen.torch else [])]
    with section(f"gradients, jdistgrad run -n 2; medians of {chosen.rounds} jobs each, in turn"):
        table(take_turns("gradients", names, chosen.rounds))


if __name__ == "__main__":
    main(options(__doc__))
    ended()
