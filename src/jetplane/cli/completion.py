"""``jetplane completion SHELL``: a script by which bash, zsh or fish completes commands and options."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["SHELLS", "add_parser", "run", "script"]

SHELLS = ("bash", "zsh", "fish")
_BASH = """_jetplane() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) ;; *) command="$word"; break ;; esac
    done
    case "$command" in
{cases}
        *) words="{top}" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _jetplane jetplane
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands",
        description="Print a script by which a shell completes commands and options.",
        epilog="to have it in every shell:\n"
        "  echo 'source <(jetplane completion bash)' >> ~/.bashrc\n"
        "  echo 'source <(jetplane completion zsh)' >> ~/.zshrc\n"
        "  jetplane completion fish > ~/.config/fish/completions/jetplane.fish",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from . import parser
    from .entries import registered

    print(script(parser(registered()), arguments.shell), end="")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell for a parser with sub-commands."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if shell == "fish":
        return _fish(parser, commands)
    cases = [f'        {name}) words="{" ".join(_words(one))}" ;;' for name, one in commands.choices.items()]
    text = _BASH.format(cases="\n".join(cases), top=" ".join([*commands.choices, *_words(parser)]))
    if shell == "zsh":  # which understands what bash does
        return "autoload -Uz compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + text
    return text


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Options, and what may stand in the place of an argument."""
    options = [name for action in _shown(parser) for name in action.option_strings]
    choices = [str(one) for action in _shown(parser) for one in action.choices or () if not action.option_strings]
    return [*choices, *options]


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    return [action for action in actions if action.help is not argparse.SUPPRESS]


def _fish(parser: argparse.ArgumentParser, commands: Any) -> str:
    lines = []
    for action in commands._choices_actions:
        lines.append(f"complete -c jetplane -n __fish_use_subcommand -a {action.dest} -d {_quoted(action.help)}")
    for name, one in {"": parser, **commands.choices}.items():
        where = f"'__fish_seen_subcommand_from {name}'" if name else "__fish_use_subcommand"
        for action in _shown(one):
            flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in action.option_strings]
            words = f" -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
            if flags or words:
                told = " -r" if flags and action.nargs != 0 else ""
                text = _quoted((action.help or "").replace("%(default)s", str(action.default)))
                lines.append(f"complete -c jetplane -n {where} {' '.join(flags)}{told}{words} -d {text}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
