"""Gradients that cross process boundaries, in pure JAX."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jdistgrad._version import __version__ as __version__

if TYPE_CHECKING:
    from jdistgrad.exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Load JAX with the first name that is used: pytest imports our plugin in every run, ``jdistgrad run`` none."""
    if not name.startswith("__"):
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        offered = vars(importlib.import_module(f"{__name__}.exports"))
        if name in offered:
            return globals().setdefault(name, offered[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    offered = vars(importlib.import_module(f"{__name__}.exports"))
    return [*(name for name in globals() if name.startswith("__")), *(name for name in offered if name[0].isalpha())]
