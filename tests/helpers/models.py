"""Models and their serial programs: of the data-parallel steps, and those whose parameters live on another worker."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

SMALL = 2e-4  # MiB: a layer of the model below


def parameters(seed=0):
    """Several dtypes, ranks of tensor and sizes; one leaf is empty, one a scalar."""

    def draw(k, *shape, dtype=jnp.float32):
        return jnp.asarray(np.random.default_rng([seed, k]).normal(size=shape) / 2, dtype)

    return {
        "dense": [{"w": draw(k, 6, 6), "b": draw(10 + k, 6)} for k in range(3)],
        "half": draw(20, 6, 2, dtype=jnp.bfloat16),
        "empty": draw(25, 0, 3),
        "scale": draw(30),
    }


def batch(rank, rows=4, seed=7):
    return np.random.default_rng([seed, rank]).normal(size=(rows, 6)).astype("float32")


def loss(params, x):
    h = x
    for layer in params["dense"]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    y = (h @ params["half"].astype(jnp.float32)) * params["scale"]
    return jnp.mean(y**2) + params["empty"].sum()


_one_at_a_time = threading.Lock()


def serially(function, *args):
    """What a function gives in one process, as NumPy arrays: compiled once for the workers of all devices."""
    with _one_at_a_time, jax.default_device(jax.local_devices()[0]):
        return jax.tree.map(np.asarray, compiled(function)(*jax.tree.map(np.asarray, args)))


compiled = functools.cache(jax.jit)


def serial(loss, params, batches):
    """Value and gradients of the mean of the losses."""
    return serially(mean_of(loss), params, batches)


@functools.cache
def mean_of(loss):
    return jax.value_and_grad(lambda params, batches: sum(loss(params, x) for x in batches) / len(batches))


@functools.cache
def gradient(loss):
    return jax.jit(jax.grad(loss))


@jax.jit
def descend(params, gradients, rate=0.1):
    return jax.tree.map(lambda p, g: p - (rate * g).astype(p.dtype), params, gradients)


ROWS = 2


class Net(nn.Module):
    """Each row is dropped by a key of its own, so that a row is treated the same wherever it is."""

    norm: object

    @nn.compact
    def __call__(self, x, rows, train=True):
        x = self.norm(use_running_average=not train, name="norm")(nn.Dense(5)(x))
        drop = nn.Dropout(0.3, deterministic=not train)
        x = jax.vmap(lambda h, row: drop(h, rng=jax.random.fold_in(jax.random.key(0), row)))(nn.relu(x), rows)
        return nn.Dense(2)(x)


def net_inputs(rank):
    return batch(rank, ROWS), np.arange(rank * ROWS, (rank + 1) * ROWS)


def net_loss(norm, params, stats, x, rows):
    """A loss, and the batch statistics after it."""
    y, changed = Net(norm).apply({"params": params, "batch_stats": stats}, x, rows, mutable=["batch_stats"])
    return jnp.mean(y**2), changed["batch_stats"]


def net_evaluated(norm, variables, x, rows):
    return Net(norm).apply(variables, x, rows, train=False)


@functools.cache
def net_serially(size):
    """Initial variables; the loss, the statistics and the gradients of the step on everybody's inputs."""
    x, rows = (np.concatenate(parts) for parts in zip(*map(net_inputs, range(size)), strict=True))
    net = Net(nn.BatchNorm)
    variables = serially(lambda x, rows: net.init(jax.random.key(0), x, rows, train=False), x, rows)
    step = jax.value_and_grad(functools.partial(net_loss, nn.BatchNorm), has_aux=True)
    (value, stats), gradients = serially(step, variables["params"], variables["batch_stats"], x, rows)
    return variables, value, stats, gradients


# Whose parameters live on another worker:

X = jnp.linspace(-1, 1, 8).reshape(2, 4)

traced = []


class Encoder(nn.Module):
    """Says when it is traced."""

    width: int
    layers: tuple = ()

    @nn.compact
    def __call__(self, x, *, double=False):
        traced.append(x.shape)
        for layer in self.layers:
            x = layer(x)
        y = nn.tanh(nn.Dense(self.width)(x))
        return 2 * y if double else y


def count_traces(rank):
    found = list(traced)
    traced.clear()
    return found


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


class Both(nnx.Module):
    """Parameters, statistics and a random generator."""

    def __init__(self, inputs, outputs, *, rngs):
        self.first = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x, double=False):
        y = self.drop(self.norm(jnp.tanh(self.first(x))))
        return 2 * y if double else y


class Line(nnx.Module):
    """What is made of nothing but ``rngs``."""

    def __init__(self, rngs):
        self.only = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.only(x))


def init_line(slope):
    return {"slope": jnp.float32(slope), "offset": jnp.ones(4)}


def line(params, x, *, scale=1.0):
    return scale * params["slope"] * x + params["offset"]


compiled_line = jax.jit(line)


def squares(function, x):
    return jnp.sum(function(x) ** 2)
