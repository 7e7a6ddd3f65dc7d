"""Pickles written by hand, as nobody's pickler writes them."""

import pickle


def text(value):
    return pickle.dumps(value, protocol=4)[11:-2]  # without the protocol, the frame, the memo and the end


def named(module, name):
    """Return the opcodes that find an object."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def calling(module, name, *args):
    """Return a pickle that calls what it finds under this name with strings and numbers, while it is opened."""
    return called(named(module, name), *args)


def called(function, *args):
    values = b"".join(text(one) if isinstance(one, str) else pickle.dumps(one, protocol=2)[2:-1] for one in args)
    return pickle.PROTO + b"\x05" + function + pickle.MARK + values + pickle.TUPLE + pickle.REDUCE + pickle.STOP


def attribute_of(owner, name):
    """Return the opcodes that call ``getattr`` with an object, which other opcodes find."""
    return named("builtins", "getattr") + owner + text(name) + pickle.TUPLE2 + pickle.REDUCE
