"""The reference times of `jdistgrad bench`, in seconds: the best of seven runs."""

MACHINE = "two cores of a virtual machine, Linux, Python 3.11, jax 0.10.2, Open MPI 5.0.11; 2026-11-21"

LOCAL = {
    "call, 4 bytes": 60e-6,
    "call, 16 MiB": 58e-6,
    "32 calls in flight": 1040e-6,
    "gradient, jd.jit": 318e-6,
    "gradient, eager": 1880e-6,
    "average, 4 MiB": 1120e-6,
}

JOB = {
    "call, 4 bytes": 103e-6,
    "call, 16 MiB": 3500e-6,
    "32 calls in flight": 855e-6,
    "gradient, jd.jit": 488e-6,
    "gradient, eager": 2590e-6,
    "average, 4 MiB": 1010e-6,
}
