"""The Trainer of transformers with its optimizer swapped: ``ForwardTrainer`` and HorizonAdam in place of AdamW.

A small BERT learns to tell sentences with good words from sentences with bad ones. Its weights are random at first, and
no file is fetched.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import jetplane as jp
from jetplane.integrations.transformers import ForwardTrainer


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Nine words each: three good (10 to 14) or bad (15 to 19) ones, and six others; and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    telling = torch.randint(10, 15, (count, 3), generator=generator) + 5 * labels[:, None]
    others = torch.randint(2, 10, (count, 6), generator=generator)
    first = torch.ones(count, 1, dtype=torch.long)
    words = torch.cat([first, others[:, :3], telling, others[:, 3:]], 1)
    return [{"input_ids": ids, "labels": label} for ids, label in zip(words, labels, strict=True)]


def main(argv: list[str] | None = None) -> None:
    """Train, evaluate with the averaged parameters, and look at the log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, initializer_range=0.3, hidden_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=64, logging_steps=20, report_to="none", use_cpu=True
        )
        trainer = ForwardTrainer(
            model,
            arguments,
            train_dataset=sentences(2000, 0),
            eval_dataset=sentences(300, 1),
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
            optimizer_cls_and_kwargs=(jp.optim.HorizonAdam, {}),  # the swap
        )
        trainer.train()
        found = trainer.evaluate()
    for one in trainer.state.log_history:
        if "loss" in one:
            print(f"step {one['step']:3}: loss {one['loss']:.3f}, rate {one['jetplane_rate']:.4f}")
    print(f"{found['eval_accuracy']:.1%} of new sentences, without a backward pass")
    assert found["eval_accuracy"] > 0.8


if __name__ == "__main__":
    main()
