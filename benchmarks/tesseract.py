"""Benchmark of a function in another process and its gradient, against tesseract-core's server and tesseract-jax.

    pip install "tesseract-core[runtime]" tesseract-jax
    python benchmarks/tesseract.py

Tesseract.from_source serves the function over HTTP from a process of its own, without containers. Arrays travel in the
text of its messages (json+base64, the default) or as files in shared memory (json+binref with its experimental pool).
"""

import importlib.util

from measure import compare, ended, microseconds, milliseconds, options, section, take_turns

HOW = {"base64": "HTTP", "files": "HTTP, files"}
TARGETS = {"small": "<= 0.05 x", "large": "<= 0.2 x"}
INSTALL = 'Tesseract is not installed, so its columns stay empty: pip install "tesseract-core[runtime]" tesseract-jax'


def table(found):
    for size, numbers, unit in (("small", "1,000", microseconds), ("large", "10,000,000", milliseconds)):
        for what in ("value", "gradient"):
            ours = found[f"{what}_{size}_jdistgrad"]
            for other, name in HOW.items():
                others = found.get(f"{what}_{size}_{other}")
                compare(
                    f"{what}, {numbers} numbers", unit, ours, name, others, TARGETS[size] if other == "base64" else ""
                )


def main(chosen):
    with section(f"a function in another process, beside Tesseract; medians of {chosen.rounds} jobs, in turn in each"):
        if importlib.util.find_spec("tesseract_jax") is None:
            print(INSTALL)
        table(take_turns("tesseract", ["jdistgrad"], chosen.rounds)["jdistgrad"])


if __name__ == "__main__":
    main(options(__doc__))
    ended()
