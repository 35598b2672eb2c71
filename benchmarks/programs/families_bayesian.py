"""Probabilistic programs: botorch's models and acquisition functions, pyro's guides, sbi's density estimators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]

_MODELS = ("SingleTaskGP", "MultiTaskGP", "MixedSingleTaskGP", "SingleTaskMultiFidelityGP")
_ACQUISITIONS = ("LogExpectedImprovement", "ExpectedImprovement", "UpperConfidenceBound", "ProbabilityOfImprovement")
_SAMPLED = ("qExpectedImprovement", "qLogExpectedImprovement", "qUpperConfidenceBound", "qKnowledgeGradient")
_GUIDES = ("AutoNormal", "AutoDiagonalNormal", "AutoMultivariateNormal", "AutoLowRankMultivariateNormal", "AutoDelta")
_ELBOS = ("Trace_ELBO", "TraceMeanField_ELBO", "TraceGraph_ELBO", "RenyiELBO", "TraceEnum_ELBO")
_ESTIMATORS = ("made", "maf", "maf_rqs", "nsf", "mdn", "zuko_nice", "zuko_maf", "zuko_nsf", "zuko_sospf", "zuko_gf")


def programs() -> Iterator[Program]:
    """One program for each model, acquisition, guide, bound and estimator."""
    for name in _MODELS:
        yield Program(f"botorch/{name}", partial(_likelihood, name))
    for name in (*_ACQUISITIONS, *_SAMPLED):
        yield Program(f"botorch/{name}", partial(_acquisition, name))
    for name in _GUIDES:
        yield Program(f"pyro-ppl/{name}", partial(_bound, name, "Trace_ELBO"))
    for name in _ELBOS:
        yield Program(f"pyro-ppl/{name}", partial(_bound, "AutoNormal", name))
    for name in ("discrete", "gamma", "hidden_markov", "flow"):
        yield Program(f"pyro-ppl/model.{name}", partial(_log_density, name))
    for name in _ESTIMATORS:
        yield Program(f"sbi/{name}", partial(_estimator, name))
    for name in ("linear", "mlp", "resnet"):
        yield Program(f"sbi/classifier.{name}", partial(_ratio, name))


# -- botorch --------------------------------------------------------------------------------------------------------


def _gaussian_process(name: str) -> Any:
    from botorch import models

    x, y = torch.rand(7, 2), torch.randn(7, 2)
    task = torch.cat([x, (torch.arange(7) % 2)[:, None].double()], 1)
    made: dict[str, Any] = {
        "SingleTaskGP": lambda: models.SingleTaskGP(x, y[:, :1]),
        "MultiTaskGP": lambda: models.MultiTaskGP(task, y[:, :1], task_feature=-1),
        "MixedSingleTaskGP": lambda: models.MixedSingleTaskGP(task, y[:, :1], cat_dims=[2]),
        "SingleTaskMultiFidelityGP": lambda: models.SingleTaskMultiFidelityGP(x, y[:, :1], data_fidelities=[1]),
    }
    return made[name]()


def _likelihood(name: str) -> Built:
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = _gaussian_process(name).train()
    score = ExactMarginalLogLikelihood(model.likelihood, model)
    return Built(model, lambda: 0.02 * score(model(*model.train_inputs), model.train_targets))  # where tanh is not flat


class _Candidates(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(shape))


def _acquisition(name: str) -> Built:
    """Its value where it is asked for the next point: the point is what varies."""
    from botorch import acquisition
    from botorch.sampling import SobolQMCNormalSampler

    model = _gaussian_process("SingleTaskGP").eval()
    options: dict[str, Any] = {"best_f": 0.3} if "Improvement" in name else {"beta": 0.2}
    if name == "qKnowledgeGradient":
        options = {"num_fantasies": 2}
    elif name.startswith("q"):
        options["sampler"] = SobolQMCNormalSampler(torch.Size([8]), seed=1)
    found = getattr(acquisition, name, None) or getattr(acquisition.logei, name)
    value = found(model, **options)
    count = 1 if name in _ACQUISITIONS else 3
    at = _Candidates(2, count, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Built(at, lambda: value(at.x.sigmoid()))


# -- pyro -----------------------------------------------------------------------------------------------------------


def _bound(guide: str, elbo: str) -> Built:
    """The bound of a regression, as one step of SVI takes it."""
    import pyro
    from pyro import distributions as dist
    from pyro import infer

    x, y = torch.randn(8, 2), torch.randn(8)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), 0.5))
        with pyro.plate("data", 8):
            pyro.sample("y", dist.StudentT(4.0, x @ w, scale), obs=y)

    pyro.clear_param_store()
    more = {"rank": 1} if guide == "AutoLowRankMultivariateNormal" else {}
    chosen = getattr(infer.autoguide, guide)(model, **more)
    bound = getattr(infer, elbo)(**({"num_particles": 2} if elbo == "RenyiELBO" else {}))
    bound.differentiable_loss(model, chosen) if hasattr(bound, "differentiable_loss") else chosen()
    loss = bound.differentiable_loss if hasattr(bound, "differentiable_loss") else bound.loss
    return Built(chosen, lambda: loss(model, chosen))


def _log_density(name: str) -> Built:
    from pyro import distributions as dist
    from pyro.distributions import transforms

    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(5, 3)
    if name == "flow":
        flow = transforms.spline_coupling(3, hidden_dims=[8], count_bins=4)
        base = dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1)
        return Built(flow, lambda: dist.TransformedDistribution(base, [flow]).log_prob(0.5 * x))
    made: dict[str, Any] = {
        "discrete": lambda h: dist.DirichletMultinomial(h.exp(), 4).log_prob(torch.tensor([1.0, 1, 0, 2, 0, 0])),
        "gamma": lambda h: dist.GammaPoisson(h[:, :3].exp(), h[:, 3:].exp()).log_prob(torch.tensor([1.0, 2, 5])),
        "hidden_markov": lambda h: dist.DiscreteHMM(
            h[0, :2], h[1:3, :2], dist.Normal(h[3, :2], h[4, :2].exp())
        ).log_prob(torch.linspace(-1, 1, 6)),
    }
    return Built(net, lambda: made[name](net(x)))


# -- sbi ------------------------------------------------------------------------------------------------------------


def _estimator(name: str) -> Built:
    from sbi.neural_nets.factory import posterior_nn

    theta, x = torch.randn(20, 2), torch.randn(20, 3)
    made = posterior_nn(name, hidden_features=8, num_transforms=2, num_bins=4)(theta, x).double()
    return Built(made, lambda: made.loss(theta[:6], x[:6]))


def _ratio(name: str) -> Built:
    from sbi.neural_nets.factory import classifier_nn

    theta, x = torch.randn(20, 2), torch.randn(20, 3)
    made = classifier_nn(name, hidden_features=8)(theta, x).double()
    return Built(made, lambda: made(theta[:6], x[:6]))
