"""What messages may name: what is harmless, and the program's own modules.

The program's own are those that it has written, not installed, and those that it has registered.
"""

import functools
import importlib.util
import os
import sys
import sysconfig

from jdistgrad.rpc import harmless

LIBRARY = tuple(os.path.realpath(sysconfig.get_path(one)) + os.sep for one in ("stdlib", "platstdlib"))
PACKAGES = "site-packages", "dist-packages"  # folders of installed packages

_registered: set[str] = set()


def register(module: str) -> None:
    """Make a module the program's own, with all that are below it."""
    _registered.add(module)
    refusal.cache_clear()


@functools.lru_cache(maxsize=4096)  # each message asks for several names
def refusal(module: str, name: str) -> str | None:
    """Return why messages may not find what a module holds under a dotted name, or None if they may."""
    return harmless.refusal(module, name, written=is_own(module))


def is_own(module: str) -> bool:
    """Return whether a module is the program's own."""
    if _registered and any(f"{module}.".startswith(f"{one}.") for one in _registered):
        return True
    package = module.partition(".")[0]
    return package == "__main__" or package == _package_of_main() or not any(map(_is_installed, _places(package)))


def _package_of_main() -> str | None:
    """Return the package of the program if it was started by ``python -m package.module``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name.partition(".")[0] if spec is not None and spec.parent else None


def _places(package: str) -> list[str]:
    """Return where a package's files are, also of one that is not imported; [] if it has none."""
    if package in sys.builtin_module_names:
        return list(LIBRARY)
    loaded = sys.modules.get(package)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
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
    """Return whether a file or folder belongs to an installed package or to the standard library."""
    path = os.path.realpath(path) + os.sep
    return path.startswith(LIBRARY) or any(f"{os.sep}{folder}{os.sep}" in path for folder in PACKAGES)
