"""A training that ends and continues in another job gives the result of an uninterrupted one."""

import re

import jax
import jax.numpy as jnp
import optax
from faults.restarts import EVERY, run
from helpers.jobs import EXAMPLES, example as example

import jdistgrad as jd


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
