"""What messages may name: what is harmless, and the program's own modules.

The program's own are those that are neither installed nor Python's, and those that it has registered.
"""

import functools
import importlib.util
import os
import sys
import sysconfig
from typing import Any

from jdistgrad.rpc import harmless

LIBRARY = tuple(os.path.realpath(sysconfig.get_path(one)) + os.sep for one in ("stdlib", "platstdlib"))
PACKAGES = "site-packages", "dist-packages"  # folders of installed packages
KNOWN_LIMIT = 4096

_registered: frozenset[str] = frozenset()
_known: dict[tuple[str, str], str | None] = {}  # refusals by module and name: each message asks for several


def imported(module: str) -> Any:
    """Return a module; import it if need be. Waits while another thread is importing it.

    A module is in ``sys.modules`` as soon as its import has begun: only ``__import__`` looks whether it has ended.
    """
    __import__(module)
    return sys.modules[module]


def register(module: str) -> None:
    """Make a module the program's own, with all that are below it."""
    global _registered, _known
    _registered |= {module}
    _known = {}  # another thread may be about to put an older answer into the one before


def refusal(module: str, name: str) -> str | None:
    """Return why messages may not find what a module holds under a dotted name, or None if they may."""
    known = _known
    if (module, name) in known:
        return known[module, name]
    found = harmless.refusal(module, name, written=is_own(module))
    if module in sys.modules and len(known) < KNOWN_LIMIT:  # another's place on the path may change
        known[module, name] = found
    return found


def is_own(module: str) -> bool:
    """Return whether a module is the program's own."""
    same = harmless.SAME.get(module, module)
    if any(f"{same}.".startswith(f"{one}.") for one in _registered):
        return True
    package = module.partition(".")[0]
    return package == "__main__" or package == _package_of_main() or not any(map(_is_installed, _places(module)))


def _package_of_main() -> str | None:
    """Return the package of the program if it was started by ``python -m package.module``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    package = spec.name.partition(".")[0] if spec is not None and spec.parent else None
    return None if package in sys.stdlib_module_names else package


def _places(module: str) -> list[str]:
    """Return where a module's files are, or those of its package if it is not imported; [] if it has none."""
    package = module.partition(".")[0]
    if package in sys.builtin_module_names:
        return list(LIBRARY)
    for loaded in (sys.modules.get(module), sys.modules.get(package)):
        if loaded is not None:
            file = getattr(loaded, "__file__", None)
            if file or loaded is sys.modules.get(package):
                return [file] if file else list(getattr(loaded, "__path__", ()))
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    return [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())


@functools.lru_cache(maxsize=4096)
def _is_installed(path: str) -> bool:
    """Return whether a file or folder belongs to an installed package or to the standard library.

    Installers may make links from there to files elsewhere, or install packages into a folder of another name, with a
    folder of metadata beside each.
    """
    found = [os.path.abspath(path) + os.sep, os.path.realpath(path) + os.sep]
    if any(one.startswith(LIBRARY) or f"{os.sep}{folder}{os.sep}" in one for one in found for folder in PACKAGES):
        return True
    return any(name.endswith(".dist-info") for name in _beside_package(path))


def _beside_package(path: str) -> list[str]:
    """Return what lies beside the outermost package that a file belongs to, or beside the file."""
    folder = os.path.dirname(os.path.abspath(path))
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    try:
        return os.listdir(folder)
    except OSError:
        return []
