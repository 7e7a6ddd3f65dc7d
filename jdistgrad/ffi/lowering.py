"""Calls of Python functions as parts of JAX programs."""

import collections
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jdistgrad._compat import abstract_token
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.abi import carrier
from jdistgrad.ffi.sites import ALONE, TARGET, Deferred, Function, Site, Together, cancel_all
from jdistgrad.threads import frames, started

BLOCKED_SECONDS = 0.1


@functools.cache
def watch_for_interrupts() -> None:
    """Cancel calls when Ctrl-C is pressed while the main thread is blocked. Starts a thread; for the main thread only.

    Python runs its signal handlers between two bytecodes of the main thread, which runs none while a compiled program
    waits for another worker. The byte that C writes on a signal (``signal.set_wakeup_fd``) wakes a thread of our own,
    which fails the running calls: the program fails, and Python raises KeyboardInterrupt.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    started(_watch, "jdistgrad-interrupts", read, before)


def _watch(read: int, before: int) -> None:
    while numbers := os.read(read, 64):
        if before >= 0:  # other code has set a descriptor too
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        if signal.SIGINT in numbers:
            position = _main_position()
            time.sleep(BLOCKED_SECONDS)
            if position == _main_position():
                cancel_all()


def _main_position() -> tuple[int, int] | None:
    frame: FrameType | None = frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def lower(
    context: Any,
    operands: Sequence[Any],
    avals: Sequence[Any],
    function: Function,
    *,
    quick: bool = False,
    changes: bool = False,
) -> Any:
    """Lower a primitive, on CPUs, to a call of a function of its operands.

    Arguments:
      quick: see ``call_in_order``.
      changes: whether each call changes something: XLA makes others once if they are the same in all iterations of a
        loop, and leaves them out if their results are not used. It refuses such calls in programs on several devices.
    """
    where = context.module_context.axis_context
    devices, together = devices_of(where), _devices_together(where)
    site = Site(function, avals, context.avals_out, quick=quick, devices=devices, together=together)
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=changes and devices == 1)
    return _lower_call(context, operands, avals, site, rule)


def _lower_call(
    context: Any, operands: Sequence[Any], avals: Sequence[Any], site: Site, rule: Any, effect: Any = None
) -> list[Any]:
    """Return the results of a site's call, in the order of the program if it has an effect."""
    if threading.current_thread() is threading.main_thread():  # which alone may set signal handling
        watch_for_interrupts()
    context.module_context.add_host_callback(site)  # keeps the site alive while a program runs
    given, made = ([_carried(one) for one in types] for types in (avals, context.avals_out))
    carried = _converted(context, operands, avals, given)
    if effect is None:
        values = rule(context.replace(avals_in=given, avals_out=made), *carried, number=site.number)
    else:
        with_token = context.replace(avals_in=[*given, abstract_token()], avals_out=[*made, abstract_token()])
        *values, token = rule(with_token, *carried, context.tokens_in.get(effect), number=site.number)
        context.set_tokens_out(mlir.TokenSet({effect: token}))
    return _converted(context, values, made, context.avals_out)


def _devices_together(context: Any) -> Together:
    """Return how many devices of this process make each call together, and the group of each if there are several.

    XLA partitions a program over all devices; in ``jax.shard_map``, over those at one place on the mapped axes.
    """
    mesh, axes = getattr(context, "mesh", None), getattr(context, "manual_axes", ())
    if mesh is None:
        return min(getattr(context, "num_devices", 1), jax.local_device_count()), {}
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return ALONE
    mapped = [k for k, name in enumerate(mesh.axis_names) if name in axes]
    groups = {
        device.local_hardware_id: tuple(place[k] for k in mapped)
        for place, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    }
    return max(collections.Counter(groups.values()).values(), default=1), groups


def on_cpus() -> bool:
    """Return whether programs are compiled for CPUs here by default."""
    return jax.default_backend() == "cpu"


ordered_p = Primitive("ordered_host_call")
ordered_p.multiple_results = True


def call_in_order(
    function: Function, results: Sequence[jax.ShapeDtypeStruct], *operands: Any, effect: Any, quick: bool = False
) -> list[Any]:
    """Call a function of NumPy arrays once each time a program for CPUs runs, ordered with all that has this effect.

    Arguments:
      effect: one of JAX's ordered effects, as in ``jax.make_jaxpr(...)(...).effects``.
      quick: whether the function itself never waits; it returns a part that has to wait as a ``Deferred``.
    """
    return ordered_p.bind(*operands, function=function, results=tuple(results), effect=effect, quick=quick)


def _shapes(*operands: Any, results: Sequence[Any], effect: Any, **_: Any) -> Any:
    return [jax.core.ShapedArray(one.shape, one.dtype) for one in results], {effect}


def _run(*operands: Any, function: Function, **_: Any) -> list[Any]:
    found = function(*map(np.asarray, operands))
    return [jax.numpy.asarray(one) for one in (found.rest() if isinstance(found, Deferred) else found) or ()]


def _lowered(context: Any, *operands: Any, function: Function, effect: Any, quick: bool, **_: Any) -> list[Any]:
    count = devices_of(context.module_context.axis_context)
    if count > 1:  # XLA orders effects on one device only, and runs one multi-device program at a time
        raise CollectiveError(
            f"a collective of ranks in a program on {count} devices (jax.jit of arrays on several devices, "
            "jax.shard_map, jax.pmap) can only be in a program on one device. Compute on the devices without it, and "
            "call the collective on the result from Python, as DataParallel.value_and_grad does outside of jax.jit."
        )
    site = Site(function, context.avals_in, context.avals_out, quick=quick)
    rule = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    return _lower_call(context, operands, context.avals_in, site, rule, effect)


def devices_of(context: Any) -> int:
    """Return how many devices a program runs on."""
    mesh = getattr(context, "mesh", None)
    return int(getattr(context, "num_devices", 1) if mesh is None else mesh.size)


def _carried(aval: Any) -> Any:
    dtype = carrier(aval.dtype)
    return aval if dtype == aval.dtype else aval.update(dtype=dtype)


def _converted(context: Any, values: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    found = list(values)
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.dtype != new.dtype:
            cast = functools.partial(jax.lax.convert_element_type, new_dtype=new.dtype)
            alone = context.replace(avals_in=[old], avals_out=[new], tokens_in=mlir.TokenSet(), tokens_out=None)
            (found[k],) = mlir.lower_fun(cast, multiple_results=False)(alone, values[k])
    return found


ordered_p.def_impl(_run)
ordered_p.def_effectful_abstract_eval(_shapes)
mlir.register_lowering(ordered_p, _lowered, platform="cpu")
