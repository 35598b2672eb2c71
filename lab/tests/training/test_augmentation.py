"""Flips and crops, and batch norms that are judged with averaged parameters."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from jetplane_lab import models, presets
from jetplane_lab.config import Config
from jetplane_lab.data import Dataset, Split
from jetplane_lab.training import Trainer
from jetplane_lab.training.augmentation import flipped_and_cropped
from jetplane_lab.training.batches import padded, weights
from jetplane_lab.training.statistics_of_norms import taken_anew

IMAGES = torch.randn(300, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BLACK = torch.tensor([-1.0, -2.0, -3.0]).view(3, 1, 1)


def augmented(images: Tensor = IMAGES, seed: int = 5, epoch: int = 2) -> Tensor:
    out = torch.full_like(images, torch.nan)
    flipped_and_cropped(images, BLACK, seed, epoch, out)
    return out


def test_each_image_is_one_of_its_162_crops_and_all_of_them_come() -> None:
    found, seen = augmented(), set()
    for image, one in zip(IMAGES, found, strict=True):
        crops = {}
        for mirrored in (False, True):
            whole = BLACK.expand(3, 16, 16).clone()
            whole[:, 4:12, 4:12] = image
            for down in range(9):
                for right in range(9):
                    crop = whole[:, down : down + 8, right : right + 8]
                    crops[mirrored, down, right] = crop.flip(2) if mirrored else crop
        places = [place for place, crop in crops.items() if torch.equal(crop, one)]
        assert len(places) == 1
        seen.add(places[0])
    for axis, count in enumerate((2, 9, 9)):
        assert len({place[axis] for place in seen}) == count
    mirrored = sum(not torch.equal(a, b) for a, b in zip(augmented(epoch=2), augmented(epoch=3), strict=True))
    assert mirrored > 290


def test_it_is_a_function_of_seed_epoch_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    found = augmented()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(found, augmented(seed=6)) and not torch.equal(found, augmented(epoch=3))
    monkeypatch.setattr("jetplane_lab.training.augmentation._CHUNK", 7)
    assert torch.equal(found, augmented())


def coloured(count: int = 40) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Dataset("tiny", Split(images, torch.arange(count) % 10), Split(images[:12], torch.arange(12) % 10), "", {})


class Small(nn.Module):
    """A batch norm and a layer, for what takes long with 20 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(8), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "resnet-20", Small)


def config(**changes: Any) -> Config:
    shared = {"model": "resnet-20", "dataset": "tiny", "epochs": 4, "batch_size": 16, "augment": True, "seed": 2}
    return Config(**shared | changes)


@pytest.mark.parametrize("options", [{"method": "adam", "lr": 1e-2}, {"method": "horizon", "samples": 2}])
def test_a_run_with_flips_and_crops_is_resumed_bit_by_bit(options: dict[str, Any], small: None, tmp_path: Path) -> None:
    whole = Trainer(config(**options), coloured())
    whole.fit()
    part = Trainer(config(**options), coloured(), tmp_path, checkpoint_seconds=0.0)
    tiny.advance(part, 2)
    rest = Trainer(config(**options), coloured(), tmp_path, checkpoint_seconds=0.0)
    assert rest.epoch == 2
    rest.fit()
    tiny.assert_same(whole, rest)
    plain = Trainer(config(**options, augment=False), coloured())
    plain.fit()
    assert plain.history[0].train_nll != whole.history[0].train_nll


@pytest.mark.parametrize(
    "options",
    [{"method": "adam", "lr": 1e-12}, pytest.param({"method": "horizon", "samples": 2}, marks=pytest.mark.slow)],
)
def test_a_compiled_run_reads_the_images_of_its_epoch(options: dict[str, Any], small: None) -> None:
    """They lie where those of the epoch before lay. With Adam's rate nothing changes but the images."""
    runs = [Trainer(config(**options, batch_size=20, compile=flag), coloured()) for flag in (False, True)]
    for run in runs:
        run.fit()
    first, second = ([one.train_nll for one in run.history] for run in runs)
    assert min(abs(a - b) for a, b in pairwise(first)) > 1e-3
    assert first == pytest.approx(second, rel=1e-4)


def test_the_samples_that_fill_up_a_batch_are_real_ones(small: None) -> None:
    assert padded(torch.tensor([3, 1, 4, 0, 2]), 3).tolist() == [[3, 1, 4], [0, 2, -4]]
    run = Trainer(config(method="adam", lr=1e-12, batch_size=16, compile=True), coloured())
    index = torch.tensor([3, 1, 4, 0, 2, -4])
    loss, hits = run._padded_loss(index, weights(index))
    logits = run.model(run.images[torch.tensor([3, 1, 4, 0, 2, 3])])[:5]
    labels = run.data.train.labels[index[:5]]
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, labels))
    assert int(hits) == int((logits.argmax(1) == labels).sum())


def test_statistics_are_those_of_the_parameters_that_are_judged() -> None:
    torch.manual_seed(0)
    model, images = Small(), torch.randn(64, 3, 32, 32)
    model.train()
    for _ in range(3):
        model(2 * images + 1)
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    with taken_anew(model, images.split(64)):
        pooled = nn.functional.avg_pool2d(images, 8)
        torch.testing.assert_close(model.layers[1].running_mean, pooled.mean((0, 2, 3)))
        torch.testing.assert_close(model.layers[1].running_var, pooled.transpose(0, 1).flatten(1).var(1))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.state_dict().items())
    assert model.training


def test_a_batch_norm_is_judged_as_it_is_used(small: None) -> None:
    run = Trainer(config(method="horizon", samples=2, epochs=1), coloured())
    run.fit()
    inside: list[bool] = []
    handle = run.model.register_forward_hook(lambda module, *_: inside.append(module.training))
    batches = len(coloured().test.labels)
    with run.judged():
        trained = list(inside)
    assert trained == [True]  # the pass that takes the statistics
    handle.remove()
    assert run.model.training and run.history[0].validation_nll > 0 and batches == 12


def test_a_model_for_other_images_is_named() -> None:
    with pytest.raises(ValueError) as caught:
        Trainer(config(model="cnn"), coloured())
    assert str(caught.value) == (
        "model cnn takes images (1, 28, 28), but those of tiny are (3, 32, 32); expected a model for them: "
        "colour-cnn, resnet-20."
    )
    with pytest.raises(ValueError, match=r"^augment is True, but a mirrored image of mnist is another; expected cifar"):
        Config(augment=True)


def test_presets_on_cifar() -> None:
    assert [name for name in presets.CIFAR if not name.startswith("adam-")] == [
        *("cifar-cnn", "cifar-cnn-augmented", "cifar-resnet", "cifar-resnet-augmented")
    ]
    for name, preset in presets.CIFAR.items():
        config, method = preset.config, "adam" if name.startswith("adam-") else "horizon"
        assert (config.dataset, config.hold_out, config.batch_size) == ("cifar-10", 5000, 256)
        assert (config.method, config.augment, config.samples) == (method, name.endswith("-augmented"), None)
        assert config.epochs == (30 if "cnn" in name else 40) and preset.seeds == (0, 1, 2, 3, 4)
        assert preset.reverse_mode == (method == "adam")
