"""A call of each operation that has an adjoint, and the check of its record against autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exactness import normal
from jetplane.ad.rules.attention import KERNELS
from jetplane.gradients.adjoints import adjoint as table
from jetplane.gradients.adjoints.default import vjp
from jetplane.gradients.program.done import Done
from jetplane.gradients.program.watch import Path

aten = torch.ops.aten
X, W, IMAGE = (4, 3), (3, 5), (2, 3, 4, 4)
POOL = [[2, 2], [2, 2], [0, 0], [1, 1], False]


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def norm_of(training: bool | None, *last: Any) -> tuple[Any, ...]:
    given = [] if training is None else [training]
    return normal(*IMAGE), normal(3), normal(3), normal(3), positive(3), *given, *last


def attention(kernel: Any) -> tuple[Any, ...]:
    shape = (2, 2, 3, 4)
    extra = {"attn_bias": None, "compute_log_sumexp": False}
    options = [extra[name] for name in KERNELS[kernel] if name in extra]
    return normal(*shape), normal(*shape), normal(*shape), *options


# by module of adjoints: each operation that it enters, with arguments
BY_MODULE: dict[str, dict[Any, tuple[Any, ...]]] = {
    "pointwise": {
        aten.relu: (normal(*X),),
        aten.add.Tensor: (normal(*X), normal(3), {"alpha": 2}),
        aten.sub.Tensor: (normal(1, 3), normal(*X), {"alpha": 3}),
        aten.where.self: (normal(*X) > 0, normal(3), normal(*X)),
        aten.masked_fill.Scalar: (normal(*X), normal(*X) > 0, 2.0),
        aten.masked_fill.Tensor: (normal(*X), normal(*X) > 0, torch.tensor(2.0, dtype=torch.float64)),
        aten.native_dropout.default: (normal(*X), 0.4, True),
    },
    "moves": {
        aten.unsqueeze: (normal(*X), 1),
        aten.squeeze: (normal(4, 1, 3),),
        aten.view.default: (normal(*X), [2, 6]),
        aten._unsafe_view: (normal(*X), [2, 6]),
        aten.alias: (normal(*X),),
        aten._reshape_alias: (normal(*X), [2, 6], [6, 1]),
        aten.clone: (normal(*X),),
        aten._to_copy: (normal(*X), {"dtype": torch.float64}),
        aten.lift_fresh: (normal(*X),),
        aten.t.default: (normal(*X),),
        aten.transpose.int: (normal(*IMAGE), 1, 3),
        aten.permute.default: (normal(2, 3, 4), [2, 0, 1]),
        aten.select.int: (normal(*X), 1, -1),
        aten.slice.Tensor: (normal(*X), 0, 1, 9, 2),
        aten.expand: (normal(1, 3), [4, 3]),
        aten.split.Tensor: (normal(*X), 3),
        aten.split_with_sizes.default: (normal(*X), [1, 2], 1),
        aten.unbind.int: (normal(*X), 1),
        aten.unsafe_split.Tensor: (normal(*X), 2),
        aten.cat.default: ([normal(*X), normal(4, 2)], 1),
        aten.stack.default: ([normal(*X), normal(*X)], 1),
        aten.copy.default: (torch.zeros(X, dtype=torch.float64), normal(3)),
    },
    "look_ups": {
        aten.embedding.default: (normal(5, 2), torch.tensor([[0, 4], [2, 2]])),
        aten.index_select.default: (normal(*X), 1, torch.tensor([0, 2, 2])),
        aten.index.Tensor: (normal(*X), [torch.tensor([0, 3, 3]), torch.tensor([1, 0, 0])]),
    },
    "linear_maps": {
        aten.mm.default: (normal(*X), normal(*W)),
        aten.bmm.default: (normal(2, *X), normal(2, *W)),
        aten.addmm.default: (normal(5), normal(*X), normal(*W), {"beta": 2, "alpha": 3}),
        aten.baddbmm.default: (normal(2, 4, 5), normal(2, *X), normal(2, *W), {"beta": 2, "alpha": 3}),
        # torch has it in short dtypes; the second group is empty
        aten._grouped_mm.default: (torch.randn(8, 16), torch.randn(3, 16, 8), torch.tensor([4, 4, 8]).int()),
        aten.mv.default: (normal(*X), normal(3)),
        aten.dot.default: (normal(3), normal(3)),
        aten.convolution.default: (
            normal(*IMAGE),
            normal(2, 3, 3, 3),
            normal(2),
            [1] * 2,
            [1] * 2,
            [1] * 2,
            False,
            [0] * 2,
            1,
        ),
        aten._convolution.default: (
            *(normal(*IMAGE), normal(2, 3, 3, 3), normal(2), [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1),
            *(False, False, False, False),
        ),
    },
    "pools": {
        aten.max_pool2d_with_indices.default: (normal(*IMAGE), *POOL),
        aten.max_pool3d_with_indices.default: (normal(*IMAGE, 4), [2, 2, 2]),
        aten.adaptive_max_pool2d.default: (normal(*IMAGE), [2, 2]),
        aten.adaptive_max_pool3d.default: (normal(*IMAGE, 4), [2, 2, 2]),
        aten.avg_pool2d.default: (normal(*IMAGE), [2, 2]),
        aten.avg_pool3d.default: (normal(*IMAGE, 4), [2, 2, 2]),
        aten._adaptive_avg_pool2d.default: (normal(*IMAGE), [2, 2]),
        aten._adaptive_avg_pool3d.default: (normal(*IMAGE, 4), [2, 2, 2]),
        aten.mean.dim: (normal(*IMAGE), [1, -1]),
        aten.sum.dim_IntList: (normal(*IMAGE), [2], True),
        aten.mean.default: (normal(*X),),
        aten.sum.default: (normal(*X),),
    },
    "normalising": {
        aten.native_layer_norm.default: (normal(*X), [3], normal(3), normal(3), 1e-5),
        aten.native_group_norm.default: (normal(2, 4, 3), normal(4), normal(4), 2, 4, 3, 2, 1e-5),
        aten._fused_rms_norm.default: (normal(*X), [3], normal(3), 1e-5),
        aten.native_batch_norm.default: norm_of(False, 0.1, 1e-5),
        aten.cudnn_batch_norm.default: norm_of(True, 0.1, 1e-5),
        aten._native_batch_norm_legit.default: norm_of(True, 0.1, 1e-5),
        aten._native_batch_norm_legit.no_stats: (normal(*IMAGE), normal(3), normal(3), True, 0.1, 1e-5),
        aten._batch_norm_with_update.default: norm_of(None, 0.1, 1e-5),
        aten._batch_norm_no_update.default: norm_of(None, 0.1, 1e-5),
        aten._native_batch_norm_legit_no_training.default: norm_of(None, 0.1, 1e-5),
    },
    "tails": {
        aten._log_softmax: (normal(*X), 1, False),
        aten._softmax: (normal(*X), 0, False),
        aten._safe_softmax: (normal(*X), 1),
        aten.binary_cross_entropy.default: (normal(*X).sigmoid(), normal(*X).sigmoid(), positive(*X), 1),
        aten.nll_loss_forward.default: (normal(*X), torch.tensor([0, 2, 1, -100]), positive(3), 1, -100),
        aten.nll_loss2d_forward.default: (normal(*IMAGE), torch.randint(3, (2, 4, 4)), None, 0, -100),
        aten.gather: (normal(*X), 1, torch.tensor([[0, 0], [1, 2], [2, 2], [1, 0]])),
        aten.logsumexp: (normal(*X), [0, -1]),
    },
    "attending": {
        **{kernel: attention(kernel) for kernel in KERNELS},
    },
}
CASES = {op: arguments for cases in BY_MODULE.values() for op, arguments in cases.items()}
# by operations that the CPU has, of the same arguments and results
STAND_INS: dict[Any, Any] = {
    aten.cudnn_batch_norm.default: aten.native_batch_norm.default,
    aten._safe_softmax: aten._softmax.default,
    aten._batch_norm_no_update.default: aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default: aten._native_batch_norm_legit.default,
    aten.copy.default: aten.add.Tensor,
    **dict.fromkeys(KERNELS, aten._scaled_dot_product_attention_math.default),
}
NO_DERIVATIVE = {(aten.copy.default, (0,))}


def overload_of(op: Any) -> Any:
    return op if hasattr(op, "overloadpacket") else getattr(op, op.overloads()[0])


def done_of(op: Any) -> tuple[Done, Done]:
    """A call of an operation, and one of the same that autograd differentiates."""
    torch.manual_seed(1)
    args, kwargs = CASES[op], {}
    if isinstance(args[-1], dict):
        args, kwargs = args[:-1], args[-1]
    func, stand_in = overload_of(op), STAND_INS.get(op) or overload_of(op)
    given = args
    if op in KERNELS:
        given = args[:3]
    elif op is aten._safe_softmax:
        given = (*args, False)
    elif op is aten._batch_norm_with_update.default:
        given = (*args[:5], True, *args[5:])
    out = stand_in(*given, **kwargs)
    return Done(func, args, kwargs, out), Done(stand_in, given, kwargs, out)


def paths_of(done: Done) -> list[Path]:
    found: list[Path] = []
    for place, value in enumerate(done.args):
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append((place,))
        elif isinstance(value, list):
            found += [(place, k) for k, one in enumerate(value) if isinstance(one, Tensor) and one.is_floating_point()]
    return found


def check_record(op: Any) -> None:
    """Every way to pull back through ``op`` is its vector-Jacobian product by autograd."""
    done, plain = done_of(op)
    record = table.lookup(done.func)
    delta: Any = torch.randn_like(done.result)
    if record.parts:
        delta = [None, *(torch.randn_like(one) for one in done.out[1:])]
    compared = 0
    for path in paths_of(plain):
        if (op, path) in NO_DERIVATIVE or (record.norms_batch and path[0] > 2):  # statistics are no parameters
            continue
        for form in {record.pull if record.holds(path) else None, record.product_to(path)} - {None}:
            torch.manual_seed(1)
            torch.testing.assert_close(form(delta, done, path), vjp(delta, plain, path), rtol=0, atol=1e-12)
            compared += 1
    assert compared
