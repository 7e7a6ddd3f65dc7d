"""The examples in docstrings: they run in a world of three, with the names that they do not define."""

import contextlib
import doctest
import inspect
import io
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jdistgrad as jd

ALONE = {"spawn", "local_workers", "launched", "timeline", "map"}  # these examples make their own world
LEFT_OUT = {  # code that the reader has run before the example
    "get_gradients": "opened = jd.context(); ctx = opened.__enter__(); jd.value_and_grad(loss_fn)(enc)",
    "jit": "loss_fn = lambda enc, head, x, y: enc.to_here().sum() * head.sum()",
    "Pipeline": """
x, y, passed = jnp.ones((8, 3)), jnp.zeros((8, 2)), lambda params, x: x
stages = [(apply, enc), (passed, dec), (passed, dec), (passed, dec)]
cross_entropy = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)
""",
}
TOGETHER = {
    "init",
    "DataParallel",
    "DataParallel.jit",
    "DataParallel.join",
    "DataParallel.mean",
    "divide_state",
    "shard_state",
    "NnxSyncBatchNorm",
    "keep_unused",
    "local_sgd",
    "per_worker",
    "sharded",
}  # every worker runs these


def init_params(seed):
    return jax.random.normal(jax.random.key(seed), (3, 2))


@jax.jit
def apply(params, x):
    return jnp.tanh(x @ params)


def value_of(part):
    if isinstance(part, jd.RRef):
        return part.to_here()
    return part(jnp.eye(3)) if callable(part) else part


def loss_fn(*parts):
    """Return a loss of references, functions of ``x``, or arrays."""
    return sum(jnp.sum(value_of(part) ** 2) for part in parts)


def averaged_loss(params, batch):
    return jnp.sum((params["w"] - batch) ** 2)


def main():
    jd.init()
    jd.shutdown()


SHORT = ("plan_buckets", "shard_state", "gather_state", "divide_state", "keep_unused", "local_sgd")
NAMES = {
    "jd": jd,
    "jax": jax,
    "jnp": jnp,
    "optax": optax,
    "nn": nn,
    "nnx": nnx,
    "Hook": jd.hooks.Hook,
    **{name: getattr(jd, name) for name in SHORT},
    "init_params": init_params,
    "init_encoder": init_params,
    "apply": apply,
    "encoder": apply,
    "main": main,
    "seed": 7,
    "x": jnp.ones((4, 3)),
    "y": 0.0,
    "tx": optax.sgd(0.1),
    "loss_fn": loss_fn,
    "loss": averaged_loss,
    "keep_for_later": print,
    "work": abs,
    "train": lambda params: params,
    "folder": "checkpoints",
    "key": jax.random.key(0),
    "dropout_key": jax.random.key(1),
    "peers": ["worker0", "worker1", "worker2"],
}


def of_a_world():
    enc, dec = (jd.remote(f"worker{rank}", init_params, args=(rank,)) for rank in (1, 2))
    optimizer = jd.DistributedOptimizer(optax.adam(1e-3), [enc])
    return {"enc": enc, "dec": dec, "params": enc, "rref": enc, "head": jnp.ones(2), "optimizer": optimizer}


def of_each_worker():
    params, dp = {"w": jnp.ones(3)}, jd.DataParallel(find_unused_parameters=True)
    step = dp.value_and_grad(averaged_loss)
    gradients = step(params, jnp.zeros(3))[1]
    batches = {"batch_of_this_rank": jnp.zeros(3), "batches_of_this_rank": [jnp.zeros(3)] * (1 + jd.worker_info().rank)}
    state = jd.keep_unused(optax.adam(1e-3)).init(params)
    found = {"dp": dp, "params": params, "step": step, "gradients": gradients, "state": state}
    return found | batches | {"update": lambda params, gradients: jax.tree.map(lambda p, g: p - g, params, gradients)}


def examples():
    """Yield every public name and method that has an example in its docstring."""
    for name in [*jd.__all__, "map"]:
        one = getattr(jd, name)
        methods = {f"{name}.{k}": v for k, v in vars(one).items() if k[0] != "_"} if inspect.isclass(one) else {}
        for path, thing in {name: one, **methods}.items():
            found = doctest.DocTestParser().get_examples((callable(thing) and inspect.getdoc(thing)) or "")
            if found:
                yield pytest.param(path, found, id=path)


def execute(found, names):
    """Run an example's lines; compare their output where the docstring shows one."""
    for example in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed) if example.want else contextlib.nullcontext():
            exec(compile(example.source, "<example>", "single"), names)
        assert printed.getvalue() == example.want


@pytest.mark.parametrize(("path", "found"), list(examples()))
def test_an_example_runs(path, found, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "displayhook", lambda value: None if value is None else print(repr(value)))
    if path in TOGETHER:
        jd.spawn(each_worker, 3, args=(found, path))
    elif path in ALONE:
        execute(found, dict(NAMES))
    else:
        with jd.local_workers(3):
            names = NAMES | of_a_world()
            exec(LEFT_OUT.get(path, ""), names)
            execute(found, names)
            if "opened" in names:
                names["opened"].__exit__(None, None, None)


def each_worker(found, path):
    if path == "init":
        return execute(found, dict(NAMES))
    jd.init()
    execute(found, NAMES | of_each_worker())
    return jd.shutdown()


def test_there_are_examples():
    assert len(list(examples())) >= 25
