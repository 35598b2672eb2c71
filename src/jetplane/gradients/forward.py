"""Forward gradients: two forward passes, and what they say about every weight, in ``.grad``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ad.budget import parse_bytes
from ..ad.replay import Replay
from ..errors import CoupledSamples, UnsupportedProgram
from .control import Control
from .noise import Noise, Signs
from .parameters import Parameters
from .passes import Passes, capturing
from .plan import Changed, Plan, Site
from .plans import Plans, Width
from .program import Program
from .readout import Readout
from .statistics import Statistics
from .weight import weight_gradient

__all__ = ["ForwardGradient", "forward_gradient"]

Params = Iterable[Any] | Mapping[str, Tensor]


class ForwardGradient:
    """Estimates the gradient of a mean of per-sample losses by forward passes alone, and adds it to ``.grad``.

    Each layer's output gets J random tangents ``u`` for every sample. A first forward pass carries them to the losses,
    s_jb = sum over layers of u_jb . d loss_b; a second one draws the same numbers again and multiplies each layer's
    own input with mean_j s_jb u_jb, which is d loss_b at its output in the mean over the draws. The layers behind which
    is only the loss get their exact derivative. With ``control``, what the tangents do to the loss's input is learned
    and predicted, and only the rest of it is noise: exactly as unbiased, and less noisy by the call.

    What was found out about a program is kept for its next call. ``step`` is the number of the next call, and the noise
    a function of (seed, step). With ``capturable`` it is counted on the device, so that a CUDA graph of a call, which
    can be captured after a first call as it is, draws new numbers at each replay.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(16, 4), torch.arange(16) % 3
        >>> estimate = ForwardGradient(model.parameters(), samples=2)
        >>> loss = estimate(lambda x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="none"), x, y)
        >>> assert all(p.grad is not None for p in model.parameters()) and estimate.step == 1
    """

    def __init__(
        self,
        params: Params,
        samples: int | None = 1,
        *,
        estimator: str = "activation",
        seed: int = 0,
        step: int = 0,
        chunk_size: int | None = None,
        memory: str | int | None = None,
        coupled: str = "sum",
        allow_unused: bool = False,
        control: bool = True,
        probe_every: int = 50,
        capturable: bool = False,
        noise: Callable[[int, Any], Noise] = Signs,
    ) -> None:
        for name, value in (("samples", samples), ("chunk_size", chunk_size), ("probe_every", probe_every)):
            if value is None and (name == "chunk_size" or (name == "samples" and estimator == "activation")):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive whole number.")
        _check_word("seed", seed, 64)
        _check_word("step", step, 32)
        for name, text, known in (
            ("estimator", estimator, ("activation", "weight")),
            ("coupled", coupled, ("sum", "raise")),
        ):
            if text not in known:
                raise ValueError(f"{name} is {text!r}; expected one of {', '.join(map(repr, known))}.")
        if chunk_size is not None and memory is not None:
            raise ValueError(f"chunk_size is {chunk_size} and memory {memory!r}; expected one of them.")
        self.samples, self.estimator, self.seed = samples, estimator, seed
        self.coupled, self.allow_unused = coupled, allow_unused
        self._width = Width(samples, chunk_size, None if memory is None else parse_bytes(memory))
        self._parameters = Parameters(params)
        self._probe_every = probe_every
        self._noise = noise
        self._plans = Plans()
        self._control = Control(self._parameters.tensors) if control and estimator == "activation" else None
        self._step: int | Tensor = step
        if capturable:
            self._step = torch.full((), step, dtype=torch.int64, device=self._parameters.tensors[0].device)

    @property
    def step(self) -> int:
        """The number of the next call."""
        return int(self._step)

    @step.setter
    def step(self, value: int) -> None:
        _check_word("step", value, 32)
        if isinstance(self._step, Tensor):
            self._step.fill_(value)
        else:
            self._step = value

    # -- use --------------------------------------------------------------------------------------------------------

    def __call__(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Any:
        """Add the estimate of d mean(loss_fn(*batch)) to ``.grad``; the mean loss, with aux if there is one."""
        program = self._program(loss_fn, batch, has_aux)
        if self.estimator == "weight":
            losses, aux = weight_gradient(
                self._parameters, program, self._width, self.seed, self._step, self.allow_unused
            )
        else:
            losses, aux = self._by_activations(program)
        self._step += 1  # in place where it is a tensor
        loss = losses.sum() / losses.shape[0]
        return (loss, aux) if has_aux else loss

    def sites(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> list[Site]:
        """Where noise enters, and how the samples lie there. Touches no gradient, buffer or random state."""
        passes = self._passes(self._program(loss_fn, batch, has_aux))
        try:
            with _steady():
                return self._plans.find(passes, self._width).sites
        finally:
            passes.replay.rewind()

    def reset(self) -> None:
        """Forget what the control variate has learned, as for other values of the parameters."""
        if self._control is not None:
            self._control.reset()

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept to go on as if nothing had happened: numbers, and under "control" tensors by name."""
        learned = {} if self._control is None else self._control.state_dict()
        return {"seed": self.seed, "step": self.step, "control": learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was."""
        _check_word("seed", state["seed"], 64)
        self.step = state["step"]
        self.seed = state["seed"]
        if self._control is not None:
            self._control.load_state_dict(state.get("control", {}))

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: all but the plans, which are made anew."""
        return self.__dict__ | {"_plans": Plans()}

    # -- passes -----------------------------------------------------------------------------------------------------

    def _program(self, loss_fn: Callable[..., Any], batch: Any, has_aux: bool) -> Program:
        if torch.is_inference_mode_enabled():
            raise UnsupportedProgram("forward_gradient runs in torch.inference_mode(); expected torch.no_grad().")
        self._parameters.refresh()
        return Program(loss_fn, batch, has_aux)

    def _passes(self, program: Program) -> Passes:
        devices = [] if capturing() else [tensor.device for tensor in self._parameters.tensors]
        return Passes(self._parameters, program, Replay(devices))

    def _by_activations(self, program: Program) -> tuple[Tensor, Any]:
        plan = self._plans.known(program, self._width, self._probe_every)
        if capturing() and (plan is None or plan.random):
            what = "is new" if plan is None else "draws random numbers"
            raise UnsupportedProgram(
                f"a CUDA graph is captured of a program that {what}; expected a call as it is before it, and no "
                "dropout."
            )
        passes, noise = self._passes(program), self._noise(self.seed, self._step)
        if plan is not None:
            with contextlib.suppress(Changed):
                return self._follow(plan, passes, noise)
        with _steady():
            return self._follow(self._plans.find(passes, self._width), passes, noise)

    def _follow(self, plan: Plan, passes: Passes, noise: Noise) -> tuple[Tensor, Any]:
        """Both passes. Raises Changed where the program is another one, before a gradient is touched."""
        if not plan.sites:
            return passes.collect(plan, noise, None, 1, lambda: self._check(plan))
        readout = None if plan.tail is None else Readout(plan)
        count = self._width.tangents(plan)
        prediction = None
        if self._control is not None:
            prediction = self._control.of(plan, readout, count)
        if prediction is None and plan.tokens is None:
            readout = None
        statistics = Statistics(plan) if plan.norms else None
        parts, chunk = [], self._width.of(plan, 0 if prediction is None else prediction.held)
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)

            def rows(site: Site, like: Tensor, start: int = start, stop: int = stop) -> Tensor:
                return noise.rows(site.number, start, stop, like)

            parts.append(passes.carry(plan, rows, stop - start, True, readout, prediction, statistics))
        self._check(plan)
        scalars = torch.cat(parts) / (count * plan.samples)
        if prediction is not None:
            prediction.begin()
        if statistics is not None:
            statistics.close(count)
        return passes.collect(plan, noise, scalars, chunk, prediction=prediction, statistics=statistics)

    def _check(self, plan: Plan) -> None:
        """Raise what can be told only of a plan that the program has followed."""
        self._check_reached(plan)
        self._check_coupled(plan)

    def _check_reached(self, plan: Plan) -> None:
        missed = [name for number, name in enumerate(self._parameters.names) if number not in plan.reached]
        if missed and not self.allow_unused:
            raise UnsupportedProgram(
                f"the losses do not depend on {', '.join(missed)} through any layer; expected every parameter that "
                "requires grad to be used, or allow_unused=True."
            )

    def _check_coupled(self, plan: Plan) -> None:
        coupled = [site for site in plan.sites if site.coupled]
        if coupled and self.coupled == "raise":
            site = coupled[0]
            raise CoupledSamples(
                f"other samples' losses depend on a sample's entries of {tuple(site.shape)}, the output of "
                f"{site.where}; expected {plan.samples} samples that do not interact, or coupled='sum'."
            )


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """Refuse a program that differs from the plan that was made of it a moment ago."""
    try:
        yield
    except Changed:
        raise UnsupportedProgram(
            "loss_fn did other operations when it was called again with the same random numbers; expected one that "
            "depends on nothing but its arguments, its parameters and torch's random state."
        ) from None


def _check_word(name: str, value: object, bits: int) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value!r}; expected a whole number from 0 to 2**{bits} - 1.")


# -- the same as a function -----------------------------------------------------------------------------------------


class _Kept:
    """What is kept between calls with the same parameters."""

    def __init__(self, tensors: list[Tensor], gone: Callable[[Any], object]) -> None:
        self.tensors = [weakref.ref(tensor, gone) for tensor in tensors]
        self.plans = Plans()
        self.control = Control(tensors)
        self.step = 0


_KEPT: dict[tuple[int, ...], _Kept] = {}  # by the parameters' identities


def forward_gradient(
    loss_fn: Callable[..., Any],
    params: Params,
    *batch: Any,
    samples: int = 1,
    estimator: str = "activation",
    seed: int = 0,
    step: int | None = None,
    chunk_size: int | None = None,
    memory: str | int | None = None,
    coupled: str = "sum",
    allow_unused: bool = False,
    control: bool = True,
    has_aux: bool = False,
) -> Any:
    """Add a forward estimate of the gradient of ``loss_fn(*batch).mean()`` to ``.grad``, and return that mean.

    ``loss_fn`` returns one loss for each sample, (B,), or (B, ...), summed over the rest. ``params`` are tensors, a
    mapping of names to tensors, or a module's ``parameters()`` or ``named_parameters()``. ``step`` numbers the noise;
    by default calls with the same parameters are counted. With ``has_aux`` the function returns (losses, aux), and the
    result is (mean, aux).

    ``estimator`` is "activation", tangents of each layer's output, or "weight", tangents of the weights. ``samples``
    tangents are carried ``chunk_size`` at a time, or as many as fit into ``memory``. Where the samples of a batch
    interact, the sum of all losses multiplies a tangent, or ``coupled="raise"`` raises. With ``control`` a call also
    learns from those before it; without it, the result depends on (seed, step) alone.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> x = torch.eye(3)
        >>> forward_gradient(lambda x: (x @ w - 2).square(), [w], x)
        tensor(1.)
        >>> w.grad  # behind this layer is only the loss, so it is exact
        tensor([-0.6667, -0.6667, -0.6667])
    """
    made = ForwardGradient(
        params,
        samples,
        estimator=estimator,
        seed=seed,
        chunk_size=chunk_size,
        memory=memory,
        coupled=coupled,
        allow_unused=allow_unused,
        control=control,
    )
    kept = _kept(made._parameters.tensors)
    made._plans, made.step = kept.plans, kept.step if step is None else step
    if made._control is not None:
        made._control = kept.control
    result = made(loss_fn, *batch, has_aux=has_aux)
    kept.step = made.step
    return result


def _kept(tensors: list[Tensor]) -> _Kept:
    """What is kept for these parameters, for as long as they all live."""
    key = tuple(map(id, tensors))
    kept = _KEPT.get(key)
    if kept is None or any(ref() is not tensor for ref, tensor in zip(kept.tensors, tensors, strict=True)):
        _KEPT[key] = kept = _Kept(tensors, lambda _: _KEPT.pop(key, None))
    return kept
