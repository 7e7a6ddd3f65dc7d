"""A handful of random programs, as threads and under mpirun. ``make torture`` runs hundreds, with few XLA threads."""

import pytest

from torture import checking, generator

SEEDS = {
    "a second derivative through a custom rule": 146,
    "the same inside jd.jit": 123,
    "a third derivative, where a value made by remote is an argument": 133,
    "a weakly typed number beside half precision, inside jd.jit": 8,
    "a typed key among the results, inside jax.jit": 116,
    "data-parallel steps of several kinds": 14,
    "steps of a pipeline with skips, shared parameters and halves": 27,
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_random_program(big_world, seed):
    # The keys of ``SEEDS`` name the fault that each program has found, or the feature that it shows.
    program = generator.draw(seed)
    for problems in big_world.run(checking.check, program, 50.0):
        assert problems == [], f"{program}\n" + "\n".join(problem.text for problem in problems)
