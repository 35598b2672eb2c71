"""The pass that plans: who makes and who reads which value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from classifiers import X
from jetplane.gradients.plan.noise_plan import Node
from jetplane.gradients.plan.record import ValueGraph

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def randomised() -> Tensor:
    return torch.native_dropout(PARAMETER, 0.5, True)[0]


def test_random_numbers_for_a_function_of_parameters_are_refused() -> None:
    with pytest.raises(jp.UnsupportedProgram, match="draws random numbers for a function of parameters"):
        jp.forward_gradient(lambda x: x @ randomised() @ OTHER, {"weight": PARAMETER, "other": OTHER}, X)


def node(number: int) -> Node:
    func = torch.ops.aten.relu.default
    return Node(number, func, (), [], [], torch.Size([]), torch.device("cpu"), "", frozenset(), False, False, False)


def test_a_value_is_known_by_its_tensor_until_it_is_written() -> None:
    graph, x, y = ValueGraph(), torch.zeros(4), torch.zeros(4)
    graph.enter(node(0), [x])
    graph.enter(node(1), [y])
    assert graph.values((0,), x) == [((0,), 0)] and graph.values((1,), y) == [((1,), 1)]
    assert graph.maker == [0, 1]
    graph.wrote(y[:2])  # behind its back: any value of that memory, and where cannot be told
    assert graph.values((0,), y) == [(None, 1)] and graph.values((0,), x) == [((0,), 0)]
    assert graph.values((0,), torch.zeros(4)) == []


def test_another_name_of_a_tensor_is_the_same_value() -> None:
    graph, x = ValueGraph(), torch.zeros(4)
    graph.enter(node(0), [x])
    alias = x.detach()
    assert graph.values((0,), alias) == [(None, 0)]
    graph.same(alias, x)
    assert graph.values((2,), alias) == [((2,), 0)]
