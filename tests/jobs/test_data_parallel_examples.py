"""The data-parallel examples, as threads, as jobs and on a mesh: they learn, with the result of the serial program."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.jobs import EXAMPLES, as_job, as_program, example as example
from jax.sharding import PartitionSpec as P

import jdistgrad as jd


@pytest.fixture
def serial_losses(example):
    program = example("data_parallel")
    step = jax.jit(jax.value_and_grad(program.loss_fn))
    return program.fit(lambda number, params: step(params, *program.batch(number)), program.initial())[0]


def test_digits_are_read_as_well_on_several_ranks(example, serial_losses):
    for losses in jd.spawn(example("data_parallel").main, 3):
        np.testing.assert_allclose(losses, serial_losses, rtol=1e-3)
    assert np.mean(losses[-10:]) < 0.5 < 2 < losses[0]


def test_digits_are_read_as_well_on_a_mesh(example, serial_losses):
    np.testing.assert_allclose(example("data_parallel_mesh").train(), serial_losses, rtol=1e-3)


def test_digits_are_generated_where_there_are_none(example, monkeypatch):
    program = example("data_parallel")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    program.digits.cache_clear()
    images, labels = program.digits()
    program.digits.cache_clear()
    assert images.shape == (2000, 64)
    assert set(labels.tolist()) == set(range(10))


def test_they_are_programs():
    names = "data_parallel.py", "heat.py", "uneven_inputs.py", "remote_embedding.py"
    output = as_job(3, *names)
    first, last, right = map(float, re.search(r"3 ranks: loss (.*) -> (.*), (.*)% of", output).groups())
    assert last < 0.5 < 2 < first
    assert right > 85
    assert len(re.findall(r"on 3 ranks: \de-0[5-9] from", output)) == 2
    assert "the serial ones: True" in output
    assert "embedding on worker2, 2 trainers; loss 0.693 -> 0.2" in output


def test_a_mesh_may_span_processes():
    def told(text, where):
        return [float(number) for number in re.search(rf"{where}: loss (.*) -> (.*), (.*)% are", text).groups()]

    alone = told(as_program("data_parallel_mesh.py"), "8 devices")
    np.testing.assert_allclose(told(as_job(2, "data_parallel_mesh.py"), "8 devices of 2 processes"), alone, rtol=0.01)
    assert alone[1] < 0.5 < 2 < alone[0]


def test_uneven_inputs_train_as_one_process_would(example):
    n, program = 3, example("uneven_inputs")
    expected = program.train_serially(n)
    for weights in jd.spawn(program.main, n):
        np.testing.assert_allclose(weights, expected, atol=1e-5)
    np.testing.assert_allclose(expected, program.TRUTH, atol=0.1)


def test_an_embedding_on_a_server_and_a_replicated_rest(example):
    n, program = 4, example("remote_embedding")
    losses, params = jd.spawn(program.main, n)[0]
    expected, serial = program.train_serially(max(1, n - 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, atol=1e-4), params, serial)
    assert losses[-1] < 0.65 * losses[0]


def test_the_how_to_page_runs_as_it_stands(tmp_path):
    page = (EXAMPLES.parent / "docs" / "how-to" / "data-parallel.md").read_text()
    source = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    program = compile(
        re.sub(r"^me = jd.init\(\)|^jd.shutdown\(\)", "", source, flags=re.MULTILINE), "data-parallel.md", "exec"
    )

    def main():
        me = jd.init()
        names = {"folder": tmp_path, "me": me}
        exec(program, names)
        jd.shutdown()
        return names

    results = jd.spawn(main, 3)
    for names in results:
        jax.tree.map(np.testing.assert_array_equal, names["params"], results[0]["params"])
        assert (names["told"].size, names["told"].bucket_sizes) == (3, (12,))
    params, x, y = jax.tree.map(np.asarray, [names[name] for name in ("params", "x", "y")])
    on_mesh, expected = names["step"](params, x, y), jax.grad(names["loss_fn"])(params, x, y)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-4), on_mesh, expected)
    assert names["big"]["w"].sharding.shard_shape((8, 16)) == (1, 16)
    assert names["big_state"][0].mu["w"].sharding.shard_shape((8, 16)) == (1, 16)


def test_rows_of_ranks_with_different_numbers_of_them_weigh_the_same():
    page = (EXAMPLES.parent / "docs" / "how-to" / "data-parallel.md").read_text()
    block = next(one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def weighted_loss" in one)
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")

    def loss_fn(params, x, y):
        return jnp.mean((x @ params - y) ** 2)

    def main():
        me = jd.init()
        mine = np.split(x, [8, 9])[me.rank]
        names = {"jd": jd, "dp": jd.DataParallel(), "loss_fn": loss_fn, "params": jnp.ones((4, 2))}
        names |= {"x": mine, "y": mine[:, :2]}
        exec(block, names)
        jd.shutdown()
        return names["mean"], names["gradients"]

    expected = jax.value_and_grad(loss_fn)(jnp.ones((4, 2)), x, x[:, :2])
    for found in jd.spawn(main, 3):
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5), found, expected)


@pytest.mark.parametrize("n", [1, 3])
def test_a_rod_that_is_cut_has_the_derivatives_of_the_whole(example, n):
    rod = example("heat")
    for found in jd.spawn(rod.main, n):
        for whole, serial in zip(found, rod.serially(), strict=True):
            np.testing.assert_allclose(whole, serial, atol=1e-5 * np.max(np.abs(serial)))


def test_a_rod_is_cut_along_an_axis_of_a_mesh(example):
    rod, rows = example("heat"), P("parts")
    mesh = jax.make_mesh((8,), ("parts",), axis_types=(jax.sharding.AxisType.Auto,))
    padded = functools.partial(rod.with_neighbours, jd.collectives.Mesh("parts"))
    cut = jax.shard_map(functools.partial(rod.derivatives, padded), mesh=mesh, in_specs=rows, out_specs=rows)
    for found, serial in zip(cut(rod.GUESS, rod.TRUTH, rod.START, rod.DIRECTION), rod.serially(), strict=True):
        np.testing.assert_allclose(found, serial, atol=1e-5 * np.max(np.abs(serial)))
