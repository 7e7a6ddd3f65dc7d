"""A training that ends and continues in another job gives the result of an uninterrupted one."""

import re

import jax
import jax.numpy as jnp
import optax
from faults.restarts import EVERY, run
from helpers.jobs import EXAMPLES, example as example

import jdistgrad as jd

PROGRAM = """
    import pathlib
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    import jdistgrad as jd

    FOLDER = pathlib.Path({folder!r})


    def make_params(seed, rows):
        return {{"w": jax.random.normal(jax.random.key(seed), (rows, 2)), "b": jnp.zeros(2)}}


    @jax.jit
    def loss(params, x):
        return jnp.sum((x @ params["w"] + params["b"] - 1) ** 2)


    def total(references):
        parts = [jd.rpc_sync(r.owner, loss, args=(r, jnp.ones((3, 2 + k)))) for k, r in enumerate(references)]
        return sum(parts)


    def train(optimizer, references, steps):
        step = jd.jit(jd.value_and_grad(total))
        for _ in range(steps):
            with jd.context() as ctx:
                value, _ = step(references)
                optimizer.step(ctx)
        return value


    me = jd.init()
    if me.rank == 0:
        references = [jd.remote(rank, make_params, args=({seed} + rank, 1 + rank)) for rank in (1, 2)]
        optimizer = jd.DistributedOptimizer(optax.adam(optax.linear_schedule(0.1, 0.0, 20)), references)
        with ocp.PyTreeCheckpointer() as files:
            if {restore}:
                wanted = optimizer.state()
                how = ocp.checkpoint_utils.construct_restore_args(wanted)
                optimizer.restore(files.restore(FOLDER / "state", item=wanted, restore_args=how))
            else:
                train(optimizer, references, 7)
                files.save(FOLDER / "state", optimizer.state())
        value = train(optimizer, references, 5)
        weights = np.concatenate([np.ravel(r.to_here()["w"]) for r in references])
        print("result", float(value).hex(), *(float(w).hex() for w in weights))
    jd.shutdown()
"""


def test_parameters_and_optimizer_state_go_on_in_a_new_job(mpi_job, tmp_path):
    def results(*, seed, restore):
        output = mpi_job(3, PROGRAM.format(folder=str(tmp_path), seed=seed, restore=restore)).expect("result").output
        return re.search(r"result (.*)", output).group(1).split()

    went_on = results(seed=5, restore=False)
    restarted = results(seed=50, restore=True)
    assert len(went_on) == 1 + 2 * 2 + 3 * 2
    assert restarted == went_on


def test_a_job_that_is_killed_in_a_step_and_while_it_saves_ends_as_an_unbroken_one(tmp_path):
    killed = run([(1, EVERY + 2, 0.0), (2, EVERY, 0.03)], steps=3 * EVERY, compiled=str(tmp_path))
    unbroken = run([], steps=3 * EVERY, compiled=str(tmp_path))
    assert killed.restarts == 2
    assert killed.digests == unbroken.digests
    assert len(set(killed.digests)) == 3
    assert f"worker0: {3 * EVERY} steps" not in killed.output  # the last attempt went on from a checkpoint


def test_the_example_goes_on_where_it_was(example, tmp_path):
    train = example("resuming").main
    jd.spawn(train, 3, args=(tmp_path / "resumed", 25))
    resumed = jd.spawn(train, 3, args=(tmp_path / "resumed", 40))
    unbroken = jd.spawn(train, 3, args=(tmp_path / "unbroken", 40))
    digest = example("resuming").digest
    assert [digest(found) for _, found in resumed] == [digest(found) for _, found in unbroken]
    losses = unbroken[0][0]
    assert [len(losses) for losses, _ in resumed] == [20, 20, 20]
    assert sum(losses[-5:]) < sum(losses[:5]) / 3


def test_the_marks_of_the_page_work_as_it_shows_them(tmp_path):
    page = (EXAMPLES.parent / "docs" / "how-to" / "checkpoints.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "jd.sharded" in block]

    def main():
        me, adam = jd.init(), optax.adam(0.1)
        names = {"jd": jd, "adam": adam, "sharding": jd.shard_state(adam), "folder": tmp_path}
        names |= {"params": {"w": jnp.ones(5)}, "key": jax.random.key(me.rank)}
        exec(source, names)
        jd.shutdown()

    jd.spawn(main, 3)
    assert (tmp_path / "1" / "manifest.json").is_file()
