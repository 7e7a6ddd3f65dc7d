"""Messages that name what no message may name: their calls fail, nothing is called, and the worker serves on."""

import logging
import os
import pickle
import subprocess
import sys

import pytest
from helpers import imports_others
from helpers.forgery import calling
from helpers.worlds import last, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.inbox import Inbox
from jdistgrad.rpc.layouts import pickled
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import ANSWERS, CALLS, Kind, Message, Parcel

FORGED = {
    "os.system": calling("posix", "system", "exit 3"),
    "subprocess.Popen": calling("subprocess", "Popen", "true"),
    "builtins.eval": calling("builtins", "eval", "1 + 1"),
    "pickle.loads": calling("_pickle", "loads", pickle.dumps(1)),
    "os.system in another module": calling(imports_others.__name__, "os.system", "exit 3"),
}

_started = []
_log = []


def _listen(event, args):
    if event in ("os.system", "subprocess.Popen"):
        _started.append(event)


sys.addaudithook(_listen)


class Keep(logging.Handler):
    def emit(self, record):
        _log.append(record.getMessage())


KEEP = Keep()


def listen():
    logging.getLogger("jdistgrad.rpc").addHandler(KEEP)
    _log.clear()
    _started.clear()


def heard():
    logging.getLogger("jdistgrad.rpc").removeHandler(KEEP)
    return list(_log), list(_started)


def forge(kinds, stream):
    """Let the next message of these kinds from this worker carry a forged pickle."""
    transport = current_worker().transport
    genuine = transport.send

    def send_forged(peer, message):
        if message.kind in kinds:
            del transport.send
            body = pickled((2,), stream) if message.kind is Kind.PUSH else memoryview(stream)
            message = Message(message.kind, message.source, message.id, Parcel(body, []))
        genuine(peer, message)

    transport.send = send_forged


def answer_forged(stream):
    forge(ANSWERS, stream)


@needs_pickling
@pytest.mark.parametrize("what", FORGED)
@on_worker0
def test_a_forged_call_fails_and_calls_nothing(wire_world, what):
    jd.rpc_sync(last(), listen)
    forge(CALLS, FORGED[what])
    with pytest.raises(jd.FunctionError, match="may not be named in a message"):
        jd.rpc_sync(last(), abs, args=(1,), timeout=20)
    still_works()
    log, started = jd.rpc_sync(last(), heard)
    assert started == []
    assert any("refuses a CALL from rank 0" in line and "may not be named" in line for line in log)


@needs_pickling
@on_worker0
def test_a_forged_remote_ends_too(wire_world):
    forge({Kind.REMOTE}, FORGED["os.system"])
    with pytest.raises(jd.FunctionError, match="may not be named in a message"):
        jd.remote(last(), abs, args=(1,)).creation().result(20)
    still_works()


def taken(key):
    worker = current_worker()
    return current_scope().content(Inbox).take(key, worker.transport.look, lambda futures: worker.wait_for(futures, 20))


@needs_pickling
@on_worker0
def test_a_forged_push_fails_who_takes_it(wire_world):
    with jd.context():
        current_worker().push(last(), (1,), "genuine")
        assert jd.rpc_sync(last(), taken, args=((1,),)) == "genuine"
        forge({Kind.PUSH}, FORGED["os.system"])
        current_worker().push(last(), (2,), "forged")
        with pytest.raises(jd.FunctionError, match="may not be named in a message"):
            jd.rpc_sync(last(), taken, args=((2,),), timeout=20)
    still_works()


@needs_pickling
@on_worker0
def test_a_forged_answer_fails_its_call(wire_world):
    listen()
    with pytest.raises(jd.FunctionError, match=r"os.system may not be named in a message"):
        jd.rpc_sync(last(), answer_forged, args=(FORGED["os.system"],), timeout=20)
    log, started = heard()
    assert started == []
    assert any(f"refuses a RESULT from rank {last()}" in line for line in log)
    still_works()


@needs_pickling
@on_worker0
def test_the_caller_is_told_before_anything_is_sent(wire_world):
    for function in (os.system, subprocess.run, eval):
        with pytest.raises(jd.FunctionError, match=r"cannot call .*may not be named in a message.*jdistgrad.register"):
            jd.rpc_sync(last(), function, args=("exit 3",))
    assert jd.rpc_sync(last(), os.getpid) != os.getpid()


@needs_pickling
@on_worker0
def test_a_registered_function_and_one_of_the_program_may_do_it(wire_world):
    assert jd.rpc_sync(last(), register_here) is None
    register_here()
    assert jd.rpc_sync(last(), os.getpgid, args=(0,)) == jd.rpc_sync(last(), group)
    assert jd.rpc_sync(last(), imports_others.doubled, args=(4,)) == 8


def register_here():
    jd.register(os.getpgid, "os.getpgid")


def group():
    return os.getpgid(0)
