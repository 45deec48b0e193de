"""Curvature and flatness, measured with error bars.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
>>> x, y = torch.randn(20, 2), torch.randint(0, 2, (20,))
>>> H = Hessian(model, torch.nn.functional.cross_entropy, (x, y))
>>> top = eigenvalues(H, k=2)
>>> whole = trace(H, rtol=0.01)
>>> bool(top.converged.all()), whole.converged
(True, True)
"""

from .density import LogDet, Spectrum, spectrum
from .eigen import Eigenvalues, eigenvalues
from .estimates import Estimate, difference
from .flatness import Extrema, Flatness, SurrogateGap, extrema, first_order, surrogate_gap, transformed, zeroth_order
from .krylov import Krylov
from .landscape import Line, Plane, along_trajectory, line, plane, random_direction
from .monitor import Monitor, Record
from .objective import Objective
from .operator import GaussNewton, Hessian, Scaled
from .sharpness import Measure, sharpness
from .trace import frobenius_squared, trace

__all__ = [
    "Eigenvalues", "Estimate", "Extrema", "Flatness", "GaussNewton", "Hessian", "Krylov", "Line", "LogDet", "Measure",
    "Monitor", "Objective", "Plane", "Record", "Scaled", "Spectrum", "SurrogateGap", "along_trajectory", "difference",
    "eigenvalues", "extrema", "first_order", "frobenius_squared", "line", "plane", "random_direction", "sharpness",
    "spectrum", "surrogate_gap", "trace", "transformed", "zeroth_order",
]  # fmt: skip
