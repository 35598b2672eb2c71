"""The command line: ``jetplane COMMAND``, one module for each command, found by entry points."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

import jetplane

from .entries import Registered, registered, sentence
from .help_text import Wrapped

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def parser(found: Registered) -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = _Parser(
        prog="jetplane",
        description="Second-order forward-mode AD for PyTorch.",
        epilog=_missing(found),
        formatter_class=Wrapped,
    )
    top.add_argument(
        "-V", "--version", action="version", version=f"jetplane {jetplane.__version__} (torch {torch.__version__})"
    )
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in found.commands.values():
        sub = command.add_parser(commands)
        if sub is None:
            raise TypeError(f"{command.__name__}.add_parser returned None; expected the parser that it added.")
        # SUPPRESS: without it the sub-command's default would undo a --debug that stands before the command
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run=command.run)
        sub.formatter_class = Wrapped
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for a failure, 2 for bad arguments."""
    found = registered()
    given = sys.argv[1:] if argv is None else list(argv)
    asked = next(itertools.dropwhile(lambda argument: argument == "--debug", given), "")
    if asked in found.missing:
        print(f"jetplane: {sentence(asked, found.missing[asked])}", file=sys.stderr)
        return 2
    if not [argument for argument in given if argument != "--debug"]:
        parser(found).print_help()
        return 0
    arguments = parser(found).parse_args(given)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("\njetplane: interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"{_red('jetplane:')} {message.rstrip('.')} (--debug shows the traceback).", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _red(text: str) -> str:
    """Red where the standard error is a terminal, unless NO_COLOR is set."""
    return f"\033[31m{text}\033[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text


def _missing(found: Registered) -> str | None:
    """What the help says of commands that are not there: those with one reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in found.missing.items():
        names.setdefault(reason, []).append(name)
    return "\n".join(f"missing: {', '.join(group)}\n  ({reason})" for reason, group in names.items()) or None
