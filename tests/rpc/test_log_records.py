"""The fields of log records: which worker a record comes from, and in which context."""

import logging
import pathlib
import re

import jax.numpy as jnp
import pytest
from helpers.worlds import last, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad.rpc.worlds import LOGGERS
from jdistgrad.wire.message import spell


@pytest.fixture
def records():
    """Collect the records of this package's loggers."""
    found, handler, package = [], logging.Handler(), logging.getLogger("jdistgrad")
    handler.emit = found.append
    package.addHandler(handler)
    yield found
    package.removeHandler(handler)


def say(x):
    logging.getLogger("jdistgrad.rpc").warning("served")
    return x * 2


def test_all_loggers_of_the_package_are_known():
    sources = pathlib.Path(jd.__file__).parent.rglob("*.py")
    named = {name for source in sources for name in re.findall(r'getLogger\("(jdistgrad\.\w+)"\)', source.read_text())}
    assert named == set(LOGGERS)


@on_every_worker
def test_records_name_their_worker(big_world, records, rank, size):
    for name in LOGGERS:
        logging.getLogger(name).warning("here, %s", rank)
    mine = [one for one in records if one.getMessage() == f"here, {rank}"]
    assert [(one.name, one.rank, one.worker, one.context) for one in mine] == [
        (name, rank, f"worker{rank}", None) for name in LOGGERS
    ]


@pytest.mark.one_process  # the records of all workers are in one process
@on_worker0
def test_records_of_served_calls_name_the_context(big_world, records):
    with jd.context() as ctx:
        jd.backward(ctx, lambda x: jd.rpc_sync(last(), say, args=(x,)).sum(), jnp.ones(3))
        identifier = ctx.id
    served = [one for one in records if one.getMessage() == "served"]
    assert {(one.rank, one.context) for one in served} == {(last(), spell(identifier))}


def test_records_outside_of_worlds_have_empty_fields(records):
    with jd.local_workers(3):
        pass
    logging.getLogger("jdistgrad.wire").warning("outside")
    (found,) = [one for one in records if one.getMessage() == "outside"]
    assert (found.rank, found.worker, found.context) == (None, None, None)
