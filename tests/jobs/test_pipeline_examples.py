"""The examples of pipelines, and their how-to page: they learn what one process would learn."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.jobs import EXAMPLES, example as example, output_of

import jdistgrad as jd

PAGE = EXAMPLES.parent / "docs" / "how-to" / "pipelines.md"


def test_a_transformer_in_four_stages_learns_as_one_process_would(example, monkeypatch):
    program, steps = example("pipeline"), 15
    monkeypatch.setattr(program, "STEPS", steps)
    monkeypatch.setattr(program, "SCHEDULES", {"zero bubble": program.SCHEDULES["zero bubble"]})
    [(losses, report, _)] = jd.spawn(program.main, 4)[0].values()
    np.testing.assert_allclose(losses, serial_losses(program, steps), rtol=1e-2)
    assert losses[-1] < 0.85 * losses[0]
    assert report.recordings == list(report.forecast.recordings) == [4] * 4


def serial_losses(program, steps):
    from data_parallel import batch

    params = [program.init_params(stage) for stage in range(program.STAGES)]
    tx, losses = optax.adam(program.RATE), []
    state = tx.init(params)

    def loss_fn(params, x, labels):
        for function, one in zip(program.FUNCTIONS, params, strict=True):
            x = function(one, x)
        return program.cross_entropy(x, labels)

    @jax.jit
    def step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    for number in range(steps):
        params, state, loss = step(params, state, *batch(number))
        losses.append(float(loss))
    return losses


def test_stages_of_the_transformer_share_the_ranks_of_a_smaller_job():
    output = output_of(["-m", "jdistgrad", "run", "-n", "3", str(EXAMPLES / "pipeline.py")], timeout=140)
    first, last, right = map(float, re.search(r"1F1B: loss (.*) -> (.*), (.*)% of the digits", output).groups())
    assert (last < 1 < 2 < first, right > 60) == (True, True)
    assert "the same losses, bit for bit: True" in output
    assert output.count("us per action beyond it") == 3


def test_two_shards_find_the_same_losses_with_any_number_of_splits(example, monkeypatch):
    program = example("pipeline_two_shards")
    monkeypatch.setattr(program, "SPLITS", (1, 2))
    results = jd.spawn(program.main, 3)[0]
    np.testing.assert_allclose(results[1][1], results[2][1], rtol=1e-3)
    assert results[1][1][-1] < results[1][1][0] / 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_compiled_pipeline_has_the_gradients_of_the_whole(example, monkeypatch, n):
    program = example("pipeline_compiled")
    monkeypatch.setattr(program, "STEPS", 15)
    found = jd.spawn(program.main, n)
    assert [differs < 1e-5 for _, differs in found] == [True] * n
    *others, losses = (losses for losses, _ in found)
    assert losses[-1] < 0.85 * losses[0]
    assert all(loss == 0 for losses in others for loss in losses)


def test_the_compiled_program_of_the_how_to_page_runs_as_it_stands():
    block = next(one for one in blocks_of_the_page() if "jax.lax.scan" in one)
    names = {"__name__": "a page"}
    exec(compile(block, "pipelines.md", "exec"), names)
    found = jd.spawn(names["main"], 3)
    blocks = [jnp.eye(4) + 0.1 * rank for rank in range(3)]

    def whole(blocks):
        return jnp.mean(functools.reduce(lambda x, params: jnp.tanh(x @ params), blocks, jnp.ones((8, 2, 4))) ** 2)

    for (_, gradient), expected in zip(found, jax.grad(whole)(blocks), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    np.testing.assert_allclose(found[-1][0], whole(blocks), rtol=1e-5)
    assert f"3 blocks, loss {whole(blocks):.3f}\n" in PAGE.read_text()


def blocks_of_the_page():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_how_to_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *rest = blocks_of_the_page()
    whole, blocks = program.split("me = jd.init()")[0], [one for one in rest if "import jdistgrad" not in one]
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    names = {"x": x, "y": x[:, :1]}
    with jd.local_workers(3):
        exec(compile("\n".join([whole, *blocks]), "pipelines.md", "exec"), names)
    assert (tmp_path / "schedule.svg").read_text().startswith("<svg")
    assert names["outputs"].shape == (64, 1)
