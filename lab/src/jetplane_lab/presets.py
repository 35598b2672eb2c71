"""Runs with names: the rows of the paper's two result tables, and what goes beyond the paper.

The paper's rows say what was trained, with which hyper-parameters, and what came out.

The result and hyper-parameter tables are the paper's; what they leave out follows the authors' published code. Four
choices are ours, for the sources disagree or say nothing:

- ``cnn-fomoh-3d`` has batches of 512 and ``cnn-fomoh-3d-sch`` of 2048, as printed.
- The scheduled CNN rows multiply lr by 0.1 every 1000 epochs (``step``), as the text says. The authors' code did that
  for FoMoH-KD; for FoMoH it multiplied three times at epoch 1000 and never again, which is ``--schedule milestone3``.
- The scheduled logistic-regression rows use ``rise``: the text says that lr was reduced "at the epoch where the NLL
  starts to increase", and not how that epoch was found.
- No row ends for a large loss, only for one that is not finite: the paper's K-dimensional step may go uphill while the
  projected Hessian is indefinite, so the CNN's loss first grows far above its start, and comes back.

The rows beyond the paper hold 5,000 digits of the training split out for validation, and look at the test split once,
after the last epoch. ``adam-cnn`` is backprop beside them: the same optimizer, schedule, batch and number of epochs.
Those on CIFAR-10 do the same with images, and leave everything to HorizonAdam, the number of tangents as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .config import REVERSE, Config, choice

__all__ = ["BEYOND", "CIFAR", "PRESETS", "SEEDS", "Paper", "Preset", "find"]

SEEDS = {"logistic-regression": (0, 1, 2, 3, 4), "cnn": (0, 1, 3)}  # the authors', for each model
_OUR_SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Paper:
    """One row of the paper's result table, (mean, std) over seeds, and the bounds of its search for lr."""

    train_nll: tuple[float, float]
    train_accuracy: tuple[float, float]
    validation_nll: tuple[float, float]
    validation_accuracy: tuple[float, float]
    lr_bounds: tuple[float, float]


@dataclass(frozen=True)
class Preset:
    """A run with a name. ``label`` is the paper's name of the row, where it is one of the paper's."""

    name: str
    label: str
    config: Config
    paper: Paper | None
    reverse_mode: bool  # whether it uses a backward pass

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the row."""
        if self.paper:
            return SEEDS[self.config.model]
        return _OUR_SEEDS if self.name in (*BEYOND, *CIFAR) else (self.config.seed,)


def find(name: str) -> Preset:
    """The preset of a name; an error names the nearest where there is none."""
    return PRESETS[choice("preset", name, PRESETS)]


# -- the paper's tables -------------------------------------------------------------------------------------------

# name, label, method, k, lr, bounds of lr, batch size, (schedule, gamma), then mean and std of
# train NLL, validation NLL, train accuracy, validation accuracy, in the order of the paper's columns
_Row = tuple[str, str, str, int, float, tuple[float, float], int, tuple[str, float] | None, tuple[float, ...]]

_WIDE, _STEEP = (0.001, 1.0), (0.00001, 0.1)
_RISE, _FLATTER, _STEP = ("rise", 0.1), ("rise", 0.8), ("step", 0.1)

# fmt: off
_LOGISTIC_REGRESSION: list[_Row] = [
    ("fgd", "FGD", "fgd", 1, 0.00006497, _STEEP, 128, None,
     (0.2976, 0.0007, 0.2949, 0.0017, 0.9154, 0.0003, 0.9163, 0.0019)),
    ("fomoh", "FoMoH", "fomoh", 1, 0.1362, _WIDE, 1024, None,
     (0.3223, 0.0013, 0.3186, 0.0019, 0.9073, 0.0011, 0.9110, 0.0021)),
    ("fomoh-sch", "FoMoH (LR-Sch.)", "fomoh", 1, 0.1362, _WIDE, 1024, _RISE,
     (0.3192, 0.0012, 0.3160, 0.0025, 0.9085, 0.0011, 0.9118, 0.0021)),
    ("fomoh-2d", "FoMoH-2D", "fomoh-kd", 2, 0.04221, _WIDE, 512, None,
     (0.3010, 0.0018, 0.3015, 0.0031, 0.9144, 0.0009, 0.9149, 0.0015)),
    ("fomoh-2d-sch", "FoMoH-2D (LR-Sch.)", "fomoh-kd", 2, 0.04221, _WIDE, 512, _RISE,
     (0.2921, 0.0014, 0.2951, 0.0027, 0.9174, 0.0005, 0.9170, 0.0010)),
    ("fomoh-3d", "FoMoH-3D", "fomoh-kd", 3, 0.1, _WIDE, 512, None,
     (0.3449, 0.0017, 0.3343, 0.0034, 0.8999, 0.0008, 0.9036, 0.0023)),
    ("fomoh-3d-sch", "FoMoH-3D (LR-Sch.)", "fomoh-kd", 3, 0.1, _WIDE, 512, _FLATTER,
     (0.2893, 0.0017, 0.3054, 0.0034, 0.9195, 0.0007, 0.9153, 0.0010)),
    ("fomoh-bp", "FoMoH-BP", "fomoh-bp", 1, 0.04688, (0.01, 1.0), 2048, None,
     (0.2312, 0.0001, 0.2679, 0.0003, 0.9366, 0.0001, 0.9267, 0.0002)),
    ("backprop", "Backpropagation", "backprop", 1, 0.03561, (0.01, 0.5), 2048, None,
     (0.2265, 0.0000, 0.2710, 0.0001, 0.9381, 0.0001, 0.9267, 0.0003)),
]
_CNN: list[_Row] = [
    ("fgd", "FGD", "fgd", 1, 0.0001376, _STEEP, 2048, None,
     (0.1211, 0.0097, 0.1104, 0.0086, 0.9641, 0.0038, 0.9677, 0.0030)),
    ("fomoh", "FoMoH", "fomoh", 1, 0.542, _WIDE, 2048, None,
     (0.1663, 0.0069, 0.1571, 0.0092, 0.9518, 0.0011, 0.9550, 0.0002)),
    ("fomoh-sch", "FoMoH (LR-Sch.)", "fomoh", 1, 0.542, _WIDE, 2048, _STEP,
     (0.1617, 0.0119, 0.1575, 0.0158, 0.9515, 0.0035, 0.9539, 0.0034)),
    ("fomoh-2d", "FoMoH-2D", "fomoh-kd", 2, 0.3032, _WIDE, 2048, None,
     (0.1015, 0.0041, 0.1016, 0.0066, 0.9691, 0.0011, 0.9693, 0.0020)),
    ("fomoh-2d-sch", "FoMoH-2D (LR-Sch.)", "fomoh-kd", 2, 0.3032, _WIDE, 2048, _STEP,
     (0.0900, 0.0070, 0.0913, 0.0041, 0.9731, 0.0022, 0.9718, 0.0014)),
    ("fomoh-3d", "FoMoH-3D", "fomoh-kd", 3, 0.3032, _WIDE, 512, None,
     (0.1085, 0.0105, 0.1073, 0.0133, 0.9674, 0.0022, 0.9686, 0.0028)),
    ("fomoh-3d-sch", "FoMoH-3D (LR-Sch.)", "fomoh-kd", 3, 0.3032, _WIDE, 2048, _STEP,
     (0.0809, 0.0061, 0.0923, 0.0132, 0.9759, 0.0014, 0.9734, 0.0022)),
    ("fomoh-bp", "FoMoH-BP", "fomoh-bp", 1, 0.04688, (0.01, 1.0), 2048, None,
     (0.0093, 0.0016, 0.0310, 0.0006, 0.9981, 0.0005, 0.9903, 0.0003)),
    ("backprop", "Backpropagation", "backprop", 1, 0.03561, (0.005, 0.2), 2048, None,
     (0.0053, 0.0034, 0.0329, 0.0032, 0.9990, 0.0009, 0.9909, 0.0004)),
]
# fmt: on


def _rows(prefix: str, model: str, epochs: int, rows: Iterable[_Row]) -> Iterator[Preset]:
    for name, label, method, k, lr, bounds, batch_size, schedule, results in rows:
        train_nll, train_std, nll, nll_std, train_accuracy, train_accuracy_std, accuracy, accuracy_std = results
        paper = Paper(
            train_nll=(train_nll, train_std),
            train_accuracy=(train_accuracy, train_accuracy_std),
            validation_nll=(nll, nll_std),
            validation_accuracy=(accuracy, accuracy_std),
            lr_bounds=bounds,
        )
        config = Config(model=model, method=method, k=k, lr=lr, batch_size=batch_size, epochs=epochs, divergence=None)
        if schedule:
            config = config.replace(schedule=schedule[0], gamma=schedule[1])
        yield Preset(f"{prefix}-{name}", label, config, paper, method in REVERSE)


_QUICK = Preset(
    name="quick",
    label="HorizonAdam, a quick look",
    config=Config("logistic-regression", "horizon", batch_size=250, epochs=10, dataset="digits"),
    paper=None,
    reverse_mode=False,
)

# -- beyond the paper ---------------------------------------------------------------------------------------------


def _beyond() -> Iterator[Preset]:
    cnn = Config("cnn", "adam", batch_size=2048, epochs=120, hold_out=5000)
    search = {"method": "gauss-newton", "lr": 1.0, "schedule": "cosine"}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        (
            "forward-cnn",
            "Forward gradients, Adam",
            {"method": "forward-adam", "samples": 16, "lr": 2e-3, "average": 8.0},
        ),
        ("horizon-cnn", "HorizonAdam", {"method": "horizon", "samples": 8, "lr": 1.0}),
        ("search-cnn", "Gauss-Newton search", {**search, "k": 256, "weight_decay": 1e-2, "epochs": 60}),
        (
            "search-lr",
            "Gauss-Newton search",
            {"model": "logistic-regression", **search, "k": 64, "penalty": 3e-3, "epochs": 3000},
        ),
        ("adam-cnn", "Backpropagation, Adam", {"lr": 1e-3, "average": 8.0}),
    ]
    for name, label, changes in rows:
        config = cnn.replace(**changes)
        yield Preset(name, label, config, None, config.method in REVERSE)


BEYOND: dict[str, Preset] = {preset.name: preset for preset in _beyond()}

# -- CIFAR-10 -----------------------------------------------------------------------------------------------------

_CIFAR_MODELS = (("cnn", "colour-cnn", 30), ("resnet", "resnet-20", 40))


def _cifar() -> Iterator[Preset]:
    for short, model, epochs in _CIFAR_MODELS:
        for augment in (False, True):
            shared: dict[str, Any] = {"model": model, "epochs": epochs, "augment": augment}
            shared |= {"dataset": "cifar-10", "hold_out": 5000, "batch_size": 256}
            end, more = ("-augmented", ", flips and crops") if augment else ("", "")
            ours = Config(method="horizon", **shared)
            yield Preset(f"cifar-{short}{end}", f"HorizonAdam{more}", ours, None, False)
            adam = Config(method="adam", lr=1e-3, average=8.0, **shared)
            yield Preset(f"adam-cifar-{short}{end}", f"Backpropagation, Adam{more}", adam, None, True)


CIFAR: dict[str, Preset] = {preset.name: preset for preset in _cifar()}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        *_rows("lr", "logistic-regression", 2000, _LOGISTIC_REGRESSION),
        *_rows("cnn", "cnn", 3000, _CNN),
        _QUICK,
        *BEYOND.values(),
        *CIFAR.values(),
    )
}
