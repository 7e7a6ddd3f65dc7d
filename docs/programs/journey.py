"""The program of docs/journey.md: one call and its gradient, followed through every layer with the messages' ids."""

import jax
import jax.numpy as jnp

import jdistgrad as jd
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.worker import Worker
from jdistgrad.wire.message import MessageType, spell


def make_params(seed):
    return jax.random.normal(jax.random.key(seed), (3, 2))


@jax.jit
def activate(hidden):
    return jnp.tanh(hidden)


def encode(params, x):
    return jd.rpc_sync("worker2", activate, args=(x @ params,))


def loss_fn(params, x):
    features = jd.rpc_sync("worker1", encode, args=(params, x))
    return jnp.sum(features**2)


def tell(worker, peer, message):
    function = message.body[0] if message.kind is MessageType.CALL else None
    known = getattr(function, "recorded_as", None)
    what = "" if function is None else f"  {describe(function)}"
    what += "" if known is None else f", message {spell(known)}"
    way = f"worker{worker.rank} -> worker{peer}"
    print(f"{message.kind.name:<6}  id {spell(message.id)}  {way}{what}", flush=True)


def main():
    me = jd.init()
    if me.rank == 0:
        params = jd.remote("worker1", make_params, args=(0,))
        params.creation().result()
        with jd.context() as ctx:
            print(f"context {spell(ctx.id)}; params is {params}")
            Worker.post = told
            loss, (of_params, of_x) = jd.value_and_grad(loss_fn, argnums=(0, 1))(params, jnp.eye(3))
            Worker.post = post
            print(f"loss {loss:.4f}; the gradient of x is {of_x.shape}, that of params is on {of_params.owner}\n")
            print(ctx.graph())
    jd.shutdown()


post = Worker.post


def told(worker, peer, message, **options):
    tell(worker, peer, message)
    return post(worker, peer, message, **options)


if __name__ == "__main__":
    jd.spawn(main, 3)
