"""Losses of reinforcement learning: torchrl's objectives on a TensorDict, and what stable-baselines3 trains with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .program import Built, Program

__all__ = ["programs"]

_STOCHASTIC = ("PPOLoss", "ClipPPOLoss", "A2CLoss", "ReinforceLoss", "SACLoss", "IQLLoss", "CQLLoss")
_OTHERS = ("REDQLoss", "DDPGLoss", "TD3Loss", "TD3BCLoss", "DQNLoss", "DiscreteSACLoss", "BCLoss")
_POLICIES = ("A2C", "PPO", "PPO.discrete", "DQN", "SAC", "TD3", "DDPG")


def programs() -> Iterator[Program]:
    """One program for each objective and policy."""
    for name in (*_STOCHASTIC, *_OTHERS):
        yield Program(f"torchrl/{name}", partial(_objective, name))
    for name in (
        "LSTMModule",
        "GRUModule",
        "NoisyLinear",
        "MultiAgentMLP",
        "QMixer",
        "TruncatedNormal",
    ):
        yield Program(f"torchrl/{name}", partial(_part, name))
    for name in _POLICIES:
        yield Program(f"stable-baselines3/{name}", partial(_policy, name))


def _net(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, 8), nn.Tanh(), nn.Linear(8, outer))


def _batch(discrete: bool) -> Any:
    from tensordict import TensorDict

    n = 6
    action = nn.functional.one_hot(torch.arange(n) % 2, 2) if discrete else 0.8 * torch.rand(n, 2) - 0.4
    after = {"observation": torch.randn(n, 3), "reward": torch.randn(n, 1)}
    after |= {"done": torch.zeros(n, 1, dtype=torch.bool), "terminated": torch.zeros(n, 1, dtype=torch.bool)}
    now = {"observation": torch.randn(n, 3), "action": action, "advantage": torch.randn(n, 1)}
    now |= {"value_target": torch.randn(n, 1), "action_log_prob": torch.randn(n) - 1, "sample_log_prob": torch.randn(n)}
    now |= {"loc": torch.randn(n, 2), "scale": torch.rand(n, 2) + 0.5}
    return TensorDict({**now, "next": TensorDict(after, [n])}, [n])


def _objective(name: str) -> Built:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl import objectives
    from torchrl.data import OneHot
    from torchrl.modules import Actor, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator

    discrete = name.startswith(("DQN", "Discrete"))
    net = nn.Sequential(_net(3, 4), NormalParamExtractor())
    plain = name in ("PPOLoss", "ClipPPOLoss", "A2CLoss", "ReinforceLoss", "BCLoss")
    kind = torch.distributions.Normal if plain else TanhNormal
    if plain:

        def kind(loc: Tensor, scale: Tensor) -> Any:
            return torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)

    actor: Any = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=kind,
        return_log_prob=True,
    )
    value = ValueOperator(_net(3, 1), in_keys=["observation"])

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(5, 1)

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.net(torch.cat([observation, action], -1))

    pair = ValueOperator(Pair(), in_keys=["observation", "action"])
    many = ValueOperator(_net(3, 2), in_keys=["observation"], out_keys=["action_value"])
    certain = Actor(nn.Sequential(_net(3, 2), nn.Tanh()), in_keys=["observation"])
    made: dict[str, Any] = {
        **{key: lambda: getattr(objectives, name)(actor, value) for key in ("PPOLoss", "ClipPPOLoss")},
        **{key: lambda: getattr(objectives, name)(actor, value) for key in ("A2CLoss", "ReinforceLoss")},
        "SACLoss": lambda: objectives.SACLoss(actor, pair, value, num_qvalue_nets=2, action_spec=_bounded()),
        "IQLLoss": lambda: objectives.IQLLoss(actor, pair, value),
        "CQLLoss": lambda: objectives.CQLLoss(actor, pair, action_spec=_bounded()),
        "REDQLoss": lambda: objectives.REDQLoss(
            actor, pair, num_qvalue_nets=3, sub_sample_len=2, action_spec=_bounded()
        ),
        "DDPGLoss": lambda: objectives.DDPGLoss(certain, pair),
        "TD3Loss": lambda: objectives.TD3Loss(certain, pair, bounds=(-1.0, 1.0)),
        "TD3BCLoss": lambda: objectives.TD3BCLoss(certain, pair, bounds=(-1.0, 1.0)),
        "BCLoss": lambda: objectives.BCLoss(actor),
        "DQNLoss": lambda: objectives.DQNLoss(QValueActor(_net(3, 2), spec=OneHot(2)), action_space="one-hot"),
        "DiscreteSACLoss": lambda: objectives.DiscreteSACLoss(_discrete(), many, num_actions=2, action_space="one-hot"),
    }
    loss, batch = made[name](), _batch(discrete)
    return Built(loss.double(), lambda: dict(loss(batch.clone()).items()))


def _bounded() -> Any:
    from torchrl.data import Bounded

    return Bounded(-torch.ones(2), torch.ones(2), (2,))


def _discrete() -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    net = TensorDictModule(_net(3, 2), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical)


def _part(name: str) -> Built:
    from torchrl import modules

    x = torch.randn(4, 5, 3)
    if name in ("LSTMModule", "GRUModule"):
        keys = {"in_key": "x", "out_key": "y", "input_size": 3, "hidden_size": 4}
        layer = getattr(modules, name)(**keys).double()
        core = layer.lstm if name == "LSTMModule" else layer.gru
        return Built(layer, lambda: core(x))
    if name == "TruncatedNormal":
        net = _net(3, 4)
        at = x[:, 0, :2].sigmoid() - 0.5
        make = lambda h: modules.TruncatedNormal(h[:, :2], h[:, 2:].exp(), low=-1.0, high=1.0)  # noqa: E731
        return Built(net, lambda: make(net(x[:, 0])).log_prob(at))
    made: dict[str, Any] = {
        "NoisyLinear": lambda: (modules.NoisyLinear(3, 4), (x,)),
        "MultiAgentMLP": lambda: (
            modules.MultiAgentMLP(3, 2, n_agents=5, centralized=True, share_params=False, depth=1, num_cells=8),
            (x,),
        ),
        "QMixer": lambda: (
            modules.QMixer(state_shape=(3,), mixing_embed_dim=4, n_agents=5, device="cpu"),
            (x[..., :1], x[:, 0]),
        ),
    }
    layer, given = made[name]()
    layer.double().train()
    with torch.no_grad():
        layer(*given)
    return Built(layer, lambda: layer(*given))


def _policy(name: str) -> Built:
    """The losses that a policy's training step takes, written as its ``train`` has them."""
    import numpy as np
    import stable_baselines3 as sb3
    from gymnasium import spaces

    seen = spaces.Box(-1, 1, (3,), np.float64)
    acts: Any = spaces.Discrete(2) if name in ("DQN", "PPO.discrete") else spaces.Box(-1, 1, (2,), np.float64)
    kind = getattr(sb3, name.split(".")[0])
    policy = kind.policy_aliases["MlpPolicy"](seen, acts, lambda _: 1e-3, net_arch=[8]).double()
    policy.set_training_mode(True)
    x, action = torch.randn(6, 3), torch.randint(2, (6,)) if isinstance(acts, spaces.Discrete) else torch.randn(6, 2)
    if name in ("A2C", "PPO", "PPO.discrete"):

        def on_policy() -> Any:
            value, likely, entropy = policy.evaluate_actions(x, action)
            ratio = (likely - likely.detach() + 0.1 * torch.linspace(-2, 2, 6)).exp()
            advantage = torch.linspace(-1, 2, 6)
            gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
            return -gain.mean() + nn.functional.mse_loss(value.flatten(), advantage) - 0.01 * entropy.mean()

        return Built(policy, on_policy)
    if name == "DQN":

        def q() -> Any:
            with torch.no_grad():
                target = policy.q_net_target(x.flip(0)).max(1).values
            return nn.functional.smooth_l1_loss(policy.q_net(x).gather(1, action[:, None])[:, 0], target)

        return Built(policy, q)

    def off_policy() -> Any:
        moved = policy.actor.action_log_prob(x)[0] if name == "SAC" else policy.actor(x)
        critic = sum(nn.functional.mse_loss(one, torch.zeros(6, 1)) for one in policy.critic(x, action))
        return critic - torch.cat(policy.critic(x, moved), 1).min(1).values.mean()

    return Built(policy, off_policy)
