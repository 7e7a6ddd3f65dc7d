"""``on``: a function as it runs on another worker."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

from jdistgrad.rpc import api
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.functions import describe

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, repr=False)
class OnWorker(Generic[P, R]):
    """A function that runs on a worker, or on several. Equal ones are one function to ``jax.jit``.

    Attributes:
      workers: the worker; or a tuple of workers, or None for all workers: then a call returns a list of results.
      function: the function itself.
      timeout: seconds to wait for an answer; None: the world's timeout.
    """

    workers: Any
    function: Callable[P, R]
    timeout: float | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function there and return its result: ``rpc_sync``."""
        found: R = self.start(*args, **kwargs).result() if self._is_several else self._by(api.rpc_sync, args, kwargs)
        return found

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function without waiting; return a future of its result: ``rpc_async``, ``rpc_all``."""
        return self._by(api.rpc_all if self._is_several else api.rpc_async, args, kwargs)

    def keep(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function and leave its result there; return a reference to it: ``remote``."""
        if not self._is_several:
            return self._by(api.remote, args, kwargs)
        workers = api.workers_of(self.workers)
        return [api.remote(one, self.function, args, kwargs, timeout=self.timeout) for one in workers]

    @property
    def _is_several(self) -> bool:
        return self.workers is None or isinstance(self.workers, tuple)

    def _by(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(self.workers, self.function, args, kwargs, timeout=self.timeout)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def __wrapped__(self) -> Callable[P, R]:  # ``inspect.signature`` finds the parameters here
        return self.function

    def __repr__(self) -> str:
        return f"on({self.workers!r}, {describe(self.function)})"


def put(worker: AnyWorker | Iterable[AnyWorker] | None, value: Any) -> Any:
    """Send a value to a worker, which keeps it, and return a reference to it: as ``jax.device_put`` for devices.

    Arguments:
      worker: as for ``on``; for several workers the result is a list of references.
      value: any pytree; the value of a reference in it comes from its owner, not through this worker.

    Example:
      >>> params = jd.put(1, {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)})
      >>> params["w"].shape
    """
    return on(worker, _itself).keep(value)


def _itself(value: Any) -> Any:
    return value


def on(
    worker: AnyWorker | Iterable[AnyWorker] | None, function: Callable[P, R], *, timeout: float | None = None
) -> OnWorker[P, R]:
    """Return a function as it runs on another worker: a function to JAX, which can differentiate, map and compile it.

    Arguments:
      worker: the worker, by its name, its rank or its ``WorkerInfo``. Several of them, or None for all workers: a call
        returns the list of their results, in the order of the workers.
      function: any function, as for ``rpc_sync``.
      timeout: seconds to wait for an answer; default the world's.

    Example:
      >>> y = jd.on(1, jnp.add)(x, 1)               # call it there
      >>> future = jd.on(1, jnp.add).start(x, 1)    # without waiting
      >>> params = jd.on(1, init_params).keep(seed) # leave the result there: a reference
    """
    if not callable(function):
        raise TypeError(f"on takes a worker and a function, on(1, jnp.add), not {function!r:.60}")
    workers = worker if isinstance(worker, str) or not isinstance(worker, Iterable) else tuple(worker)
    return OnWorker(workers, function, timeout)
