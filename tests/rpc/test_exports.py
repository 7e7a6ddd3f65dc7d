"""The public names of the package."""

import pytest

import jdistgrad as jd


def test_all_holds_the_public_names():
    assert jd.__all__ == sorted(set(jd.__all__))
    assert "map" not in jd.__all__
    assert {"rpc_sync", "DataParallel", "collectives", "WorkerLostError"} <= set(jd.__all__)
    assert all(not name.startswith("_") and hasattr(jd, name) for name in jd.__all__)
    names = {}
    exec("from jdistgrad import *", names)
    assert names.keys() - {"__builtins__"} == set(jd.__all__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rpc_snyc", "rpc_sync"),
        ("Dataparallel", "DataParallel"),
        ("load", "restore"),
        ("no_grad", "jax.lax.stop_gradient"),
        ("new_group", "collectives.of_this_world"),
    ],
)
def test_a_misspelt_name_is_corrected(name, meant):
    with pytest.raises(
        AttributeError, match=rf"module 'jdistgrad' has no attribute '{name}'\. Did you mean '{meant}'\?"
    ):
        getattr(jd, name)


def test_a_name_that_is_nothing_like_any_is_just_missing():
    with pytest.raises(AttributeError):
        _ = jd.qqqqqq
