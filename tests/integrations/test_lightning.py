"""Lightning's Trainer: the numbers of a plain loop, resume as undisturbed, and what it logs and validates."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import jetplane as jp

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from jetplane.integrations.lightning import ForwardStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :3].argmax(1))


class Small(lightning.LightningModule):
    """A classifier, whose optimizer is what is swapped."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        self.kind, self.options, self.seen, self.lrs = kind, options, [], []

    def training_step(self, batch: Any, number: int) -> Any:
        out = self.net(batch[0])
        loss = functional.cross_entropy(out, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "dtype": out.dtype}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.kind, self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def optimizer_of(kind: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    if kind == "plane":
        return jp.optim.FoMoHKD(params, **({"lr": 0.5, "k": 3, "solver": jp.solvers.SaddleFree()} | options))
    if kind == "horizon":
        return jp.optim.HorizonAdam(params, **({"samples": 2} | options))
    return torch.optim.AdamW(params, **({"lr": 1e-2} | options))


def trainer_of(folder: Path, steps: int, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = quiet | {"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_steps": steps} | options
    return lightning.Trainer(strategy=ForwardStrategy(), default_root_dir=folder, **settings)


def fit(trainer: Any, module: Any, **options: Any) -> None:
    trainer.fit(module, DataLoader(DATA, 4), DataLoader(DATA, 12), **options)


def parameters(module: Any) -> Tensor:
    return torch.cat([one.detach().flatten().double() for one in module.state_dict().values()])


@pytest.mark.parametrize("kind", ["plane", "horizon", "adamw"])
def test_resume_goes_on_with_the_numbers_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    through = Small(kind)
    trainer = trainer_of(tmp_path, 8, accumulate_grad_batches=2)
    fit(trainer, through)
    assert trainer.global_step == 8
    first = trainer_of(tmp_path, 6, accumulate_grad_batches=2)
    fit(first, Small(kind))
    first.save_checkpoint(tmp_path / "middle.ckpt")
    resumed = Small(kind)
    again = trainer_of(tmp_path, 8, accumulate_grad_batches=2)
    fit(again, resumed, ckpt_path=tmp_path / "middle.ckpt")
    assert again.global_step == 8
    assert torch.equal(parameters(through), parameters(resumed))
    assert through.lrs[-1] == resumed.lrs[-1]


def test_planes_take_the_steps_of_a_plain_loop_with_the_whole_batch(tmp_path: Path) -> None:
    module = Small("plane")
    net = copy.deepcopy(module.net)
    trainer = trainer_of(tmp_path, 2, accumulate_grad_batches=2)
    with jp.forward_only():
        fit(trainer, module)
    optimizer = optimizer_of("plane", net.parameters())
    parts = list(DataLoader(DATA, 4))
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - 0.09 * step)
        two = parts[2 * step : 2 * step + 2]
        closures = [lambda x=x, y=y: functional.cross_entropy(net(x), y) for x, y in two]
        optimizer.step([lambda one=one: (loss := one(), loss) for one in closures], has_aux=True)
    assert trainer.global_step == 2 and module.seen[1]["dtype"] is torch.float32
    # Lightning divides the loss of a part by their number
    assert float(module.seen[3]["loss"]) == pytest.approx(float(optimizer.report.aux[1]) / 2, rel=1e-6)
    for (name, one), other in zip(module.net.state_dict().items(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)  # the statistics of the batch norm, too
    assert trainer.logged_metrics["jetplane/moved"] == 1.0


def test_gradients_are_clipped_as_the_trainer_says(tmp_path: Path) -> None:
    for kind, options in (("adamw", {}), ("horizon", {})):
        module, norms = Small(kind, **options), []
        trainer = trainer_of(tmp_path, 1, gradient_clip_val=1e-3)
        module.on_train_batch_end = lambda *_, m=module, n=norms: n.append(
            torch.stack([p.grad.norm() for p in m.parameters()]).norm()
        )
        module.optimizer_zero_grad = lambda *_: None
        fit(trainer, module)
        assert float(norms[0]) == pytest.approx(1e-3, rel=1e-2), kind
    with pytest.raises(
        ValueError, match=r"gradient_clip_val is 0.5 and FoMoHKD has no gradient; expected the optimizer's"
    ):
        fit(trainer_of(tmp_path, 1, gradient_clip_val=0.5), Small("plane"))


def test_validation_has_the_averaged_parameters_and_training_goes_on_without(tmp_path: Path) -> None:
    module = Small("horizon")
    trainer = trainer_of(tmp_path, 6)
    fit(trainer, module)
    optimizer, logged = trainer.optimizers[0], float(trainer.callback_metrics["val"])
    left = parameters(module)
    module.eval()
    with optimizer.averaged(), torch.no_grad():
        assert not torch.equal(left, parameters(module))
        assert float(functional.cross_entropy(module.net(DATA.tensors[0]), DATA.tensors[1])) == pytest.approx(logged)


def test_bf16_reaches_the_loss_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    module = Small("plane")
    fit(trainer_of(tmp_path, 1, precision="bf16-mixed"), module)
    assert module.seen[0]["dtype"] is torch.bfloat16
    with pytest.raises(ValueError, match="compile is True for HorizonAdam"):
        fit(trainer_of(tmp_path, 1), Small("horizon", compile=True))
    several = Small("plane")
    several.configure_optimizers = lambda: [optimizer_of("plane", [p]) for p in several.net[0].parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, RuntimeError), match="optimizers"):
            fit(trainer_of(tmp_path, 1), several)


def test_a_module_that_optimizes_by_hand_is_left_alone(tmp_path: Path) -> None:
    class ByHand(Small):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> Any:
            return self.optimizers().step(lambda: functional.cross_entropy(self.net(batch[0]), batch[1]))

    module = ByHand("plane")
    module.automatic_optimization = False
    before = parameters(module)
    fit(trainer_of(tmp_path, 2), module)
    assert not torch.equal(before, parameters(module))


def test_what_the_strategy_refuses_by_itself() -> None:
    module = Small("plane")
    module.trainer = trainer = SimpleNamespace(lightning_module=module, precision="16-mixed", gradient_clip_val=None)
    strategy = ForwardStrategy()
    strategy._lightning_module = module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.pytorch.strategies.SingleDeviceStrategy.setup_optimizers", lambda *_: None)
        strategy._optimizers = [optimizer_of("plane", module.parameters())]
        with pytest.raises(ValueError, match="precision is '16-mixed'; expected '32-true', '64-true' or 'bf16-mixed'"):
            strategy.setup_optimizers(trainer)
        strategy._optimizers = strategy._optimizers * 2
        with pytest.raises(ValueError, match="there are 2 optimizers; expected one, or to optimize by hand"):
            strategy.setup_optimizers(trainer)
