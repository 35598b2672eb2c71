"""Every complaint about what the user gives: a clear sentence with the value and the expectation."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from cases import F64, randn

X = torch.ones(3, dtype=F64)
W = torch.ones(2, 3, dtype=F64)
V = torch.ones(2, 3, dtype=F64)
INTEGERS = torch.arange(3)


def f(x: Tensor) -> Tensor:
    return (x**2).sum()


def enter(params, directions, program: Callable[[], object] = lambda: None, **options: object) -> object:
    with jp.perturb(params, directions, **options) as jets:
        out = program()
    return jets, out


class Lazy:
    """Lazy directions with rows of a wrong kind."""

    def __init__(self, k: int, rows: Callable[[Tensor, int], object]) -> None:
        self.k, self._rows = k, rows

    def rows(self, position: int, like: Tensor, start: int, stop: int) -> object:
        return self._rows(like, stop - start)


def twice() -> None:
    active = jp.perturb([X], [V])
    with active, active:
        pass


def quadratic_of(value: object, pairs: str = "all") -> object:
    jets, _ = enter([X], [V], lambda: X.sum(), pairs=pairs)
    return jets.quadratic(value)


FULL = torch.full((2, 3), float("nan"), dtype=F64)

ROWS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    # the function and its primals
    ("func", lambda: jp.gradient(3, X), TypeError, "func is int; expected a callable"),
    ("no-primals", lambda: jp.gradient(f, ()), ValueError, "primals hold no tensor; expected at least one to perturb"),
    ("no-primals-dict", lambda: jp.hessian(f, {}), ValueError, "primals hold no tensor"),
    ("primal-number", lambda: jp.gradient(f, 3.0), TypeError, "the primal is float; expected a tensor to perturb"),
    (
        "primal-integer",
        lambda: jp.gradient(f, INTEGERS),
        TypeError,
        "the primal has dtype torch.int64; only floating-point tensors can be perturbed",
    ),
    ("primal-bool", lambda: jp.gradient(f, X > 0), TypeError, "the primal has dtype torch.bool; only floating-point"),
    (
        "primal-complex",
        lambda: jp.gradient(f, X.to(torch.complex128)),
        TypeError,
        "the primal has dtype torch.complex128; expected real numbers here, of which the program makes complex ones by",
    ),
    (
        "primal-sparse",
        lambda: jp.gradient(f, W.to_sparse()),
        TypeError,
        "the primal has layout torch.sparse_coo; expected torch.strided",
    ),
    (
        "second-primal",
        lambda: jp.gradient(lambda a, b: a.sum(), (X, INTEGERS)),
        TypeError,
        "primal 1 has dtype torch.int64",
    ),
    # the shape of one direction
    (
        "jvp-shape",
        lambda: jp.jvp(f, (X,), (torch.ones(2, dtype=F64),)),
        ValueError,
        "tangents for the primal has shape (2,); expected (3,)",
    ),
    ("jvp-structure", lambda: jp.jvp(f, (X,), X), ValueError, "; expected the primals' "),
    ("jvp-type", lambda: jp.jvp(f, (X,), (1.0,)), TypeError, "tangents for the primal is float; expected a tensor"),
    ("hvp-shape", lambda: jp.hvp(f, X, V), ValueError, "v for the primal has shape (2, 3); expected (3,)"),
    (
        "hyperdual-shape",
        lambda: jp.hyperdual(f, X, X, X[:2]),
        ValueError,
        "v2 for the primal has shape (2,); expected (3,)",
    ),
    (
        "hyperdual-v12",
        lambda: jp.hyperdual(f, X, X, X, X[:2]),
        ValueError,
        "v12 for the primal has shape (2,); expected (3,)",
    ),
    ("jvp-dtype", lambda: jp.jvp(f, X, X.float()), ValueError, "have dtype torch.float32; expected torch.float64"),
    ("jvp-nan", lambda: jp.jvp(f, X, FULL[0]), ValueError, "hold values that are not finite; expected finite numbers"),
    # directions
    ("structure", lambda: jp.quadratic(f, X, (V,)), ValueError, "; expected the primals' "),
    ("structure-names", lambda: jp.quadratic(f, X, {"x": V}), ValueError, "the structure of directions is"),
    (
        "names",
        lambda: jp.hvp(lambda p: f(p["a"]) + f(p["b"]), {"a": X, "b": X}, {"b": X, "c": X}),
        ValueError,
        "the names of v lack ['a'] and have ['c'] beyond the primals'; expected the same names",
    ),
    (
        "module",
        lambda: enter(torch.nn.Linear(3, 2), [V]),
        TypeError,
        "params is Linear, a module; expected its parameters, module.parameters(), or by name",
    ),
    (
        "module-of-modules",
        lambda: jp.ForwardGradient(torch.nn.Sequential(torch.nn.Linear(3, 2))),
        TypeError,
        "params is Sequential, a module; expected its parameters",
    ),
    (
        "shape",
        lambda: jp.quadratic(f, X, X),
        ValueError,
        "directions for the primal (3,) have shape (3,); expected (K, 3)",
    ),
    (
        "shape-transposed",
        lambda: enter({"weight": W}, {"weight": torch.ones(4, 3, 2, dtype=F64)}),
        ValueError,
        "directions for weight (2, 3) have shape (4, 3, 2); expected (K, 2, 3)",
    ),
    (
        "dtype",
        lambda: jp.quadratic(f, X, V.float()),
        ValueError,
        "directions for the primal have dtype torch.float32; expected torch.float64",
    ),
    (
        "device",
        lambda: jp.quadratic(f, X, V.to("meta")),
        ValueError,
        "directions for the primal are on meta; expected cpu",
    ),
    (
        "k-zero",
        lambda: jp.quadratic(f, X, V[:0]),
        ValueError,
        "directions for the primal have K = 0; expected at least one direction",
    ),
    (
        "k-differs",
        lambda: jp.quadratic(lambda a, b: a.sum(), (X, X), (V, V[:1])),
        ValueError,
        "directions for primal 1 have K = 1; expected 2 as for primal 0",
    ),
    ("nan", lambda: jp.quadratic(f, X, FULL), ValueError, "directions for the primal hold values that are not finite"),
    (
        "infinite",
        lambda: jp.quadratic(f, X, V / 0),
        ValueError,
        "directions for the primal hold values that are not finite",
    ),
    (
        "not-a-tensor",
        lambda: jp.quadratic(f, X, 3.0),
        TypeError,
        "directions for the primal are float; expected a tensor",
    ),
    (
        "lazy-shape",
        lambda: jp.quadratic(f, X, Lazy(2, lambda like, n: torch.ones(n, 4, dtype=F64))),
        ValueError,
        "expected (2, 3)",
    ),
    (
        "lazy-dtype",
        lambda: jp.quadratic(f, X, Lazy(2, lambda like, n: torch.ones(n, 3))),
        ValueError,
        "torch.float32; expected torch.float64",
    ),
    (
        "lazy-count",
        lambda: jp.quadratic(f, X, Lazy(2, lambda like, n: torch.ones(1, 3, dtype=F64))),
        ValueError,
        "expected (2, 3)",
    ),
    ("lazy-nan", lambda: jp.quadratic(f, X, Lazy(2, lambda like, n: FULL)), ValueError, "not finite"),
    ("lazy-none", lambda: jp.quadratic(f, X, Lazy(0, lambda like, n: V[:0])), ValueError, "K = 0"),
    # pair sets, chunks and axes
    (
        "pairs-name",
        lambda: jp.jet(f, X, V, "some"),
        ValueError,
        "pairs is 'some'; expected a PairSet or one of 'all', 'diagonal', 'star', 'laplacian', 'none'",
    ),
    (
        "pairs-k",
        lambda: jp.jet(f, X, V, jp.PairSet.all(3)),
        ValueError,
        "the pair set is for 3 directions; there are 2",
    ),
    (
        "pairs-out-of-range",
        lambda: jp.jet(f, X, V, jp.PairSet(2, ((0, 2),))),
        ValueError,
        "pair (0, 2) is out of range; expected numbers from 0 to 1",
    ),
    (
        "pairs-weights",
        lambda: jp.jet(f, X, V, jp.PairSet(2, ((0, 1),), (1.0, 2.0))),
        ValueError,
        "2 weights for 1 pairs; expected one each",
    ),
    (
        "matrix-of-a-sum",
        lambda: jp.PairSet.laplacian(2).matrix(V),
        ValueError,
        "a weighted sum of pairs is one row and has no matrix",
    ),
    (
        "chunk-zero",
        lambda: jp.hessian(f, X, chunk_size=0),
        ValueError,
        "chunk_size is 0; expected a positive integer or None",
    ),
    (
        "chunk-float",
        lambda: jp.hessian(f, X, chunk_size=1.5),
        ValueError,
        "chunk_size is 1.5; expected a positive integer or None",
    ),
    (
        "batch-ndim",
        lambda: jp.laplacian(f, X, batch_ndim=2),
        ValueError,
        "batch_ndim is 2; expected 0 to 1 for the primal (3,)",
    ),
    ("batch-ndim-negative", lambda: jp.laplacian(f, X, batch_ndim=-1), ValueError, "batch_ndim is -1; expected 0 to 1"),
    # what the function returns
    (
        "vector-loss",
        lambda: jp.quadratic(lambda x: x * 2, X, V),
        ValueError,
        "the loss has shape (3,); expected a scalar",
    ),
    (
        "tuple-loss",
        lambda: jp.quadratic(lambda x: (f(x), f(x)), X, V),
        ValueError,
        "the function returned tuple; expected one scalar tensor",
    ),
    (
        "number-loss",
        lambda: jp.gradient(lambda x: 3.0, X),
        TypeError,
        "the program returned float 3.0; expected a tensor",
    ),
    (
        "no-aux",
        lambda: jp.gradient(f, X, has_aux=True),
        TypeError,
        "func returned Tensor; expected a pair (output, aux) with has_aux=True",
    ),
    (
        "integer-loss",
        lambda: jp.quadratic(lambda x: x.argmax(), X, V),
        ValueError,
        "torch.int64; expected a floating-point scalar",
    ),
    # perturb
    (
        "params-tensor",
        lambda: jp.perturb(X, [V]),
        TypeError,
        "params is a tensor; expected a list of tensors or a mapping of names to tensors",
    ),
    (
        "params-empty",
        lambda: jp.perturb([], []),
        ValueError,
        "params is empty; expected at least one tensor to perturb",
    ),
    ("params-empty-generator", lambda: jp.perturb(nn.ReLU().parameters(), []), ValueError, "params is empty"),
    (
        "params-integer",
        lambda: jp.perturb([INTEGERS], [V]),
        TypeError,
        "parameter 0 has dtype torch.int64; only floating-point",
    ),
    ("params-name", lambda: jp.perturb({"steps": INTEGERS}, {"steps": V}), TypeError, "steps has dtype torch.int64"),
    (
        "params-module",
        lambda: jp.perturb([nn.Linear(2, 2)], [V]),
        TypeError,
        "parameter 0 is Linear; expected a tensor to perturb",
    ),
    (
        "params-twice",
        lambda: jp.perturb([X, X], [V, V]),
        ValueError,
        "memory with parameter 0; expected each tensor to be perturbed once",
    ),
    (
        "params-overlap",
        lambda: jp.perturb({"a": X, "b": X[1:]}, {"a": V, "b": V[:, 1:]}),
        ValueError,
        "memory with a; expected each tensor",
    ),
    (
        "mapping-and-list",
        lambda: jp.perturb([X], {"x": V}),
        TypeError,
        "directions are a mapping but params are a list; expected the same form for both",
    ),
    (
        "names-missing",
        lambda: jp.perturb({"a": X, "b": W}, {"a": V}),
        ValueError,
        "directions lack ['b'] and name nothing beyond params; expected the same names",
    ),
    (
        "names-extra",
        lambda: jp.perturb({"a": X}, {"a": V, "c": V}),
        ValueError,
        "directions lack nothing and name ['c'] beyond params",
    ),
    (
        "too-few",
        lambda: jp.perturb([X, W], [V]),
        ValueError,
        "there are directions for 1 tensors; expected 2, one for each",
    ),
    (
        "unused",
        lambda: enter({"a": X, "b": W}, {"a": V, "b": torch.ones(2, 2, 3, dtype=F64)}, lambda: X.sum()),
        ValueError,
        "the program never used b; expected each perturbed tensor in it (a model that keeps what it computed on an "
        "earlier call, such as an attention bias in eval mode, hides it), or allow_unused=True",
    ),
    ("unused-all", lambda: enter([X], [V]), ValueError, "the program never used parameter 0"),
    ("active-already", twice, RuntimeError, "this perturb is active already; expected a new one for each pass"),
    (
        "quadratic-without-pairs",
        lambda: quadratic_of(X.sum(), pairs="diagonal"),
        ValueError,
        "this pass does not carry all pairs, which quadratic needs; expected pairs='all'",
    ),
    ("quadratic-of-vector", lambda: quadratic_of(X), ValueError, "the loss has shape (3,); expected a scalar"),
    ("quadratic-of-number", lambda: quadratic_of(3.0), TypeError, "the program returned float 3.0; expected a tensor"),
    ("verify-vector", lambda: jp.verify(lambda: X * 2, [X]), ValueError, "expected a scalar loss"),
    # quadratics
    (
        "adding",
        lambda: jp.quadratic(f, X, V) + jp.quadratic(f, X, V[:1]),
        ValueError,
        "cannot add quadratics on 2 and 1 directions; expected the same",
    ),
    ("adding-number", lambda: jp.quadratic(f, X, V) + 1, TypeError, "unsupported operand"),
    # programs: the places with more than a line are in test_guards.py and test_register.py
    (
        "reinterpreted",
        lambda: jp.gradient(lambda x: x.view(torch.int64).sum() + x.sum(), X),
        jp.MissingRule,
        "reinterprets perturbed memory as torch.int64",
    ),
    (
        "complex-parameter-that-is-a-view",
        lambda: jp.perturb([torch.ones(2, dtype=torch.complex128).conj()], [torch.ones(1, 2, dtype=torch.complex128)]),
        TypeError,
        "parameter 0 is a conjugate or negative view, which shows what its memory does not hold; expected",
    ),
    (
        "complex-loss",
        lambda: jp.quadratic(lambda x: (x + 1j).sum(), X, torch.ones(1, *X.shape, dtype=F64)),
        ValueError,
        "the loss has dtype torch.complex128; expected a real number, such as loss.real or loss.abs()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_is_refused_with_a_clear_sentence(call, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_a_unused_tensor_that_is_only_viewed_or_compared_counts_as_unused() -> None:
    with pytest.raises(ValueError, match="the program never used parameter 0"):
        enter([X], [V], lambda: (X.view(-1), X > 0))


def test_perturbing_twice_in_a_row_is_fine() -> None:
    for _ in range(2):
        enter([X], [V], lambda: X.sum())


def test_a_pass_can_be_entered_again_after_it_ended_or_says_why_not() -> None:
    one = jp.perturb([X], [V])
    for _ in range(2):
        with one as jets:
            loss = f(X)
        assert jets.quadratic(loss).slope.tolist() == [6.0, 6.0]


def literal_parts(node: ast.AST) -> list[str]:
    """The constant parts of a message."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values if isinstance(value, ast.Constant) for part in literal_parts(value)]
    return []


def raised_messages() -> dict[str, str]:
    """The longest constant part of each message raised outside the rules, by where it is raised."""
    source = Path(jp.__file__).parent
    found = {}
    for path in [
        *source.glob("*.py"),
        *(p for p in (source / "ad").rglob("*.py") if p.parent.name not in ("rules", "kernels")),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                parts = literal_parts(node.exc.args[0])
                if parts:
                    found[f"{path.name}:{node.lineno}"] = max(parts, key=len)
    return found


def test_every_message_raised_has_a_test() -> None:
    here = Path(__file__).parent
    tests = re.sub(r"\\(.)", r"\1", "".join(p.read_text() for p in here.rglob("test_*.py")))
    words = " ".join(re.findall(r"[a-z]+", tests))
    missing = {}
    for where, message in raised_messages().items():
        pieces = re.findall(r"[a-z]+", message)
        windows = [" ".join(pieces[i : i + 4]) for i in range(max(1, len(pieces) - 3))]  # four words in a row
        if not any(window in words for window in windows):
            missing[where] = message
    assert not missing


def test_exceptions_have_one_base() -> None:
    assert issubclass(jp.MissingRule, jp.JetplaneError) and issubclass(jp.UnsupportedProgram, jp.JetplaneError)
    assert issubclass(jp.MissingRule, NotImplementedError) and issubclass(jp.UnsupportedProgram, RuntimeError)
    assert randn(1).dtype == F64
