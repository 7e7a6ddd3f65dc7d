"""The encoding of the package's own messages: numbers, strings, and tuples, lists and dicts of these.

They are pickled too, which takes half the time of JSON and keeps integers of any size. Unpickling them calls nothing:
data that names a class or a function is refused.
"""

import io
import pickle
from typing import Any, NoReturn

from jdistgrad.errors import WireError


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise WireError(f"a message that may only hold numbers and strings refers to {module}.{name}")


def pack(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(data: Any) -> Any:
    """Return the value that was packed. Raises WireError, and nothing else, if the data cannot be read."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except WireError:
        raise
    except Exception as error:  # garbled bytes can do anything to pickle
        raise WireError(f"a message could not be read: {type(error).__name__}: {error}") from error
