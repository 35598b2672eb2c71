"""The mean over those processes of a group that were there in time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad.algebra.jet import Quadratic
from ..curvature import Curvature
from ..errors import LostProcess, ProcessesDiffer
from ..solvers import Step
from .averages import Together, heard, sent
from .digests import described
from .packed import Parcel
from .processes import Processes, named, require_same
from .quorum import Attendance

__all__ = ["Quorate"]

log = logging.getLogger("jetplane")


class Said(NamedTuple):
    """A text and numbers, as one message."""

    text: Any
    numbers: Tensor  # (n,) in float64

    def packed(self) -> bytes:
        return json.dumps(self.text).encode() + b"\n" + self.numbers.numpy().tobytes()

    @staticmethod
    def read(message: bytes) -> Said:
        text, _, numbers = message.partition(b"\n")
        found = torch.zeros(len(numbers) // 8, dtype=torch.float64, device="cpu")
        if numbers:
            found = torch.frombuffer(bytearray(numbers), dtype=torch.float64).clone()
        return Said(json.loads(text), found)


class Quorate(Together):
    """Closures of the processes that come in time."""

    def __init__(
        self,
        processes: Processes,
        attendance: Attendance,
        weights: Sequence[float],
        noise: bool,
        signs: dict[str, Any],
        what: str,
    ) -> None:
        super().__init__(processes, weights, noise, {name: described(one) for name, one in signs.items()}, what)
        self._attendance = attendance

    # -- a model ----------------------------------------------------------------------------------------------------

    @contextmanager
    def planes(self, curvature: Curvature, k: int) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._attendance.gone()
            raise

    @contextmanager
    def single(self, what: str) -> Iterator[None]:
        raise ValueError(
            f"process_group is a Quorum, and {self._what} asks for {what}, at which others may come in time; expected "
            "no acceptance, a solver without a state, and directions that need no gradient."
        )
        yield

    def known(self, k: int, curvature: Curvature, used: list[bool], device: torch.device) -> Quadratic | None:
        """The model that the others have made already, in which this process is left out."""
        message = self._attendance.decided(self._what)
        if message is None:
            return None
        found = Said.read(message)
        zeros = torch.zeros(k, dtype=torch.float64, device=device)
        loss, slope, curved = (getattr(torch, name) for name in found.text.get("dtypes", ["float64"] * 3))
        like = Quadratic(zeros.sum().to(loss), zeros.to(slope), zeros.new_zeros(k, k).to(curved))
        return self._model(found, self._form(curvature, k), like, used)

    def model(self, models: list[Quadratic], counts: list[int], curvature: Curvature, used: list[bool]) -> Quadratic:
        form, like = self._form(curvature, models[0].k), models[0]
        mine = Said({"signs": self._signs, "used": used}, form.merged(self._records(form, models, counts)))
        dtypes = [str(part.dtype).removeprefix("torch.") for part in (like.loss, like.slope, like.curvature)]

        def decide(messages: dict[int, bytes]) -> bytes:
            return self._decided({rank: Said.read(one) for rank, one in messages.items()}, form, dtypes).packed()

        return self._model(Said.read(self._attendance.said(mine.packed(), decide, self._what)), form, like, used)

    def _decided(self, parts: dict[int, Said], form: Parcel, dtypes: list[str]) -> Said:
        """What the first process makes of what was said."""
        absent = [rank for rank in range(self._processes.size) if rank not in parts]
        signs = [(parts[rank] if rank in parts else parts[0]).text["signs"] for rank in range(self._processes.size)]
        none = torch.zeros(0, dtype=torch.float64, device="cpu")
        try:
            require_same(signs, self._what)
        except ProcessesDiffer as error:
            return Said({"differ": str(error)}, none)
        records = [parts[rank].numbers for rank in sorted(parts)]
        everywhere = [part.text["used"] for part in parts.values()]
        blamed = [rank for rank in sorted(parts) if not bool(torch.isfinite(parts[rank].numbers).all())]
        text = {"absent": absent, "blamed": blamed, "dtypes": dtypes}
        return Said(text | {"used": [any(one) for one in zip(*everywhere, strict=True)]}, form.merged(records))

    def _model(self, found: Said, form: Parcel, like: Quadratic, used: list[bool]) -> Quadratic:
        if "differ" in found.text:
            raise ProcessesDiffer(found.text["differ"])
        used[:] = found.text["used"]
        self._note(found.text["absent"], found.text["blamed"])
        if found.numbers[1] == 0:
            raise ValueError(f"the weights of all processes are zero at {self._what}; expected one that is not.")
        return form.model(found.numbers, like)

    def _note(self, absent: list[int], blamed: list[int]) -> None:
        self.blamed = blamed
        self.absent = sorted({*self.absent, *absent})
        if blamed:
            log.warning("The numbers of %s are not finite at %s.", named(blamed), self._what)
        if absent:
            log.warning("%s took no part in %s: not there in time.", named(absent).capitalize(), self._what)
        if self._processes.rank in absent:
            self._attendance.back()

    # -- what the first process decides -----------------------------------------------------------------------------

    def steps(self, compute: Callable[[], list[Step]], models: list[Quadratic]) -> list[Step]:
        sizes = [model.k + 2 for model in models]
        numbers = self._led(lambda: torch.cat([sent(step) for step in compute()]))
        return [heard(part, model.slope) for part, model in zip(numbers.split(sizes), models, strict=True)]

    def agreed(self, compute: Callable[[], list[float]], length: int) -> list[float]:
        return self._led(lambda: torch.tensor(compute(), dtype=torch.float64, device="cpu")).tolist()

    def _led(self, compute: Callable[[], Tensor]) -> Tensor:
        """The numbers that the first process computes."""
        failed: list[Exception] = []

        def packed() -> bytes:
            try:
                return Said(True, compute()).packed()
            except Exception as error:
                failed.append(error)
                return Said(False, torch.zeros(0, dtype=torch.float64, device="cpu")).packed()

        found = Said.read(self._attendance.led(packed, self._what))
        if failed:
            raise failed[0]
        if not found.text:
            raise LostProcess(f"process 0 raised an error at {self._what}; what went wrong is in the message there.")
        return found.numbers
