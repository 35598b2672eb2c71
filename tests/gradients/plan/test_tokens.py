"""Forward gradients of sequences: which tokens noise can reach, attention between a layer and its site, and forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import check_exact
from jetplane.gradients.noise import control_variate as control
from jetplane.gradients.passes import kept_plans as plans
from jetplane.gradients.plan import tokens

B, T, V = 3, 4, 5
WORDS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))


class Norm(nn.Module):
    """A root mean square norm of single operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention as it is often written, and a gated part."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        self.first, self.second = (Norm(width), nn.LayerNorm(width)) if kind != "bare" else (nn.Identity(), Norm(width))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=kind != "unfused"), nn.Linear(width, width)
        self.keys = nn.Linear(width, width // 2)  # of half as many heads
        self.gate, self.up, self.down = (nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(6, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self._parts(h))
        if self.kind == "unfused":
            scores = (q @ k.mT) / 2
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            y = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        elif self.kind == "grouped":
            keys = self.keys(h).unflatten(2, (1, -1)).transpose(1, 2)
            allowed = torch.ones(x.shape[1], x.shape[1]).tril().bool()
            y = F.scaled_dot_product_attention(q, keys, v[:, :1], allowed, scale=0.7, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "both ways")
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _parts(self, h: Tensor) -> tuple[Tensor, ...]:
        if self.kind == "bare":
            return self.qkv(h).unflatten(2, (3, -1)).unbind(2)
        return self.qkv(h).split(self.width, 2)


class Words(nn.Module):
    """A model of words."""

    def __init__(self, *kinds: str, width: int = 4, length: int = T) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, width), nn.Parameter(torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, kind) for kind in kinds))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, V)
        if "grouped" not in kinds:
            for block in self.blocks:
                del block.keys

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(t) + self.places)))


class Steps(nn.Module):
    """A recurrent network, its output at each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(V, 4), nn.LSTM(4, 3, **options)
        self.head = nn.Linear(6 if options.get("bidirectional") else 3, V)

    def forward(self, t: Tensor) -> Tensor:
        if self.cells.batch_first:
            return self.head(self.cells(self.words(t))[0])
        return self.head(self.cells(self.words(t.T))[0]).transpose(0, 1)


def nll(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """(B,): the mean over the tokens."""
    return lambda t: F.cross_entropy(model(t).transpose(1, 2), t, reduction="none").mean(1)


def each(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """(B, T)."""
    return lambda t: F.cross_entropy(model(t).flatten(0, 1), t.flatten(), reduction="none").reshape(t.shape)


def reaches(sites: list[Any]) -> list[str]:
    """What each site reaches, in a word."""
    names = []
    for site in sites:
        if site.reach is None:
            names.append("all")
        elif site.tokens is None:
            names.append("".join(str(int(one)) for one in site.reach[0]))
        else:
            own = torch.equal(site.reach, torch.eye(len(site.reach)))
            names.append("own" if own else "later" if torch.equal(site.reach, site.reach.triu()) else "blocks")
    return names


# -- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("losses", [nll, each])
@pytest.mark.parametrize("kinds", [("causal", "causal"), ("bare",), ("grouped",), ("unfused",), ("both ways",)])
def test_tokens_change_nothing_but_the_noise(kinds: tuple[str, ...], losses: Any) -> None:
    torch.manual_seed(0)
    model = Words(*kinds).double()
    sites = check_exact(model, losses(model), WORDS)
    found = reaches(sites)
    # words, then for each block: attention, its output, the gate, and what is added
    before = {"grouped": 3, "causal": 5}.get(
        kinds[0], 1
    )  # keys of fewer heads, and so the norm, have noise of their own
    what = "all" if kinds[0] in ("unfused", "both ways") else "later"  # weights of zero prove nothing
    assert found == [what] * before + ["own"] * 4


def test_recurrent_networks_reach_what_comes_after() -> None:
    torch.manual_seed(0)
    for batch_first in (True, False):
        model = Steps(batch_first=batch_first).double()
        found = reaches(check_exact(model, nll(model), WORDS))
        assert found == ["later", "all", "0111", "0011", "0001"]
    model = Steps(batch_first=True, bidirectional=True).double()
    found = reaches(check_exact(model, each(model), WORDS))
    assert "1110" in found and "0111" in found


@pytest.mark.parametrize(("numbers", "blocks"), [(1000, [T, T, T, T, T]), (400, [T, T, T, 1, T]), (60, [1, 1, 1])])
def test_smaller_forms_are_as_exact(numbers: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_LARGEST", numbers)
    monkeypatch.setattr(control, "_SHARE", 0)
    torch.manual_seed(0)
    model = Words("causal").double()
    estimate = jp.ForwardGradient(model.parameters())
    estimate(nll(model), WORDS)
    (learned,) = estimate._known.control._learned.values()
    assert [form.blocks for form in learned.forms.values()] == blocks
    check_exact(model, nll(model), WORDS, every_site=False)


def test_attention_that_drops_weights_is_not_passed() -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # does not say which it has dropped
    qkv, head = nn.Linear(4, 12), nn.Linear(4, V)
    x = torch.randn(B, 2, T, 4)

    def losses(dropped: float) -> Callable[[Tensor], Tensor]:
        return lambda x: head(kernel(*qkv(x).split(4, 3), dropped)[0]).square().sum((1, 2, 3))

    for dropped, count in ((0.0, x.numel()), (0.1, 3 * x.numel())):
        (site,) = jp.ForwardGradient([*qkv.parameters(), *head.parameters()]).sites(losses(dropped), x)
        assert site.shape.numel() == count


def test_one_sample_has_tokens_too() -> None:
    torch.manual_seed(0)
    model = Words("causal").double()
    assert reaches(check_exact(model, nll(model), WORDS[:1])) == ["later", "own", "own", "own", "own"]


# -- what is proven -------------------------------------------------------------------------------------------------


def test_weights_that_are_zero_prove_nothing() -> None:
    torch.manual_seed(0)
    model = Words("both ways", "both ways")
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.zero_()
            block.out.bias.zero_()
    sites = jp.ForwardGradient(model.parameters()).sites(nll(model), WORDS)
    assert reaches(sites) == ["all"] * 5 + ["own"] * 4


def test_tokens_are_told_from_other_axes_of_the_same_size() -> None:
    torch.manual_seed(0)
    size = 4
    model = Words("causal", width=size, length=size)
    model.words, model.head = nn.Embedding(size, size), nn.Linear(size, size)
    sites = jp.ForwardGradient(model.parameters()).sites(nll(model), torch.randint(0, size, (size, size)))
    assert reaches(sites) == ["later", "own", "own", "own", "own"]
    assert all(site.layout.axis == 0 for site in sites) and [site.tokens.axis for site in sites] == [1, 2, 1, 1, 1]


def test_long_sequences_are_cut_into_blocks() -> None:
    torch.manual_seed(0)
    model = Words("causal", length=50)
    sites = jp.ForwardGradient(model.parameters()).sites(nll(model), torch.randint(0, V, (2, 50)))
    reach = sites[0].reach
    assert reach.shape == (50, 50) and len(reach.unique(dim=0)) == tokens._THRESHOLDS + 1
    assert bool((reach >= torch.ones(50, 50).triu()).all()) and float(reach.mean()) < 0.55


def test_a_program_that_changes_is_seen_when_it_is_looked_at_again() -> None:
    torch.manual_seed(0)
    model = Words("causal")
    block = model.blocks[0]
    mask = torch.ones(T, T).tril().bool()
    block.kind = "masked"

    def forward(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in block._parts(block.first(x)))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + block.out(y.transpose(1, 2).flatten(2))
        return x + block.down(F.silu(block.gate(x)) * block.up(x))

    block.forward = forward
    del block.second
    estimate = jp.ForwardGradient(model.parameters(), probe_every=2)
    assert reaches(estimate.sites(nll(model), WORDS))[0] == "later"
    mask.fill_(True)
    for _ in range(2):
        estimate(nll(model), WORDS)
    assert reaches(estimate.sites(nll(model), WORDS))[0] == "all"


def test_images_and_tables_have_none() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 4))
    sites = jp.ForwardGradient(net.parameters()).sites(lambda x: net(x).square().sum(1), torch.randn(4, 1, 6, 6))
    assert reaches(sites) == ["all", "all"]


# -- what it is good for --------------------------------------------------------------------------------------------


def test_noise_is_far_less(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Words("causal", width=8, length=12)
    t = torch.randint(0, V, (16, 12))
    nll(model)(t).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])

    def error() -> float:
        estimate = jp.ForwardGradient(model.parameters(), samples=4, control=False)
        total = 0.0
        for _ in range(10):
            model.zero_grad()
            estimate(nll(model), t)
            total += float((torch.cat([p.grad.flatten() for p in model.parameters()]) - wanted).square().sum())
        return total

    apart = error()
    monkeypatch.setattr(plans, "find_tokens", lambda *_: None)
    assert apart < 0.25 * error()
