"""Curvature and flatness, measured with error bars."""

from .objective import Objective
from .operator import GaussNewton, Hessian, Scaled

__all__ = ["GaussNewton", "Hessian", "Objective", "Scaled"]
