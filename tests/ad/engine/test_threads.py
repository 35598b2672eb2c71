"""Work that a program hands to a thread that already runs."""

from __future__ import annotations

import logging
import logging.handlers
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import Tensor

import jetplane as jp
from cases import assert_close, randn


class Server:
    """A thread that calls what it is given, or takes the sine of it."""

    def __init__(self) -> None:
        self.tasks: queue.Queue = queue.Queue()
        self.results: queue.Queue = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (task := self.tasks.get()) is not None:
            self.results.put(task() if callable(task) else task["x"].sin().sum())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.tasks.put(None)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(1) as one:
        yield one


def refused(program: Callable[[Tensor], Tensor], by: str) -> None:
    with pytest.raises(jp.UnsupportedProgram, match=rf"hands work to one by {by}, where tangents are not followed"):
        jp.gradient(program, randn(3))


def test_a_queue_of_a_running_thread_is_refused(server: Server) -> None:
    def by_closure(x: Tensor) -> Tensor:
        server.tasks.put(lambda: x.sin().sum())
        return server.results.get(timeout=10)

    def by_tensor(x: Tensor) -> Tensor:
        server.tasks.put({"x": x * 2}, block=True)
        return server.results.get(timeout=10)

    def at_once(x: Tensor) -> Tensor:
        server.tasks.put_nowait(("work", x * 2))
        return x.sum()

    for program in (by_closure, by_tensor, at_once):
        refused(program, "Queue.put")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("apply_async", lambda pool, f, x: pool.apply(f, (x,))),
        ("apply_async", lambda pool, f, x: pool.apply_async(f, (x,)).get(10)),
        ("_map_async", lambda pool, f, x: sum(pool.map(f, [x]))),
        ("_map_async", lambda pool, f, x: sum(pool.starmap(f, [(x,)]))),
        ("imap", lambda pool, f, x: sum(pool.imap(f, [x]))),
        ("imap_unordered", lambda pool, f, x: sum(pool.imap_unordered(f, [x]))),
    ],
    ids=["apply", "apply_async", "map", "starmap", "imap", "imap_unordered"],
)
def test_a_pool_of_threads_is_refused(name: str, call: Callable[..., Tensor], pool: ThreadPool) -> None:
    refused(lambda x: call(pool, lambda part: part.sin().sum(), x), f"Pool.{name}")


def test_what_carries_no_tangent_may_be_put() -> None:
    seen: queue.Queue = queue.Queue()
    logger = logging.Logger("a program's")
    logger.addHandler(logging.handlers.QueueHandler(seen))

    def program(x: Tensor) -> Tensor:
        seen.put({"step": 3, "data": torch.ones(2), "kind": Tensor, "value": float(x.sum())})
        logger.warning("a line")
        return (x**2).sum()

    x = randn(3)
    assert_close(jp.gradient(program, x), 2 * x)
    assert seen.qsize() == 2


def test_other_threads_may_use_queues_while_a_pass_runs(server: Server) -> None:
    def program(x: Tensor) -> Tensor:
        event.set()
        assert done.get(timeout=10) is print
        return (x**2).sum()

    event, done = threading.Event(), queue.Queue()  # type: ignore[var-annotated]
    other = threading.Thread(target=lambda: event.wait(10) and done.put(print))
    other.start()
    x = randn(3)
    assert_close(jp.gradient(program, x), 2 * x)
    other.join()


def test_pools_of_processes_work() -> None:
    """Their threads carry what is pickled, and that has no tangents in backprop either."""

    def program(x: Tensor) -> Tensor:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return (x**2).sum() * pool.submit(abs, -1).result(timeout=60)

    x = randn(3)
    assert_close(jp.gradient(program, x), 2 * x)
