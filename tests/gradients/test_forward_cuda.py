"""Forward gradients on a GPU: its own kernels of norms, dropout and attention, and capture as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from exactness import CASES, LABELS, B, Case, Coordinates
from jetplane.gradients.noise.signs import Signs
from jetplane.optim import HorizonAdam

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


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.Tanh()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 3)).double().cuda()


def beside(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Losses of a batch in a dict, and what is recognised."""

    def losses(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        z = model(batch["x"])
        return F.cross_entropy(z, batch["y"], reduction="none"), z.argmax(1) == batch["y"]

    return losses


def image_batches(count: int, samples: int) -> list[dict[str, Tensor]]:
    x = torch.randn(samples, 1, 12, 12, dtype=torch.float64, device="cuda")
    y = torch.arange(samples, device="cuda") % 3
    return [{"x": x.roll(number, 0), "y": y.roll(number)} for number in range(count)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "samples", [12, 15, 11]
)  # parts that begin at multiples of 16 bytes, and not; a smaller last one
def test_parts_have_the_numbers_of_the_whole(samples: int, compile: bool) -> None:
    """In the calls before the graph is captured, where it is captured, and where it is replayed."""
    batches, found = image_batches(8, samples), []
    for options in ({}, {"memory": "110 kB", "compile": compile}):
        model = small()
        estimate = jp.ForwardGradient(model.parameters(), 3, **options)
        results = [estimate(beside(model), batch, has_aux=True) for batch in batches]
        assert (len(estimate.parts(beside(model), batches[0])) > 1) == bool(options)
        learned = estimate.state_dict()["control"]
        found.append([results, [p.grad for p in model.parameters()], learned])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("compile", [False, True])
def test_steps_of_horizon_adam_in_parts_are_those_of_the_whole(compile: bool) -> None:
    batches, found = image_batches(12, 12), []
    for options in ({}, {"memory": "110 kB", "compile": compile}):
        model = small()
        opt = HorizonAdam(model.parameters(), samples=3, **options)
        losses = [opt.step(beside(model), batch, has_aux=True) for batch in batches]
        assert (len(opt.estimate.parts(beside(model), batches[0])) > 1) == bool(options)
        found.append([losses, list(model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [jp.ForwardGradient, HorizonAdam])
@pytest.mark.parametrize("compile", [False, True])
def test_parts_ask_the_host_for_nothing(compile: bool, kind: type[Any]) -> None:
    """Once they are planned and captured; a look back along the path, and the turning of axes, are among the steps."""
    model, batches = small(), image_batches(24, 12)
    made = kind(model.parameters(), samples=3, memory="110 kB", compile=compile)
    call = made.step if kind is HorizonAdam else made
    for batch in batches[:16]:
        call(beside(model), batch, has_aux=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[16:]:
            call(beside(model), batch, has_aux=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compile", [False, True])
def test_parts_hold_less_than_the_whole(compile: bool) -> None:
    """A part's memory is the next one's, also of those that one graph holds."""
    x, y, peaks = torch.randn(256, 3, 32, 32, device="cuda"), torch.arange(256, device="cuda") % 10, []
    for options in ({"memory": "100 MiB"}, {"chunk_size": 8}):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10)).cuda()
        estimate = jp.ForwardGradient(model.parameters(), 8, compile=compile, **options)

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return F.cross_entropy(model(x), y, reduction="none")

        for _ in range(6):
            estimate(losses, x, y)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            estimate(losses, x, y)
        # what a graph's pool holds between replays counts as allocated or not, as its tensors live: so by the pool
        peaks.append(torch.cuda.max_memory_allocated() - before if not compile else torch.cuda.memory_reserved())
        del estimate, model
        gc.collect()
        torch.cuda.empty_cache()
    assert peaks[0] < 0.6 * peaks[1]
