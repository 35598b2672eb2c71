"""The paper's rows, the models, and the config of a run."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from jetplane_lab import models, presets
from jetplane_lab.training import Config

# -- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("logistic-regression", 7_850), ("cnn", 431_080)])
def test_models_have_the_papers_size_and_give_ten_logits(name: str, count: int) -> None:
    model = models.build(name, 0)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("name", models.MODELS)
def test_initial_values_are_torchs_for_that_seed_and_leave_the_generator_alone(name: str) -> None:
    torch.manual_seed(4)
    expected = models.MODELS[name]()
    state = torch.get_rng_state()
    model = models.build(name, 4)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(next(model.parameters()), next(models.build(name, 5).parameters()))


# -- presets ------------------------------------------------------------------------------------------------------


def test_there_are_nine_rows_for_each_model_quick_and_those_beyond_the_paper() -> None:
    names = ["fgd", "fomoh", "fomoh-sch", "fomoh-2d", "fomoh-2d-sch", "fomoh-3d", "fomoh-3d-sch", "fomoh-bp"]
    rows = [f"{model}-{name}" for model in ("lr", "cnn") for name in (*names, "backprop")]
    assert list(presets.PRESETS) == [*rows, "quick", *presets.BEYOND, *presets.CIFAR]
    assert all(preset.name == name for name, preset in presets.PRESETS.items())


@pytest.mark.parametrize("name", [name for name, preset in presets.PRESETS.items() if preset.paper is not None])
def test_rows_follow_the_papers_protocol(name: str) -> None:
    preset = presets.find(name)
    config, paper = preset.config, preset.paper
    regression = name.startswith("lr-")
    assert (config.model, config.epochs) == (("logistic-regression", 2000) if regression else ("cnn", 3000))
    assert preset.seeds == ((0, 1, 2, 3, 4) if regression else (0, 1, 3))
    assert (config.dataset, config.hold_out, config.solver, config.eps) == ("mnist", 0, None, None)
    assert preset.reverse_mode == name.endswith(("-bp", "-backprop"))
    assert (config.schedule != "none") == name.endswith("-sch") == ("(LR-Sch.)" in preset.label)
    assert paper is not None
    assert paper.lr_bounds[0] <= config.lr <= paper.lr_bounds[1]
    assert 0.0 < paper.train_nll[0] < 0.4 and 0.0 < paper.validation_nll[0] < 0.4
    assert 0.89 < paper.validation_accuracy[0] < 0.995 and 0.89 < paper.train_accuracy[0] < 1.0


def test_numbers_of_some_rows_as_printed() -> None:
    row = presets.find("lr-fomoh-3d-sch")
    assert (row.config.lr, row.config.batch_size, row.config.k) == (0.1, 512, 3)
    assert (row.config.schedule, row.config.gamma) == ("rise", 0.8)
    row = presets.find("cnn-fomoh-sch")
    assert (row.config.lr, row.config.batch_size) == (0.542, 2048)
    assert (row.config.schedule, row.config.gamma, row.config.period) == ("step", 0.1, 1000)
    assert presets.find("cnn-fomoh-3d").config.batch_size == 512
    assert presets.find("cnn-fomoh-3d-sch").config.batch_size == 2048
    assert presets.find("lr-fgd").config.lr == 0.00006497
    paper = presets.find("cnn-fomoh-2d").paper
    assert paper == presets.Paper(
        (0.1015, 0.0041), (0.9691, 0.0011), (0.1016, 0.0066), (0.9693, 0.0020), lr_bounds=(0.001, 1.0)
    )


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"preset is 'lr-fomoh-2'; did you mean lr-fomoh-2d\? expected one of lr-fgd, "
    ):
        presets.find("lr-fomoh-2")


# -- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.PRESETS)
def test_configs_survive_json(name: str) -> None:
    config = presets.find(name).config
    assert Config.from_json(config.to_json()) == config
    assert Config.from_dict(config.to_dict()).digest() == config.digest()


def test_every_field_is_part_of_the_identity() -> None:
    config = Config(method="sgd")
    others = {
        "model": "logistic-regression",
        "method": "adam",
        "schedule": "step",
        "dtype": "float64",
        "device": "cuda",
    }
    others |= {"dataset": "digits", "tf32": True, "momentum": 0.5, "weight_decay": 0.1, "divergence": None}
    own_method = {"k": "fgd", "compile": "fgd", "eps": "adam", "clip": "fgd", "solver": "fomoh", "start": "fomoh"}
    own_method["samples"] = "horizon"
    others |= {"samples": 6, "augment": True}
    for field in dataclasses.fields(Config):
        base = config.replace(method=own_method[field.name]) if field.name in own_method else config
        value: Any = others.get(field.name)
        if field.name == "solver":
            value = "damped"
        elif field.name == "augment":
            base = base.replace(dataset="tiny")
        elif field.name == "start":
            base, value = base.replace(solver="damped"), 0.5
        elif field.name == "compile":
            value = True
        elif value is None and field.name != "divergence":
            before = getattr(base, field.name)
            value = 0.5 if before is None else before * 2 + 1
        other = base.replace(**{field.name: value})
        assert base.difference(other) == field.name
        assert base.digest() != other.digest()
    assert config.difference(config.replace()) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "cn"}, "model is 'cn'; did you mean cnn? expected one of logistic-regression, cnn, colour-cnn,"),
        ({"model": "?"}, "model is '?'; expected one of logistic-regression, cnn, colour-cnn, resnet-20."),
        ({"method": "fomho"}, "method is 'fomho'; did you mean fomoh? expected one of fgd, fomoh,"),
        ({"schedule": "cosin"}, "schedule is 'cosin'; did you mean cosine?"),
        ({"dtype": "float16"}, "dtype is 'float16'; did you mean float"),
        ({"solver": "dampd"}, "solver is 'dampd'; did you mean damped?"),
        ({"k": 0}, "k is 0; expected a whole number from 1."),
        ({"k": 2.0}, "k is 2.0; expected a whole number."),
        ({"k": True}, "k is True; expected a whole number."),
        ({"seed": -1}, "seed is -1; expected a whole number from 0 to 9223372036854775807."),
        ({"lr": 0.0}, "lr is 0.0; expected a positive, finite number."),
        ({"lr": float("nan")}, "lr is nan; expected a positive, finite number."),
        ({"lr": "0.1"}, "lr is '0.1'; expected a number."),
        ({"tf32": 1}, "tf32 is 1; expected true or false."),
        ({"dataset": 3}, "dataset is 3; expected a text."),
        ({"momentum": 1.0, "method": "sgd"}, "momentum is 1.0; expected a number from 0, below 1."),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; expected a finite number from 0."),
        ({"divergence": 1.0}, "divergence is 1.0; expected a finite number above 1."),
        ({"device": "gpu"}, "device is 'gpu'; expected one such as cpu, cuda or cuda:1."),
        (
            {"method": "fomoh", "k": 3},
            "k is 3, but method fomoh takes none; fgd, fomoh-kd, gauss-newton, mezo, fzoo take it.",
        ),
        ({"method": "backprop", "momentum": 0.9}, "momentum is 0.9, but method backprop takes none; sgd, forward-sgd"),
        ({"eps": 0.1, "method": "fomoh", "solver": "damped"}, "eps is 0.1 and solver damped; eps belongs to"),
        ({"start": 0.1}, "start is 0.1 and solver None; damped, trust-region, cubic, levenberg-marquardt have one."),
        ({"batchsize": 3}, "the field is 'batchsize'; did you mean batch_size?"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config().replace(**changes)
    assert str(caught.value).startswith(message)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a config is list; expected a JSON object\."):
        Config.from_json(json.dumps([1]))
