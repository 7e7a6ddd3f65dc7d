"""Run users' programs inside this process as Python would: a script, ``-m module`` or ``-c code``.

Each run has its own ``__main__``, so that several threads can run the same program at once, each as one worker of a
local world. ``runpy`` cannot: it replaces and restores ``sys.modules`` and ``sys.argv`` for one run at a time.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jdistgrad.errors import LauncherError


def user_program(arguments: Sequence[str]) -> tuple[str, Callable[[], None]]:
    """Set ``sys.argv`` and ``sys.path`` and compile a program; return its file, and a function that runs it."""
    check(arguments)
    how, *rest = arguments
    place: dict[str, Any] = {"__cached__": None}  # for relative imports; a script has none
    folder = ""
    if how == "-m":
        spec = find_spec(rest[0])
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = find_spec(f"{rest[0]}.__main__")
        if spec is None or spec.loader is None:
            raise LauncherError(NO_MODULE.format(rest[0], pathlib.Path.cwd()))
        file, code = str(spec.origin), spec.loader.get_code(spec.name)
        place = {"__package__": spec.parent, "__loader__": spec.loader, "__cached__": spec.cached, "__spec__": spec}
        sys.argv[:] = [file, *rest[1:]]
    elif how == "-c":
        file, code = "<string>", compile(rest[0], "<string>", "exec")
        sys.argv[:] = ["-c", *rest[1:]]
    else:
        file, folder = os.path.abspath(how), str(pathlib.Path(how).resolve().parent)
        code = compile(pathlib.Path(how).read_bytes(), file, "exec")
        sys.argv[:] = list(arguments)
    sys.path.insert(0, folder)

    def run() -> None:
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=file, __builtins__=__builtins__, **place)
        sys.modules["__main__"] = module  # lookups by name find the latest run's module, which is equal
        try:
            exec(code, module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):  # else a normal end
                raise

    return file, run


INTERRUPTED = 130  # the exit status after Ctrl-C, as in shells
NO_MODULE = "there is no module {!r} that could be run, neither installed nor in {}"
RESTART = "JDISTGRAD_RESTART"  # in the environment of a job's ranks: how often the job has been started again
MOST_THREADS = 256  # workers of one process: each has several threads, and all share the GIL


def check(arguments: Sequence[str]) -> None:
    """Raise LauncherError if these arguments name no program."""
    if not arguments:
        raise LauncherError("no program given. Usage: jdistgrad run -n 4 script.py [arguments]")
    how, *rest = arguments
    if how in ("-m", "-c"):
        if not rest:
            raise LauncherError(f"{how} needs {'a module' if how == '-m' else 'code'} after it")
        if how == "-m" and find_spec(rest[0].partition(".")[0]) is None:
            raise LauncherError(NO_MODULE.format(rest[0], pathlib.Path.cwd()))
    elif re.fullmatch(r"python[\d.]*(\.exe)?", pathlib.Path(how).name):
        program = " ".join(rest) or "script.py"
        raise LauncherError(f"leave out {how!r}: every rank is run with {sys.executable}. jdistgrad run {program}")
    elif not pathlib.Path(how).is_file():
        hint = f". The module is run by -m: jdistgrad run -m {how}" if how.isidentifier() and find_spec(how) else ""
        raise LauncherError(f"there is no script {how!r} in {pathlib.Path.cwd()}{hint}")


def find_spec(name: str) -> Any:
    """Return the spec of a module for a program in this folder, or None. Imports its parent packages."""
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a parent package was found, but its own import failed
            raise
        return None
    finally:
        del sys.path[0]


def check_workers(n: int) -> None:
    """Raise LauncherError if one process should not have ``n`` workers."""
    from jdistgrad.rpc.local_workers import checked_size

    try:
        checked_size(n)
    except ValueError as error:
        raise LauncherError(str(error)) from error
    if n > MOST_THREADS:
        raise LauncherError(f"{n} workers are too many for one process: up to {MOST_THREADS} are started")


def run_local(n: int, arguments: Sequence[str]) -> int:
    """Run a program as ``n`` workers that are threads of this process; return the exit status."""
    from jdistgrad.ffi.dispatch import run_programs_where_they_are_called
    from jdistgrad.rpc.local_workers import spawn

    if pathlib.Path(arguments[1] if arguments[0] == "-m" else arguments[0]).name in ("pytest", "py.test"):
        raise LauncherError(
            "--local and pytest: each worker would run all tests, in one process. The fixture `world` makes local "
            "worlds itself: run plain pytest; or, as a job, jdistgrad run -n 3 -m pytest."
        )
    check_workers(n)
    run_programs_where_they_are_called()
    file, program = user_program(arguments)
    try:
        spawn(program, n)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        return report(error, file)
    return 0


def end_now(status: int) -> NoReturn:
    """End this process with ``os._exit``: workers' threads may still run in XLA.

    At exit, CPython up to 3.13 ends threads that take the GIL (pthread_exit), which aborts callbacks from C++.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    os._exit(status)


def report(error: BaseException, file: str) -> int:
    """Print a program's exception, from the program's first frame on; return the exit status."""
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int):
        return code
    if code is not None:  # a text of `sys.exit`
        print(code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    return 1


def record(folder: str, *arguments: str) -> None:
    """Run a program as one rank of a recorded job. Each restart of the job has its own folder."""
    from jdistgrad.observe.timeline import in_this_rank, timeline

    start = pathlib.Path(folder, os.environ[RESTART])
    start.mkdir(exist_ok=True)
    (_, program), recorded = user_program(arguments), timeline()
    try:
        with recorded:
            program()
    finally:
        saved = in_this_rank(start / "trace.json")
        torn = saved.with_suffix(".torn")  # another rank's failure may end this process meanwhile
        recorded.save(torn)
        torn.replace(saved)


if __name__ == "__main__":
    record(*sys.argv[1:])
