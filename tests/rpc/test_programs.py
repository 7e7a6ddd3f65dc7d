"""Which modules are the program's own: those that are neither installed nor Python's, and those it has registered."""

import os
import subprocess
import sys

import pytest

import jdistgrad as jd
from jdistgrad.rpc import programs, unpickling
from jdistgrad.rpc.codec import PickleCodec

CODEC = PickleCodec(allow_code=False)

MODULE = """
import enum

class Color(enum.Enum):
    RED = 1

class Box:
    def __init__(self, x):
        self.x = x

def doubled(x):
    return 2 * x
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return an installed package of one module, imported."""
    folder = tmp_path / "site-packages"
    (folder / "a_package").mkdir(parents=True)
    (folder / "a_package" / "__init__.py").write_text("from a_package.a_module import doubled\n")
    (folder / "a_package" / "a_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(programs, "_registered", frozenset())
    monkeypatch.setattr(programs, "_known", {})
    import a_package

    yield a_package
    for name in ("a_package", "a_package.a_module"):
        monkeypatch.delitem(sys.modules, name)


def carried(value):
    return CODEC.decode(CODEC.encode(value, snapshot=True))


@pytest.mark.parametrize("name", ["doubled", "a_module.Box"])
def test_what_an_installed_package_defines_is_refused(installed, name):
    found = installed.doubled if name == "doubled" else installed.a_module.Box(1)
    with pytest.raises(jd.FunctionError, match=r"of a_package, an installed package, messages find only what .* regis"):
        carried(found)
    with pytest.raises(jd.FunctionError, match="may not be named in a message"):
        unpickling.find("a_package.a_module", name.rpartition(".")[2])


def test_objects_that_only_hold_data_are_found(installed):
    assert carried(installed.a_module.Color.RED) is installed.a_module.Color.RED


def test_a_registered_package_is_found_with_its_modules(installed):
    assert jd.register(installed) is installed
    assert carried(installed.doubled)(2) == 4
    assert carried(installed.a_module.Box(3)).x == 3
    with pytest.raises(jd.FunctionError, match="may not be named"):
        unpickling.find("a_package", "__loader__")


def test_a_module_alone_may_be_registered(installed):
    jd.register(installed.a_module)
    assert carried(installed.doubled)(2) == 4
    assert not programs.is_own("a_package")
    assert not programs.is_own("a_package.a_module_of_another_name")


def test_a_link_out_of_the_folder_of_packages_leads_to_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "cache" / "linked.py").write_text(MODULE)
    (tmp_path / "site-packages" / "linked.py").symlink_to(tmp_path / "cache" / "linked.py")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert not programs.is_own("linked")


def test_a_package_beside_its_metadata_is_installed(tmp_path, monkeypatch):
    for folder in ("a_package", "a_package-1.0.dist-info"):
        (tmp_path / "libraries" / folder).mkdir(parents=True)
    (tmp_path / "libraries" / "a_package" / "__init__.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    assert not programs.is_own("a_package")


def test_what_is_not_there_yet_is_asked_for_again(tmp_path, monkeypatch):
    assert programs.refusal("comes_later", "doubled") is None
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "comes_later.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert programs.refusal("comes_later", "doubled") is not None


def test_a_module_of_python_may_be_registered(monkeypatch):
    monkeypatch.setattr(programs, "_registered", frozenset())
    monkeypatch.setattr(programs, "_known", {})
    assert programs.refusal("posix", "system") is not None
    jd.register(os)
    assert programs.refusal("posix", "system") is None
    assert carried(os.system) is os.system


def test_a_module_has_its_own_name(installed):
    with pytest.raises(TypeError, match="a_package is a module, which has no other name: not 'other'"):
        jd.register(installed, "other")


def test_names_that_lead_nowhere_and_packages_not_imported(tmp_path, monkeypatch):
    assert programs.is_own("no_module_of_this_name")  # its own error comes when it is imported
    assert not programs.is_own("pip._internal.main")
    (tmp_path / "of_the_program").mkdir()
    (tmp_path / "of_the_program" / "steps.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert programs.is_own("of_the_program.steps")
    assert "of_the_program" not in sys.modules


@pytest.mark.parametrize("module", ["os", "posix", "_thread", "builtins", "numpy.linalg", "jax"])
def test_what_comes_with_python_and_with_packages_is_not_the_programs(module):
    assert not programs.is_own(module)


@pytest.mark.parametrize(("run", "is_own"), [(["-m", "a_package.train"], "True"), (["start.py"], "False")])
def test_the_package_that_is_run_is_the_programs(tmp_path, run, is_own):
    folder = tmp_path / "site-packages"
    (folder / "a_package").mkdir(parents=True)
    program = "from jdistgrad.rpc import programs\nprint(programs.is_own('a_package.a'), programs.is_own('numpy'))\n"
    for file in ("a_package/train.py", "start.py"):
        (folder / file).write_text(program)
    found = subprocess.run([sys.executable, *run], cwd=folder, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [is_own, "False"]
