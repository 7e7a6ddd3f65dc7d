"""Prints the tables of docs/programs/first-mistakes.md: what somebody may try first, and the error that answers.

python docs/programs/first_mistakes.py --write    # into that file: what to do after a change of an error's words
"""

import contextlib
import io
import pathlib
import pickle
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdistgrad as jd


def make(count):
    return jnp.arange(1.0, count + 1)


def double(x):
    return 2 * x


def loss_fn(params):
    return jnp.sum((params.to_here() if isinstance(params, jd.RRef) else params) ** 2)


MISTAKES = {
    "Worlds and calls": """
        jd.init()
        jd.DDP(model)
        jd.rpc_snyc("worker1", double, args=(x,))
        jd.on("worker9", double)(x)
        jd.on(double, "worker1")
        jd.on("worker1", double(x))
        jd.on("worker1", double)()
        jd.on("worker1", double, timeout=0)(x)
        jd.on("worker1", double, args=(x,))
        jd.rpc_sync("worker1", double, x)
        jd.rpc_sync("worker1", double, x=x)
        jd.on("worker1", double).start(x).wait()
        jd.on("worker1", double).start(x).value()
        jd.on("worker1", double).start(x) + 1
        jd.map(double, [1, 2, 3], workers=[])
    """,
    "References": """
        reference.apply(x)
        reference + 1
        1 - reference
        x @ reference
        np.ones(3) * reference
        -reference
        reference < 1
        float(reference)
        len(reference)
        np.asarray(reference)
        reference.owner()
        reference.local_value()
        jd.by_reference(x)
        pickle.dumps(reference)
        module.params
    """,
    "Gradients": """
        jd.backward(ctx, [loss])
        jd.backward(ctx, loss)
        jd.value_and_grad(loss)
        jd.backward(ctx, loss_fn)
        ctx.gradients
        jd.get_gradients(12345)
        with jd.context(): pass
        jd.grad(double)(x)
        jax.grad(loss_fn)(reference).to_here()
        jd.grad(loss_fn)(reference) * 0.1
        jd.jit(loss_fn(x))
    """,
    "Optimizers": """
        jd.DistributedOptimizer(optax.sgd, [reference], lr=0.1)
        jd.DistributedOptimizer(optax.sgd(0.1), reference)
        jd.DistributedOptimizer(optax.sgd(0.1), [x])
        optimizer.zero_grad()
        optimizer.state_dict()
        optimizer.step()
        optimizer.step(closed)
        optimizer.step(x)
        jax.jit(lambda p: optimizer.step(jd.grad(loss_fn)(p)))(reference)
        optax.adam(0.1).init(reference)
        optax.apply_updates(reference, reference)
    """,
    "Data parallelism": """
        jd.DataParallel(model)
        jd.DataParallel(bucket_cap_mb=0)
        dp.module
        dp.allreduce(x)
        dp.all_reduce(x)
        dp.value_and_grad(loss_fn)(jnp.arange(3))
        dp.average({"w": x, "step": 3})
    """,
}


def answer(code, names):
    """Return the error that a line of code raises, as text."""
    try:
        exec(code, names)
    except Exception as error:
        text = str(error).split("\n", 1)[0]
        return f"{type(error).__name__}: " + re.sub(r" at 0x[0-9a-f]+", "", text)
    raise AssertionError(f"{code} raised nothing")


def main():
    with jd.local_workers(3):
        reference, x = jd.on("worker1", make).keep(3), jnp.ones(3)
        names = {"jd": jd, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "pickle": pickle, "loss_fn": loss_fn}
        names |= {"double": double, "reference": reference, "x": x, "model": double, "loss": loss_fn(x)}
        names["optimizer"] = jd.DistributedOptimizer(optax.sgd(0.1), [reference])
        names["module"] = jd.RemoteFunction("worker1", reference, double)
        names["dp"] = jd.DataParallel(jd.collectives.Local([0]))
        with jd.context() as closed:
            pass
        with jd.context() as ctx:
            names |= {"ctx": ctx, "closed": closed}
            for title, lines in MISTAKES.items():
                print(f"## {title}\n\n| code | answer |\n|---|---|")
                for code in lines.strip().splitlines():
                    text = answer(code.strip(), names).replace("|", "\\|").replace("`", "'")
                    print(f"| `{code.strip()}` | `{text}` |")  # as code: names such as __main__ and <function f> stay
                print()
        names.clear()
        del reference


if __name__ == "__main__":
    if "--write" in sys.argv:
        page = pathlib.Path(__file__).parent / "first-mistakes.md"
        with contextlib.redirect_stdout(io.StringIO()) as tables:
            main()
        page.write_text(page.read_text().split("\n## ")[0] + "\n" + tables.getvalue().rstrip() + "\n")
    else:
        main()
