"""The Trainer of transformers, on tiny models: the numbers of a plain loop, and resume as undisturbed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jetplane as jp

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from jetplane.integrations.transformers import ForwardTrainer  # noqa: E402

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
DATA = [{"input_ids": (torch.arange(5) * (n + 1)) % 20, "labels": torch.tensor(n % 3)} for n in range(24)]


def classifier() -> Any:
    """A BERT of one layer, without dropout."""
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, intermediate_size=16, **off))


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))


def plane(model: Any) -> torch.optim.Optimizer:
    return jp.optim.FoMoHKD(model.parameters(), lr=0.5, k=3, solver=jp.solvers.SaddleFree())


def horizon(model: Any) -> torch.optim.Optimizer:
    return jp.optim.HorizonAdam(model.parameters(), samples=2, clip=1.0)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


MAKERS = {"plane": plane, "horizon": horizon, "adamw": adamw}


def trainer_of(model: Any, optimizer: Any, folder: Path, callbacks: Any = None, **arguments: Any) -> ForwardTrainer:
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    settings |= {"save_strategy": "no", "logging_steps": 2, "disable_tqdm": True, "lr_scheduler_type": "linear"}
    data = [{"input_ids": one["input_ids"], "labels": one["input_ids"]} for one in DATA] if _lm(model) else DATA
    return ForwardTrainer(
        model,
        transformers.TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=data,
        eval_dataset=data[:8],
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


def _lm(model: Any) -> bool:
    return "LM" in type(model).__name__


def parameters(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", MAKERS)
def test_resume_goes_on_with_the_numbers_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    options["gradient_accumulation_steps"] = 2
    ends = []
    for again in (False, True):
        model = classifier()
        folder = tmp_path / "run"
        trainer = trainer_of(model, MAKERS[kind](model), folder, **options)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if again else None)
        assert trainer.state.global_step == 6
        ends.append((parameters(model), [one for one in trainer.state.log_history if "loss" in one][-1]))
    (through, log), (resumed, second) = ends
    assert torch.equal(through, resumed) and log["loss"] == second["loss"]
    assert ("jetplane_moved" in log) == (kind != "adamw") and ("grad_norm" in log) == (kind != "plane")


def test_planes_take_the_steps_of_a_plain_loop_with_the_whole_batch(tmp_path: Path) -> None:
    model = classifier()
    alone = copy.deepcopy(model)
    lrs: list[float] = []

    class Batches(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            lrs.append(optimizer.param_groups[0]["lr"])

    trainer = trainer_of(model, plane(model), tmp_path, [Batches()], gradient_accumulation_steps=3, max_steps=2)
    batches = [{name: value for name, value in batch.items()} for batch in trainer.get_train_dataloader()]
    trainer.train()
    optimizer = plane(alone)
    parts = [batches[:3], batches[3:]]
    for step, three in enumerate(parts):
        optimizer.step([lambda batch=batch: alone(**batch).loss for batch in three])
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - (step + 1) / 2)
    assert lrs == [0.25, 0.0]
    torch.testing.assert_close(parameters(model), parameters(alone))


def test_parts_with_other_numbers_of_tokens_count_as_the_batch(tmp_path: Path) -> None:
    reports = []
    for size in (8, 4):
        model = language_model()
        optimizer = plane(model)
        many = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 1}
        trainer = trainer_of(model, optimizer, tmp_path, seed=1, **many)
        for number, one in enumerate(trainer.train_dataset):
            one["labels"] = one["labels"].where(torch.arange(5) >= number % 4, -100)
        trainer.train()
        reports.append(optimizer.report)
    whole, parts = reports
    for name in ("loss", "slope", "curvature"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-5)


def test_gradients_of_parts_add_up_to_that_of_the_batch_and_are_clipped(tmp_path: Path) -> None:
    model = classifier()
    head, seen = model.classifier.weight, []  # behind it is only the loss, so its forward gradient is exact
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append((head.grad.clone(), flat(model).norm())))
    many = {"gradient_accumulation_steps": 3, "max_steps": 1, "max_grad_norm": 1e-3}
    trainer = trainer_of(model, optimizer, tmp_path, **many)
    batches = list(trainer.get_train_dataloader())[:3]
    trainer.train()
    ((found, norm),) = seen
    exact = sum(torch.autograd.grad(model(**batch).loss, head)[0] for batch in batches) / 3
    torch.testing.assert_close(found / found.norm(), exact / exact.norm())
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def flat(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_horizon_adam_is_evaluated_with_its_average_and_left_so(tmp_path: Path) -> None:
    model = classifier()
    trainer = trainer_of(model, horizon(model), tmp_path, eval_strategy="steps", eval_steps=3)
    trainer.train()
    own = trainer.optimizer.optimizer
    loss = trainer.evaluate()["eval_loss"]
    left = parameters(model)
    own.train()
    assert not torch.equal(parameters(model), left)
    with own.averaged(), torch.no_grad():
        assert torch.equal(parameters(model), left)
        batch = trainer.data_collator(DATA[:8])
        assert float(model(**batch).loss) == pytest.approx(loss, rel=1e-5)


def test_bf16_autocast_reaches_the_loss(tmp_path: Path) -> None:
    model = language_model()
    seen = []
    model.transformer.h[0].mlp.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    trainer = trainer_of(model, plane(model), tmp_path, bf16=True, max_steps=2)
    before = parameters(model)
    trainer.train()
    assert set(seen) == {torch.bfloat16} and not torch.equal(before, parameters(model))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = classifier()
    compiled = jp.optim.HorizonAdam(model.parameters(), compile=True)
    with pytest.raises(ValueError, match=r"compile is True for HorizonAdam, .* expected compile=False"):
        trainer_of(model, compiled, tmp_path).train()
    with pytest.raises(ValueError, match="there is an estimate, and FoMoHKD makes its own steps"):
        trainer = trainer_of(model, plane(model), tmp_path)
        trainer._estimate = jp.ForwardGradient(model.parameters())
        trainer.train()
    with pytest.raises(ValueError, match="fp16 is True; expected bf16"):
        trainer_of(model, plane(model), tmp_path, fp16=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.TrainingArguments, "n_gpu", 2)
        with pytest.raises(ValueError, match="there are 2 GPUs in one process; expected one for each process"):
            trainer_of(model, plane(model), tmp_path)


@pytest.mark.parametrize("steps", [6, 8])
def test_the_best_model_is_the_one_that_was_evaluated(steps: int, tmp_path: Path) -> None:
    model = classifier()
    when = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": steps}
    trainer = trainer_of(model, horizon(model), tmp_path, **when, **best)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)


def test_resume_without_an_evaluation_before_it_and_with_dropout(tmp_path: Path) -> None:
    ends = []
    for again in (None, str(tmp_path / "checkpoint-2")):
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, intermediate_size=16, num_labels=3)
        model = transformers.BertForSequenceClassification(config)
        trainer = trainer_of(model, horizon(model), tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
        trainer.train(resume_from_checkpoint=again)
        ends.append(parameters(model))
    assert torch.equal(*ends)
