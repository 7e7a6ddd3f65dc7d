"""The opening of pickles that other workers sent.

A pickle names the functions that are called while it is opened. Here it finds what the program's own modules define,
what it has registered, and what is known to be harmless. It finds nothing else through them: no module that they
import, and none of its functions.
"""

import enum
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdistgrad.errors import FunctionError
from jdistgrad.rpc.harmless import OPERATORS, is_special, is_standard, spelled
from jdistgrad.rpc.packages import is_known_type
from jdistgrad.rpc.programs import imported, is_own, refusal

DATA = BaseException, enum.Enum, tuple  # classes whose objects only hold data, in any module
CHANGEABLE = dict, list, set, bytearray  # a message could change them for the whole process
DEFINED = types.FunctionType, types.MethodDescriptorType, classmethod, staticmethod
OF_C = (  # methods of classes written in C
    types.MethodDescriptorType | types.WrapperDescriptorType | types.MethodWrapperType | types.ClassMethodDescriptorType
)

Home = tuple[str, str]  # module and qualified name

_constant: dict[Home, Any] = {}  # what has been found of this package and of the standard library: it never changes


def loads(stream: Any, buffers: Sequence[Any] = ()) -> Any:
    """Open a pickle. Raises FunctionError if it names something that messages may not name."""
    return Opening(io.BytesIO(stream), buffers=buffers).load()


class Opening(pickle.Unpickler):
    """The opening of one pickle."""

    def find_class(self, module: str, name: str) -> Any:
        found = _constant.get((module, name))
        return find(module, name) if found is None else found


def find(module: str, name: str) -> Any:
    """Return what a module holds under a dotted name, if messages may find it.

    Raises:
      FunctionError: they may not.
      ImportError, AttributeError: there is none.
    """
    require_texts(module, name)
    function = vars(imported(module)).get(name) if module in sys.modules else None
    if type(function) is types.FunctionType and function.__module__ == module and refusal(module, name) is None:
        found: Any = function  # nearly always: the checks below would take a microsecond more
    else:
        found = _checked(module, name)
    if (is_standard(module) and not is_own(module)) or module.startswith("jdistgrad."):
        _constant[module, name] = found
    return found


def _checked(module: str, name: str) -> Any:
    if refusal(module, name) is not None and module not in sys.modules:
        raise refused(module, name)
    found = _held(module, name)
    if not _may_be_found(module, name, found) or isinstance(found, CHANGEABLE):
        raise refused(module, name)
    require(found, module, name)
    return STAND_INS[found] if found is getattr or found is type else found


def kind(of: Any) -> Any:
    """Return the type of an object: this stands in for ``type``, which could also make types of text."""
    found = type(of)
    return kind if issubclass(found, type) else found


def require_texts(*names: Any) -> None:
    """Raise if names are not what they seem: objects of a class derived from ``str`` may lie."""
    if any(type(name) is not str for name in names):
        raise FunctionError(f"a message names {names!r:.100}, which is no plain text: it was forged", function="?")


def attribute(owner: Any, name: str, *default: Any) -> Any:
    """Return an attribute that messages may find: this stands in for ``getattr``, by which methods are pickled."""
    require_texts(name)
    if isinstance(owner, enum.EnumType) and name in owner.__members__:
        return owner[name]  # as Python before 3.11.4 pickles a member; the class has been found
    home = next((one for one in _classes(owner) if name in vars(one)), None)
    if is_special(name) and name not in OPERATORS and not isinstance(vars(home or object).get(name), DEFINED):
        raise refused(type(owner).__module__, f"{type(owner).__qualname__}.{name}")
    if home is not None and not _may_be_found(home.__module__, f"{home.__qualname__}.{name}", None):
        raise refused(home.__module__, f"{home.__qualname__}.{name}")
    found = getattr(owner, name, *default)
    if isinstance(owner, type) and isinstance(found, CHANGEABLE):
        raise refused(owner.__module__, f"{owner.__qualname__}.{name}")
    require(found, type(owner).__module__, f"{type(owner).__qualname__}.{name}")
    return found


STAND_INS = {getattr: attribute, type: kind}


def require(found: Any, module: str | None = None, name: str = "") -> None:
    """Raise FunctionError if messages may not find an object: where it is defined counts, not where it was found."""
    if isinstance(found, types.ModuleType):
        raise refused(module or "sys.modules", name or found.__name__)
    if isinstance(found, np.ufunc) and module is not None and refusal(module, name) is None:
        return  # it does not know where it is defined
    homes = _homes(found)
    if not any(_may_be_found(*home, found) for home in homes):
        raise refused(*homes[0])


def require_name(found: Any) -> None:
    """Raise FunctionError if messages may not find a class, function or method, which usually its name tells."""
    module = found.__module__  # None: a method of a class written in C
    if module is None or refusal(module, found.__qualname__) is not None:
        require(found)


def refused(module: str, name: str) -> FunctionError:
    """Return the error for something that messages may not name."""
    what = spelled(module, name)
    why = refusal(module, name) or "what it leads to belongs to another module"
    return FunctionError(
        f"{what} may not be named in a message: {why}. Call it in a function of your own module, or register it, or "
        "its package, on both sides (jdistgrad.register), or open the world with init(allow_code=True).",
        function=what,
    )


def _held(module: str, name: str) -> Any:
    first, *rest = name.split(".")
    found = getattr(imported(module), first)
    for part in rest:
        if isinstance(found, types.ModuleType):
            raise refused(module, name)
        found = attribute(found, part)
    return found


def _may_be_found(module: str, name: str, found: Any) -> bool:
    if isinstance(found, type) and issubclass(found, type) and found is not type:
        return is_own(module)  # a metaclass
    return refusal(module, name) is None or _is_data(found)


def _is_data(found: Any) -> bool:
    return isinstance(found, enum.Enum) or (isinstance(found, type) and _is_type_of_data(found))


def _is_type_of_data(found: type) -> bool:
    return issubclass(found, DATA) or is_known_type(found)


def _homes(found: Any) -> list[Home]:
    """Return where an object is defined: for a decorated function the modules of both functions."""
    if isinstance(found, types.MethodType):
        return _homes(found.__func__)
    name = getattr(found, "__qualname__", None) or type(found).__qualname__
    if isinstance(found, OF_C):
        return [(found.__objclass__.__module__, name)]
    if isinstance(found, types.BuiltinFunctionType) and not isinstance(found.__self__, types.ModuleType | None):
        home = next((one for one in _classes(found.__self__) if found.__name__ in vars(one)), type(found.__self__))
        return [(home.__module__, f"{home.__qualname__}.{found.__name__}")]
    homes = [(str(getattr(found, "__module__", None) or "builtins"), str(name))]
    if isinstance(found, types.FunctionType):
        homes.append((str(found.__globals__.get("__name__")), str(name)))
    return homes


def _classes(owner: Any) -> tuple[type, ...]:
    own: tuple[type, ...] = owner.__mro__ if isinstance(owner, type) else ()
    return own + type(owner).__mro__
