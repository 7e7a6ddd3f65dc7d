"""Typed code of a user, for `make lint`: mypy and pyright both check it, and the errors that each must find.

An expected error has the comments that silence it in both checkers; a comment that silences nothing is an error itself.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, assert_type

import jax
import optax

import jdistgrad as jd

Params = dict[str, jax.Array]


def make(seed: int) -> Params:
    return {"w": jax.random.normal(jax.random.key(seed), (3, 2))}


def apply(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def later(x: float) -> Future[float]:
    return jd.rpc_async("worker1", abs, args=(x,)).then(float)


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return apply(params, x).sum()


def loss_and_aux(params: Params, x: jax.Array) -> tuple[jax.Array, str]:
    return apply(params, x).sum(), "aux"


def calls(x: jax.Array) -> None:
    assert_type(jd.rpc_sync("worker1", make, args=(3,)), Params)
    assert_type(jd.rpc_sync("worker1", later, args=(3.0,)), float)
    assert_type(jd.rpc_async(1, make, args=(3,)).result(), Params)
    assert_type(jd.rpc_async(1, make, args=(3,)).then(len).result(), int)
    assert_type(jd.rpc_async(1, later, args=(3.0,)).result(), float)
    params = jd.remote("worker1", make, args=(3,))
    assert_type(params, jd.RRef[Params])
    assert_type(params.to_here(), Params)
    assert_type(jd.rpc_all(None, apply, args=(params, x)).result(), list[jax.Array])
    assert_type(jd.map(make, range(4)), Iterator[Params])
    assert_type(jd.RRef(x).local_value(), jax.Array)


def gradients(params: Params, x: jax.Array) -> None:
    step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
    with jd.context() as ctx:
        loss, _ = step(params, x)
        assert_type(loss, jax.Array)
        value, found = jd.backward(ctx, loss_fn, params, x)
        assert_type(value, jax.Array)
        assert_type(found, tuple[Any, ...])
    (loss, aux), _ = jd.value_and_grad(loss_and_aux, has_aux=True)(params, x)
    assert_type(aux, str)
    step(params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def training(params: Params, x: jax.Array) -> None:
    dp = jd.DataParallel()
    params = dp.broadcast(params)
    assert_type(params, Params)
    loss, _ = dp.value_and_grad(loss_fn)(params, x)
    assert_type(loss, jax.Array)
    assert_type(dp.average(params), Params)
    reference = jd.RRef(params)
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [reference])
    with jd.context() as ctx:
        optimizer.step(ctx)


def mistakes(x: jax.Array) -> None:
    jd.rpc_snyc("worker1", make, args=(3,))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    jd.rpc_sync("worker1", make(3))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    jd.rpc_async(1, make, args=(3,)).wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    number: int = jd.rpc_sync(1, make, args=(3,))  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    jd.remote(1, make).size  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    jd.remote(1, make) + number  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue, reportUnusedExpression]
    jd.init(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
