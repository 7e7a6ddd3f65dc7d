"""Job of tesseract.py: rank 0 calls a function on rank 1, and in turn the same function behind Tesseract's server."""

import contextlib
import importlib.util
import pathlib
import statistics
import sys
import tempfile

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, median, report

import jdistgrad as jd

API = pathlib.Path(__file__).parents[1] / "tesseract_api.py"
INSTALLED = all(map(importlib.util.find_spec, ("tesseract_core", "tesseract_jax", "uvicorn")))
SIZES = {"small": (1000, 50), "large": (few(10_000_000, 1000), 3)}  # numbers, calls in each turn


@jax.jit
def square(x):
    return x * x


def value_and_gradient(function):
    """Return functions for the value, and for the gradient of a loss whose cotangents are unequal numbers."""
    return [function, jax.value_and_grad(lambda x: jnp.sum(function(x) ** 2))]


def by_jdistgrad():
    value, gradient = value_and_gradient(jd.on(1, square))
    step = jd.jit(gradient)

    def in_context(x):
        with jd.context():
            return step(x)

    return [value, in_context]


@contextlib.contextmanager
def served(**settings):
    """Open a block in which a process serves tesseract_api.py by HTTP; yield how to call it through tesseract-jax."""
    from tesseract_core import Tesseract
    from tesseract_jax import apply_tesseract

    with Tesseract.from_source(API, python_executable=sys.executable, **settings) as tesseract:
        yield [jax.jit(one) for one in value_and_gradient(lambda x: apply_tesseract(tesseract, {"x": x})["y"])]


@contextlib.contextmanager
def both_formats():
    """Yield the functions of both ways in which Tesseract sends arrays: in the text, and as files in shared memory."""
    if not INSTALLED:
        yield {}
        return
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")) for _ in range(2)]
        files = {"output_format": "json+binref", "experimental_binref_pool": True}
        files |= dict(zip(("input_path", "output_path"), paths, strict=True))
        yield {
            "base64": stack.enter_context(served()),
            "files": stack.enter_context(served(**files)),
        }


def measure(ways):
    for size, (n, calls) in SIZES.items():
        x = jnp.linspace(0.0, 1.0, n)
        for k, what in enumerate(("value", "gradient")):
            runs = [lambda run=run[k], x=x: jax.block_until_ready(run(x)) for run in ways.values()]
            turns = [[median(run, calls, warm_up=3) for run in runs] for _ in range(few(5))]
            for way, medians in zip(ways, zip(*turns, strict=True), strict=True):
                report(**{f"{what}_{size}_{way}": statistics.median(medians)})


def main():
    me = jd.init()
    if me.rank == 0:
        with both_formats() as others:
            measure({"jdistgrad": by_jdistgrad()} | others)
    jd.shutdown()


if __name__ == "__main__":
    main()
