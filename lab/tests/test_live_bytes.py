"""Bytes of live tensors: storages, from the operation that makes them until nothing refers to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import jetplane as jp
from jetplane_lab.live_bytes import held_tensors, live_bytes, step_bytes, tensors_of

X = torch.ones(1000)
SIZE = 4000


def test_what_is_there_and_what_is_made() -> None:
    assert live_bytes(lambda: X + 1) == SIZE
    assert live_bytes(lambda: X + 1, lambda: [X, X.view(10, 100)]) == 2 * SIZE
    assert live_bytes(lambda: None, lambda: [X]) == SIZE and live_bytes(lambda: None) == 0


def test_what_is_let_go_no_longer_counts() -> None:
    def chain() -> Tensor:
        y = X
        for _ in range(5):
            y = y + 1
        return y

    assert live_bytes(chain) == 2 * SIZE
    assert live_bytes(lambda: [X + n for n in range(5)]) == 5 * SIZE


def test_views_and_changes_in_place_are_not_new() -> None:
    fresh = torch.zeros(1000)
    assert live_bytes(lambda: fresh.add_(1).view(10, 100).t()) == 0  # there before, and not named
    assert live_bytes(lambda: (X + 1).mul_(2).view(10, 100)) == SIZE


def test_what_the_step_lets_go_of_what_was_there() -> None:
    kept = [torch.zeros(1000)]

    def replaced() -> None:
        kept.clear()
        kept.append(X + 1)

    assert live_bytes(replaced, lambda: kept) == SIZE


def test_a_backward_pass_keeps_what_it_will_read() -> None:
    layers = nn.Sequential(*(nn.Tanh() for _ in range(6)))
    x = torch.ones(1000, requires_grad=True)
    kept, plain = live_bytes(lambda: layers(x).sum().backward()), live_bytes(lambda: layers(x.detach()).sum())
    assert plain <= 2 * SIZE + 4 and kept >= 6 * SIZE


def test_passes_of_this_library_are_seen() -> None:
    found = live_bytes(lambda: jp.quadratic(lambda x: (x.sin() * x).sum(), X, torch.ones(3, 1000)))
    assert found >= 4 * SIZE  # the value and three tangents


def test_tensors_in_a_state() -> None:
    assert [one.numel() for one in tensors_of({"a": [torch.ones(1), (torch.ones(2), 3)], "b": "c"})] == [1, 2]


def test_a_step_with_what_stays_between_steps() -> None:
    model = nn.Linear(1000, 1, bias=False)
    adam = torch.optim.Adam(model.parameters(), capturable=False, foreach=False)

    def step() -> None:
        adam.zero_grad()
        model(X).sum().backward()
        adam.step()

    step()
    assert len(list(held_tensors(model, adam.state_dict))) == 5  # weight, gradient, two moments, and a count
    found = step_bytes(step, model, adam.state_dict)
    assert 4 * SIZE < found < 8 * SIZE


def test_a_state_of_copies_counts_as_what_they_are_copies_of() -> None:
    model, kept = nn.Linear(1000, 1, bias=False), torch.zeros(1000)
    assert step_bytes(lambda: kept + 1, model, lambda: {"kept": kept}) == 3 * SIZE
    assert step_bytes(lambda: kept + 1, model, lambda: {"kept": kept.clone()}) == 3 * SIZE
