"""Fine-tuning a language model with forward passes alone: the body stays, the head and the norms move.

``--model folder`` takes weights of transformers from your disk. Without it, a small GPT-2 is first trained by backprop
on one text and then fine-tuned on another, so that nothing has to be fetched.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import jetplane as jp

OLD = "the cat sat on the mat and the dog sat on the rug. " * 30
NEW = "the rug sat on the dog and the mat sat on the cat. " * 30


def windows(text: str, count: int, generator: torch.Generator) -> Tensor:
    """Pieces of a text as bytes (count, 24)."""
    data = torch.tensor(list(text.encode()))
    starts = torch.randint(len(data) - 24, (count,), generator=generator)
    return torch.stack([data[start : start + 24] for start in starts])


def pretrained(steps: int, generator: torch.Generator) -> PreTrainedModel:
    """A GPT-2 of one layer that knows the old text."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 128, "n_positions": 32}
    config = GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        tokens = windows(OLD, 16, generator)
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


def main(argv: list[str] | None = None) -> None:
    """Fine-tune, and compare the losses on the new text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with weights; none: a small model")
    parser.add_argument("--pretraining", type=int, default=60, help="steps of the small model")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    if arguments.model:
        model = GPT2LMHeadModel.from_pretrained(arguments.model, local_files_only=True)
    else:
        model = pretrained(arguments.pretraining, generator)
    model.eval()  # no dropout
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name or "lm_head" in name)

    def losses(tokens: Tensor) -> Tensor:  # (B, T - 1): one for each token, whose mean is the model's loss
        logits = model(tokens).logits
        return functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none") / 23

    held_out = windows(NEW, 64, torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = float(losses(held_out).sum(1).mean())
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = jp.optim.HorizonAdam(moving)
    with jp.forward_only():
        for _ in range(arguments.steps):
            optimizer.step(losses, windows(NEW, 16, generator))
    with optimizer.averaged(), torch.no_grad():
        after = float(losses(held_out).sum(1).mean())
    share = sum(p.numel() for p in moving) / sum(p.numel() for p in model.parameters())
    print(f"{share:.0%} of the parameters move, by forward passes alone")
    print(f"loss on the new text, in nats a token: {before:.3f} before, {after:.3f} after {arguments.steps} steps")
    assert after < 0.9 * before


if __name__ == "__main__":
    main()
