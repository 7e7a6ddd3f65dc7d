"""Heat conduction in a part of a plate: plain NumPy, with a derivative by hand. partitioned_heat.py calls it."""

import collections

import numpy as np


class Part:
    """Finite volumes around the nodes of some columns of cells; heat flows along the four edges of each cell.

    Attributes:
      free: 1 where the temperature is unknown, 0 where it is given.
      slopes: the matrix from temperatures to their differences along edges, four rows for each cell.
      capacity: the heat capacity of each node's volume, divided by the time step.
      solves: how many linear systems were solved, "forward" and "transposed".
    """

    def __init__(self, free, cell, dt):
        columns, rows = free.shape
        nodes = np.arange(free.size).reshape(columns, rows)
        corner = nodes[:-1, :-1].reshape(-1, 1)  # of each cell, the one with the lowest number
        ends, starts = (np.eye(free.size)[corner + steps] for steps in ([1, rows, rows + 1, rows + 1], [0, 0, 1, rows]))
        self.free, self.slopes = 1.0 * free.ravel(), (ends - starts).reshape(-1, free.size)
        self.capacity = cell**2 / dt * (ends + starts).sum((0, 1)) / 8
        self.solves = collections.Counter()

    def matrix(self, conductivity):
        """Return the matrix of a step of implicit Euler, for the conductivity of each cell."""
        cells = self.slopes.reshape(len(conductivity), -1)
        flows = (conductivity[:, None] / 2 * cells).reshape(self.slopes.shape)
        return np.diag(self.capacity) + self.slopes.T @ flows

    def equations(self, conductivity, heat, given):
        """Return matrix and right-hand side of a step in which volumes get ``heat``, with the given temperatures."""
        fixed = 1 - self.free
        matrix = self.free[:, None] * self.matrix(conductivity) + np.diag(fixed)
        return matrix, self.free * heat + fixed * given

    def solve(self, *args):
        """Return the temperatures after a step."""
        self.solves["forward"] += 1
        return np.linalg.solve(*self.equations(*args))

    def derivative(self, conductivity, heat, given, found, sensitivity):
        """Return the sensitivities to the arguments of ``solve`` from those to its result."""
        self.solves["transposed"] += 1
        matrix, _ = self.equations(conductivity, heat, given)
        adjoint = np.linalg.solve(matrix.T, sensitivity)
        of_heat = self.free * adjoint
        products = (self.slopes @ of_heat) * (self.slopes @ found)
        return -products.reshape(len(conductivity), 4).sum(axis=1) / 2, of_heat, adjoint - of_heat
