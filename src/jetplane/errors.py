"""The exceptions of jetplane. Bad arguments raise plain ValueError or TypeError."""

from __future__ import annotations


class JetplaneError(Exception):
    """Base of every exception that jetplane defines."""


class MissingRule(JetplaneError, NotImplementedError):
    """An operation of the program has no derivative rule.

    ``op`` is the operation's name; the message says where the program called it and how to register a rule.
    """

    def __init__(self, message: str, op: str = "") -> None:
        super().__init__(message)
        self.op = op


class UnsupportedProgram(JetplaneError, RuntimeError):
    """The program does something through which tangents cannot be followed, so it is refused."""


class OptimizationStalled(JetplaneError, RuntimeError):
    """An optimizer could not move its parameters for so many steps in a row that going on is pointless."""


class CaptureFailed(JetplaneError):
    """A program could not be captured as a graph; it can still be run as it is."""


class BackwardPass(JetplaneError, RuntimeError):
    """Inside :class:`jetplane.forward_only` a backward pass was started, or an autograd graph built."""


class MissingBoundary(JetplaneError, ValueError):
    """A curvature that begins at the loss was asked for, and nothing says where in the program the loss begins."""


class CoupledSamples(JetplaneError, ValueError):
    """The loss of one sample depends on another sample, and that was not to be."""


class LostProcess(JetplaneError, RuntimeError):
    """Another process of the group failed, is gone, or did not answer in time."""


class ProcessesDiffer(JetplaneError, ValueError):
    """The processes of a group are not the same where they have to be: seeds, models, settings, or the parameters."""


class JournalDamaged(JetplaneError, RuntimeError):
    """A file of a journal is not what was written."""


class JournalRefused(JetplaneError, ValueError):
    """A journal cannot be written, or does not belong to this run."""


class ReplayDiffers(JetplaneError, RuntimeError):
    """The replayed steps of a journal lead to other parameters than training had."""
