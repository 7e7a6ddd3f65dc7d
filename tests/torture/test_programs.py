"""A handful of random programs, as threads and under mpirun. ``make torture`` runs hundreds, with few XLA threads."""

import pytest

from torture import checking, generator

# The names tell the fault that each program has found, or the feature that it shows.
PROGRAMS = [
    pytest.param(146, id="a second derivative through a custom rule"),
    pytest.param(123, id="the same inside jd.jit"),
    pytest.param(8, id="a weakly typed number beside half precision, inside jd.jit"),
    pytest.param(116, id="a typed key among the results, inside jax.jit"),
    pytest.param(133, id="a third derivative, where what remote makes is an argument", marks=pytest.mark.long),
    pytest.param(14, id="data-parallel steps of several kinds", marks=pytest.mark.long),
    pytest.param(27, id="steps of a pipeline with skips, shared parameters and halves", marks=pytest.mark.long),
]


@pytest.mark.parametrize("seed", PROGRAMS)
def test_a_random_program(big_world, seed):
    program = generator.draw(seed)
    for problems in big_world.run(checking.check, program, 50.0):
        assert problems == [], f"{program}\n" + "\n".join(problem.text for problem in problems)
