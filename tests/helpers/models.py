"""Models and their serial programs: for data-parallel steps, and for parameters that live on another worker."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

SMALL = 2e-4  # bucket size in MiB: about one layer of the model below


def parameters(seed=0):
    """Return parameters of several dtypes, shapes and sizes; one leaf is empty, one a scalar."""

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
    """Run a function in this process; return NumPy arrays. All workers use one device, so it compiles only once."""
    with _one_at_a_time, jax.default_device(jax.local_devices()[0]):
        return jax.tree.map(np.asarray, compiled(function)(*jax.tree.map(np.asarray, args)))


compiled = functools.cache(jax.jit)


def serial(loss, params, batches):
    """Return the value and the gradients of the mean of the losses."""
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
    """A network with a dropout key for each row, so that dropout does not depend on the rank that has a row."""

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
    """Return a loss and the updated batch statistics."""
    y, changed = Net(norm).apply({"params": params, "batch_stats": stats}, x, rows, mutable=["batch_stats"])
    return jnp.mean(y**2), changed["batch_stats"]


def net_evaluated(norm, variables, x, rows):
    return Net(norm).apply(variables, x, rows, train=False)


@functools.cache
def net_serially(size):
    """Return initial variables, and the loss, statistics and gradients of one step on the inputs of all ranks."""
    x, rows = (np.concatenate(parts) for parts in zip(*map(net_inputs, range(size)), strict=True))
    net = Net(nn.BatchNorm)
    variables = serially(lambda x, rows: net.init(jax.random.key(0), x, rows, train=False), x, rows)
    step = jax.value_and_grad(functools.partial(net_loss, nn.BatchNorm), has_aux=True)
    (value, stats), gradients = serially(step, variables["params"], variables["batch_stats"], x, rows)
    return variables, value, stats, gradients


# Models whose parameters live on another worker.

X = jnp.linspace(-1, 1, 8).reshape(2, 4)

traced = []


class Encoder(nn.Module):
    """A module that appends the shape of its input to ``traced`` when it is traced."""

    width: int
    layers: tuple = ()

    @nn.compact
    def __call__(self, x, *, double=False):
        traced.append(x.shape)
        for layer in self.layers:
            x = layer(x)
        y = nn.tanh(nn.Dense(self.width)(x))
        return 2 * y if double else y


def take_traces(rank):
    found = list(traced)
    traced.clear()
    return found


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


class Both(nnx.Module):
    """A module with parameters, statistics and a random generator."""

    def __init__(self, inputs, outputs, *, rngs):
        self.first = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x, double=False):
        y = self.drop(self.norm(jnp.tanh(self.first(x))))
        return 2 * y if double else y


class Line(nnx.Module):
    """A module whose only argument is ``rngs``."""

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
