"""A training that ends and continues in another job gives the result of an uninterrupted one."""

import re

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
