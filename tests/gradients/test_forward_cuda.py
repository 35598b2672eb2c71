"""Forward gradients on a GPU: its own kernels of norms, dropout and attention, and capture as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from exactness import CASES, LABELS, B, Case, Coordinates
from jetplane.gradients.noise.signs import Signs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_estimate_with_all_coordinates_is_the_gradient(case: Case) -> None:
    with torch.device("cuda"):
        model = case.model().double().cuda()
        x, y = case.data().detach().cuda(), LABELS.cuda()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        losses = lambda: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
        start = torch.cuda.get_rng_state()
        with torch.backends.cudnn.flags(enabled=False):
            losses().mean().backward()
        end = torch.cuda.get_rng_state()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        after = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        model.zero_grad()
        torch.cuda.set_rng_state(start)
        named = dict(model.named_parameters())
        with jp.forward_only():
            noise = Coordinates(jp.ForwardGradient(named).sites(losses))
            samples = max(1, noise.count)
            jp.ForwardGradient(
                named, samples=samples, chunk_size=512, noise=lambda seed, step: noise, batch_norm="exact"
            )(losses)
    assert torch.equal(torch.cuda.get_rng_state(), end)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after[name])
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=1e-9)


def test_signs_are_those_of_the_cpu() -> None:
    like = torch.zeros(33, 7)
    assert torch.equal(Signs(3, 9).rows(4, 1, 5, like.cuda()).cpu(), Signs(3, 9).rows(4, 1, 5, like))


def network(*norms: nn.Module) -> nn.Sequential:
    """Without a norm, and with few weights, the first layer has its noise in each sample's own weight."""
    first, places = (nn.Conv2d(1, 8, 3), 8 * 36) if norms else (nn.Conv2d(1, 2, 2), 2 * 49)
    return nn.Sequential(first, *norms, nn.ReLU(), nn.Flatten(), nn.Linear(places, 16), nn.GELU(), nn.Linear(16, 3))


def transformer() -> nn.Sequential:
    """Reads the rows of an image. Its attention is an operation that could have dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    "build",
    [lambda: network(nn.BatchNorm2d(8)), network, transformer],
    ids=["batch norm", "own weights", "transformer"],
)
def test_a_captured_call_draws_new_numbers_at_each_replay(build: Callable[[], nn.Sequential]) -> None:
    model = build().cuda()
    norms = [module for module in model if isinstance(module, nn.BatchNorm2d)]
    x, y = torch.randn(32, 1, 8, 8, device="cuda"), torch.arange(32, device="cuda") % 3

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = jp.ForwardGradient(model.parameters(), samples=4)
    wanted = []
    for _ in range(4):
        model.zero_grad()
        plain(losses, x, y)
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    counts = [int(norm.num_batches_tracked) for norm in norms]
    model.load_state_dict(state)

    captured = jp.ForwardGradient(model.parameters(), samples=4, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            captured(losses, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        captured(losses, x, y)
    for step in (2, 3):
        graph.replay()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(found, wanted[step], rtol=1e-3, atol=1e-4)
    assert captured.step == 4 and [int(norm.num_batches_tracked) for norm in norms] == counts


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_refuses_what_it_cannot_repeat() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).cuda()
    x = torch.randn(B, 4, device="cuda")
    estimate = jp.ForwardGradient(model.parameters(), capturable=True)
    for message in ("is new", "draws random numbers"):
        with pytest.raises(jp.UnsupportedProgram, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            estimate(lambda x: model(x).square().sum(1), x)
        torch.cuda.synchronize()
        estimate(lambda x: model(x).square().sum(1), x)
