"""Optimizers that search a subspace: directions, a curvature and a solver, with the interface of torch.optim."""

from .acceptance import Acceptance
from .horizon import HorizonAdam, HorizonReport
from .minimize import minimize
from .named import FGD, FoMoH, FoMoHBP, FoMoHKD, GaussNewtonSearch, Newton
from .reports import Report
from .result import Ending, Result
from .search import HyperplaneSearch
from .zeroth_order import FZOO, MeZO, ZerothOrder

__all__ = [
    "FGD",
    "FZOO",
    "Acceptance",
    "Ending",
    "FoMoH",
    "FoMoHBP",
    "FoMoHKD",
    "GaussNewtonSearch",
    "HorizonAdam",
    "HorizonReport",
    "HyperplaneSearch",
    "MeZO",
    "Newton",
    "Report",
    "Result",
    "ZerothOrder",
    "minimize",
]
