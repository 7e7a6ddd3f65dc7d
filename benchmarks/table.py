"""All benchmarks in one run, with the whole table as text and as a picture.

    python benchmarks/table.py            # make bench

This writes build/benchmarks/table.txt, and build/benchmarks/table.svg, which shows for each comparison with PyTorch our
time as a share of PyTorch's time, and the target.
"""

import datetime
import importlib.util
import pathlib
import platform
import re

import calls
import data_parallel
import devices
import gradients
import local
import pipelines
import surviving
import tesseract
from measure import ROWS, Row, ended, options

FOLDER = pathlib.Path(__file__).parents[1] / "build" / "benchmarks"
WIDTH = "{:<54} {:>12} {:>22} {:>7}   {}"


def shares(rows: list[Row]) -> list[tuple[str, float, float | None]]:
    """Return for each comparison with PyTorch its name, our time as a share of PyTorch's, and the target."""
    found = []
    for row in rows:
        if row.other.startswith("torch ") and row.compared:
            of_time = -1 if row.ours.endswith("/s") else 1  # a rate: more is better
            number = re.search(r"[\d.]+", row.target)
            found.append((row.what.strip(), float(row.compared) ** of_time, number and float(number[0]) ** of_time))
    return found


def plot(found: list[tuple[str, float, float | None]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.32 * len(found) + 1), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(found), 0, -1)
    for place, (_, share, target) in zip(places, found, strict=True):
        axes.barh(place, share, color="#3b7dd8" if share < 1 else "#d8733b", height=0.7)
        axes.text(share, place, f" {share:.2f}", va="center", fontsize=8)
        if target is not None:
            axes.plot([target, target], [place - 0.4, place + 0.4], color="black")
    axes.axvline(1, color="gray", linestyle="--", linewidth=1)
    axes.set_yticks(list(places), [what for what, *_ in found], fontsize=8)
    axes.set_xlabel("time, as a share of PyTorch's (less is better); black: the target")
    figure.savefig(path)


def main() -> None:
    chosen = options(__doc__)
    for topic in (calls, local, gradients, data_parallel, devices, pipelines, surviving, tesseract):
        topic.main(chosen)
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}"
    text = "\n".join([made, *(WIDTH.format(*row).rstrip() for row in ROWS)])
    (FOLDER / "table.txt").write_text(text + "\n")
    print(f"\n{FOLDER / 'table.txt'}")
    if not chosen.torch:
        print("no picture: it compares with PyTorch, and there is none. pip install torch==2.13.0, or make bench")
    elif importlib.util.find_spec("matplotlib") is None:
        print("no picture: pip install matplotlib")
    else:
        plot(shares(ROWS), FOLDER / "table.svg")
        print(FOLDER / "table.svg")
    ended()


if __name__ == "__main__":
    main()
