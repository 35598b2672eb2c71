"""What an optimizer keeps of the group that it is in: who is there, whether they are still the same, what was said."""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.run.parts import is_shared_out
from ..errors import ProcessesDiffer
from .averages import Averages, Together, Weighted
from .columns import Columns
from .digests import described, digest_of
from .mesh import mesh_of
from .processes import Processes, named, processes_of, require_same, say_alone
from .quorate import Quorate
from .quorum import Attendance, Quorum
from .shards import Meeting, Talk

__all__ = ["Crew"]

log = logging.getLogger("jetplane")


class Crew:
    """The processes that step together with this one; nobody else where no group was given.

    They are compared before the first step (:meth:`begin`), and their parameters after every ``check_every`` steps
    (:meth:`check`; None: never).
    """

    def __init__(self, process_group: Any, check_every: int | None, name: str, *, planes: bool = False) -> None:
        if check_every is not None and (
            not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 1
        ):
            raise ValueError(f"check_every is {check_every!r}; expected a positive whole number of steps, or None.")
        quorum = process_group if isinstance(process_group, Quorum) else None
        if quorum is not None and not planes:
            raise ValueError(
                f"process_group of {name} is a Quorum, and a step in a plane alone can leave a process out; expected a "
                "ProcessGroup."
            )
        mesh = mesh_of(process_group)
        given = process_group if quorum is None else quorum.group
        self.processes: Processes | None = processes_of(given) if mesh is None else mesh.everyone
        self.given = process_group
        if quorum is not None:
            _check_quorum(quorum, self.processes)
        self._mesh, self._quorum = mesh, quorum
        self._attendance: Attendance | None = None
        self._digest: dict[str, str] = {}  # of the parameters, which goes along with the next step's numbers
        self._every, self._name = check_every, name
        self._begun = False
        self._counted = False  # it was said what a batch counts
        self._same = 0  # the last step after which the parameters were the same

    def __deepcopy__(self, memo: Any) -> Crew:
        """In the same group; what a quorum exchanges is begun anew."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _digest={}, _attendance=None)
        other._begun = self._begun and self._quorum is None
        return other

    @property
    def quiet(self) -> bool:
        """Whether this process is alone, and there is nothing left to say about it."""
        return self._begun and self.processes is None

    @property
    def shares_directions(self) -> bool:
        """Whether the processes of one part of the batch have directions of their own each."""
        return self._mesh is not None

    def check_shared_out(self, tensors: Sequence[Tensor], labels: Sequence[str], name: str) -> None:
        """Raise unless these processes, all of them, are those that share out parameters of a forward gradient."""
        for tensor, label in zip(tensors, labels, strict=True):
            if not is_shared_out(tensor):
                continue
            what = f"{label} is a sharded parameter, as FSDP's fully_shard makes them"
            if self.processes is None:
                raise ValueError(
                    f"{what}, and {name} has no process_group: each process would have a gradient of its own. Expected "
                    "process_group= of all processes that share it out."
                )
            if self._mesh is not None:
                raise ValueError(
                    f"{what}, and process_group is a DeviceMesh whose processes share tangents; expected a "
                    "ProcessGroup."
                )
            there = {int(rank) for rank in tensor.device_mesh.mesh.flatten()}  # type: ignore[attr-defined]
            here = set(self.processes.known(range(self.processes.size)))
            if not there <= here:
                raise ValueError(
                    f"{what}, among the processes {sorted(there)}, and process_group has {sorted(here)}; expected a "
                    "group of all that share it out."
                )

    def trust(self) -> None:
        """Compare nothing before the first step: who uses this one does."""
        self._begun = True

    def again(self) -> None:
        """Compare the processes anew before the next step, for something was loaded or added."""
        self._begun = False

    # -- the same everywhere ----------------------------------------------------------------------------------------

    def begin(self, facts: Callable[[], dict[str, Any]], step: int, leaves: Sequence[Tensor], labels: Any) -> None:
        """Before the first step: raise where a process is not as the first one; or say that there are several."""
        if self._begun:
            return
        if self.processes is None:
            say_alone(self._name)
        else:
            what = f"the first step of {self._name}"
            with self.processes.telling(1, what):
                said = json.dumps(_facts(facts() | self._exchanges(), step, leaves, labels))
            parts = [json.loads(text) for text in self.processes.texts(said, what)]
            require_same(parts, what)
            if self._quorum is not None:
                name = self.processes.texts(secrets.token_hex(8), what)[0]
                self._attendance, self._digest = Attendance(self._quorum, self.processes, name), {}
        self._begun, self._same = True, step

    def _exchanges(self) -> dict[str, Any]:
        """What says when processes exchange something: who differs would wait for what never comes."""
        kind = "ProcessGroup" if self._quorum is None else "Quorum"
        if self._mesh is not None:
            kind = f"DeviceMesh ({self._mesh.data.size} x {self._mesh.directions.size})"
        return {"check_every": self._every, "process_group": kind}

    def check(self, step: int, leaves: Sequence[Tensor]) -> None:
        """After this many steps: raise where a process has other parameters than most."""
        if self.processes is None or self._every is None or step % self._every:
            return
        if self._quorum is not None:
            self._digest = {f"the hash of the parameters after {step} steps": digest_of(leaves)}
            return
        what = f"the look at the parameters after step {step}"
        digest = float(int(digest_of(leaves), 16))
        mine = torch.tensor([digest], dtype=torch.float64, device="cpu")
        found = [float(record) for record in self.processes.gather(mine, what)]
        if len(set(found)) > 1:
            most = max(found, key=found.count)
            others = [rank for rank, one in enumerate(found) if one != most]
            when = f"step {step}" if step - self._same <= 1 else f"one of the steps {self._same + 1} to {step}"
            raise ProcessesDiffer(
                f"the parameters of {named(others)} differ from those of process {found.index(most)} since {when}; "
                "expected the same on all processes. check_every=1 looks after every step."
            )
        self._same = step

    def meeting(self, what: str, offset: int | None, total: int | None) -> Meeting:
        """A call of a forward gradient on samples from ``offset`` on, of ``total``."""
        if self.processes is None:
            return Meeting(offset, total)
        if self._mesh is not None:
            return Talk(self._mesh.data, what, offset, total, self._mesh.directions)
        return Talk(self.processes, what, offset, total)

    # -- the parts of a batch ---------------------------------------------------------------------------------------

    def averages(
        self, weight: Any, count: int, batch: Sequence[Any], noise: bool, signs: dict[str, Any], what: str
    ) -> Averages:
        """The mean over the closures of a step, ``count`` of them here, with what the user gave as ``weight``."""
        if weight is None and self.processes is None:
            return Averages()
        weights = self._counts(batch, count) if weight is None else _checked(weight, count)
        if self.processes is None:
            if not any(weights):
                raise ValueError(f"weight is {weight!r}; expected one that is not zero.")
            if count == 1:  # one closure is all there is
                return Averages()
            return Weighted(weights, noise)
        if self._attendance is not None:
            noted, self._digest = self._digest, {}
            return Quorate(self.processes, self._attendance, weights, noise, signs | noted, what)
        if self._mesh is None:
            return Together(self.processes, weights, noise, signs, what)
        columns = Columns(self._mesh.directions)
        return Together(self._mesh.data, weights, noise, signs, what, self._mesh.everyone, columns)

    def _counts(self, batch: Sequence[Any], count: int) -> list[float]:
        """The number of samples, by the batch."""
        tensors = [leaf for leaf in _torch.pytree.tree_leaves(list(batch)) if isinstance(leaf, Tensor) and leaf.ndim]
        if count != 1 or not tensors:
            assert self.processes is not None
            raise ValueError(
                f"step got {'closures' if count != 1 else 'a closure'} without a batch and no weight; expected "
                f"weight=, the number of samples (or tokens) that the closure's mean is over, for the means of "
                f"{self.processes.size} processes are averaged by it."
            )
        size = tensors[0].shape[0]
        if not self._counted:
            self._counted = True
            log.info(
                "A batch counts by the first axis of its first tensor, here %d; step(..., weight=) says it otherwise.",
                size,
            )
        return [float(size)]


def _facts(given: dict[str, Any], step: int, leaves: Sequence[Tensor], labels: Sequence[str]) -> dict[str, str]:
    """What has to be the same on all processes, by what it is called."""
    version = sys.modules[__name__.partition(".")[0]].__version__
    facts = {"the version of jetplane": version, "the version of torch": torch.__version__}
    facts |= {name: described(value) for name, value in given.items()}
    facts |= {"the number of steps taken": str(step), "the number of parameters": str(len(leaves))}
    for leaf, label in zip(leaves, labels, strict=True):
        facts[f"the shape of {label}"] = str(tuple(leaf.shape))
        facts[f"the dtype of {label}"] = str(leaf.dtype)
    for leaf, label in zip(leaves, labels, strict=True):
        facts[f"the hash of {label}"] = digest_of([leaf])
    return facts


def _check_quorum(quorum: Quorum, processes: Processes | None) -> None:
    if processes is None:
        raise ValueError(f"least is {quorum.least} in a Quorum without a group; expected a ProcessGroup.")
    if quorum.least > processes.size:
        raise ValueError(
            f"least is {quorum.least} in a Quorum of a group of {processes.size} processes; expected at most all."
        )


def _checked(weight: Any, count: int) -> list[float]:
    """The weights of as many closures."""
    given = list(weight) if isinstance(weight, list | tuple) else [weight]
    if len(given) != count:
        raise ValueError(f"weight is {weight!r} for {count} closures; expected one number for each.")
    for one in given:
        try:
            number = float(one)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"weight is {one!r}; expected a number, or one for each closure of a list.") from error
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"weight is {one!r}; expected a finite number from 0.")
    return [float(one) for one in given]
