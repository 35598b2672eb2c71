"""One default device for all commands."""

from __future__ import annotations

import pytest
import torch

from jetplane import cli
from jetplane.cli import entries
from jetplane_lab.devices import device

WITH_DEVICE = ("bench", "coverage", "demo", "reproduce", "train", "tune")
NEEDED = {"reproduce": ["all"], "train": ["quick"], "tune": ["quick"]}


@pytest.mark.parametrize("command", WITH_DEVICE)
@pytest.mark.parametrize("cuda", [False, True])
def test_auto_is_the_default_of_every_command(command: str, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    parser = cli.parser(entries.registered())
    chosen = parser.parse_args([command, *NEEDED.get(command, [])]).device
    assert chosen == ("cuda" if cuda else "cpu") or (command, chosen) == ("tune", None)  # tune: that of its study first
    assert parser.parse_args([command, *NEEDED.get(command, []), "--device", "auto"]).device == device("auto")
    assert parser.parse_args([command, *NEEDED.get(command, []), "--device", "cpu"]).device == "cpu"


def test_names() -> None:
    assert device("cuda:1") == "cuda:1" and device(None) == device("auto")
