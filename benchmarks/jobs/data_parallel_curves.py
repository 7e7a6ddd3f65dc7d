"""Job of data_parallel.py: any number of ranks run the example data_parallel.py, and report the losses.

A single rank also runs the example as three workers of a local world, and on a mesh of eight devices.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import data_parallel
import data_parallel_mesh
import jax
from measure import few, report

import jdistgrad as jd


def main():
    jax.config.update("jax_num_cpu_devices", data_parallel_mesh.DEVICES)
    data_parallel.STEPS = few(data_parallel.STEPS)
    me = jd.init()
    found = {"losses": data_parallel.train()}
    size = jd.world_size()
    jd.shutdown()
    if size == 1:
        found |= {"local": jd.spawn(data_parallel.main, 3)[0], "mesh": data_parallel_mesh.train()}
    if me.rank == 0:
        report(**found)


if __name__ == "__main__":
    main()
