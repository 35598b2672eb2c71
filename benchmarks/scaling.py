"""Steps of 1, 2 and 4 processes measured, and a model of the step beside them: what many more workers would cost.

    python benchmarks/scaling.py measure --out benchmarks/results/scaling_cpu.json     # on an idle machine
    python benchmarks/scaling.py model benchmarks/results/scaling_cpu.json             # the tables of docs/scaling.md
    python benchmarks/scaling.py draw docs/figures/scaling.svg                          # its figure (matplotlib)

``measure`` trains a perceptron by FoMoH-2D with the same batch for each process (weak scaling): all processes take
steps by themselves, and then together; the difference is what the exchange costs. Beside that the exchange alone: a
gather of nine numbers and a broadcast of five, as in such a step. Each is the median, and the least, of many.

``model`` compares bytes with those of ``benchmarks/results/wire_cpu.json`` and times with the measured ones (two
constants for the bytes; two times, of one process and of an exchange of two, for the times), and then simulates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F

from jetplane import optim
from jetplane_lab.bench import scaling
from jetplane_lab.bench.machine import environment

WIRE = Path(__file__).parent / "results" / "wire_cpu.json"
PLANES = {
    "FGD": (1, False, False),
    "FoMoH": (1, True, False),
    "FoMoH-2D": (2, True, False),
    "FoMoH-10D": (10, True, False),
}
BATCH, WIDTH, ROUNDS = 512, 256, 60
LINKS = {
    "100 Mbit/s, 20 ms": scaling.Link(20e-3, 12.5e6),
    "1 Gbit/s, 1 ms": scaling.Link(1e-3, 125e6),
    "100 Gbit/s, 20 us": scaling.Link(20e-6, 12.5e9),
    "400 Gbit/s, 5 us": scaling.Link(5e-6, 50e9),
}
CLUSTER = ("100 Gbit/s, 20 us", "400 Gbit/s, 5 us")  # of which each accelerator has one
FLOPS, TOKENS, EACH = 4e14, 4096, 1e9  # of an accelerator a second; in a worker's part of a batch; parameters


# -- measured -------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        distributed.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def work(rank: int, size: int, folder: str) -> None:
    """What each process measures."""
    torch.set_num_threads(1)
    address = f"file://{folder}/meeting"
    distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=600)
    )
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(BATCH, 64, generator=generator), torch.randint(10, (BATCH,), generator=generator)

    def stepper(group: Any) -> Callable[[], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
        opt = optim.FoMoHKD(model.parameters(), 0.01, 2, process_group=group, check_every=None)
        return lambda: opt.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    said, answered = scaling.numbers_of(2)
    mine, answer = torch.ones(said, dtype=torch.float64), torch.ones(answered, dtype=torch.float64)
    heard = [torch.empty_like(mine) for _ in range(size)]

    def exchange() -> None:
        distributed.all_gather(heard, mine)
        distributed.broadcast(answer, 0)

    calls = {"alone": stepper(None), "together": stepper(distributed.group.WORLD), "exchange": exchange}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process steps alone
        for call in calls.values():
            for _ in range(10):
                call()
        times = {name: timed(call, ROUNDS) for name, call in calls.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(times))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of processes."""
    rows = []
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (size, folder), nprocs=size)
            each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
        row: dict[str, Any] = {"processes": size}
        for name in each[0]:
            slowest = [max(times) for times in zip(*(one[name] for one in each), strict=True)]
            row[f"{name}_us"] = round(1e6 * statistics.median(slowest), 1)
            row[f"{name}_least_us"] = round(1e6 * min(slowest), 1)
        rows.append(row)
        print(row, flush=True)
    settings = {"batch": BATCH, "width": WIDTH, "rounds": ROUNDS, "cores": os.cpu_count()}
    return {"environment": environment("cpu", 1) | settings, "results": rows}


# -- the model ------------------------------------------------------------------------------------------------------


def bytes_table() -> list[list[str]]:
    """Bytes of planes as they were measured, and as the model has them."""
    rows = [row for row in json.loads(WIRE.read_text())["results"] if row["method"] in PLANES]
    cases = []
    for row in rows:
        k, curved, noise = PLANES[row["method"]]
        known = scaling.plane_bytes(row["processes"], *scaling.numbers_of(k, curved=curved, noise=noise))
        cases.append((row["processes"], known, row["bytes_per_step"]))
    message, visit = scaling.fitted_bytes(cases)
    print(f"a message has {message:.0f} bytes beside its numbers, a visit to the store {visit:.0f}")
    table = []
    for row, (size, known, seen) in zip(rows, cases, strict=True):
        model = known + size * (size - 1) * message + size * visit
        table.append(
            [
                row["method"],
                f"{size}",
                f"{row['parameters']:,}",
                f"{seen:.0f}",
                f"{model:.0f}",
                f"{model / seen - 1:+.1%}",
            ]
        )
    return table


def times_table(measured: dict[str, Any]) -> list[list[str]]:
    """Times as they were measured, and as the model has them by those of one process and of an exchange of two."""
    rows = {row["processes"]: row for row in measured["results"]}
    cores = measured["environment"]["cores"]
    compute, pair = rows[1]["alone_least_us"], rows[2]["exchange_least_us"]
    link = scaling.Link(pair / 2 * 1e-6, 1e9)  # one round of the ring, and one of the tree
    table = []
    for size, row in rows.items():
        exchange = 1e6 * scaling.plane_seconds(size, 2, link)
        model = compute * max(1.0, size / cores) + exchange
        seen = [row[f"{name}_least_us"] for name in ("alone", "exchange", "together")]
        numbers = [seen[0], seen[1], exchange, seen[2], model]
        table.append([f"{size}", *(f"{number:.0f}" for number in numbers)])
    return table


def stragglers_table() -> list[list[str]]:
    """Steps of one second of compute, of a cluster, with all workers and with nine tenths of them."""
    link, table = LINKS["100 Gbit/s, 20 us"], []
    slow = scaling.Straggling(share=1e-3)
    for workers in (1, 10, 100, 1000, 10_000):
        generator = torch.Generator().manual_seed(0)
        ring, tree = (1e3 * scaling.plane_seconds(workers, 2, link, tree=tree) for tree in (False, True))
        even = scaling.computes(workers, 1.0, scaling.Straggling(), 200, generator)
        uneven = scaling.computes(workers, 1.0, slow, 200, generator)
        least = max(1, workers * 9 // 10)
        (calm, _), (all_of_them, _) = scaling.step(even, ring / 1e3), scaling.step(uneven, ring / 1e3)
        store = scaling.store_seconds(workers, link)
        some, share = scaling.step(uneven, store, least=least, wait=0.3)
        exchanges = [f"{ring:.2f}", f"{tree:.2f}", f"{1e3 * store:.2f}"]
        numbers = [*exchanges, f"{calm:.2f}", f"{all_of_them:.2f}", f"{some:.2f}", f"{share:.2%}"]
        table.append([f"{workers:,}", *numbers])
    return table


def crossover_table() -> list[list[str]]:
    """Plane steps in the time of a gradient step. A worker has an accelerator for each billion of parameters."""
    table = []
    for name, link in LINKS.items():
        for parameters in (1e9, 1e10, 1e11, 1e12):
            count = parameters / EACH
            wide = scaling.Link(link.latency, link.bandwidth * count) if name in CLUSTER else link
            ratios = [
                scaling.ratio(parameters, workers, wide, flops=FLOPS * count, tokens=TOKENS)
                for workers in (10, 100, 1000, 10_000)
            ]
            table.append(
                [name, f"{parameters:.0e}", *(f"{one:,.3g}" if one < 1e3 else f"{one:,.0f}" for one in ratios)]
            )
    return table


def model(options: argparse.Namespace) -> None:
    """Print all tables."""
    show(["method", "processes", "parameters", "measured bytes", "model", "off"], bytes_table())
    if options.measured:
        heads = ["processes", "step alone, us", "exchange", "model", "step together", "model"]
        show(heads, times_table(json.loads(options.measured.read_text())))
    heads = [
        "workers",
        "ring, ms",
        "tree, ms",
        "store, ms",
        "step, s",
        "with stragglers",
        "a quorum of 90%",
        "workers in it",
    ]
    show(heads, stragglers_table())
    show(["link", "parameters", "10 workers", "100", "1,000", "10,000"], crossover_table())


def show(heads: list[str], rows: list[list[str]]) -> None:
    print("\n| " + " | ".join(heads) + " |\n| " + " | ".join(["---"] + ["---:"] * (len(heads) - 1)) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def draw(options: argparse.Namespace) -> None:
    """The time of a plane's exchange and of a gradient's, against the size of the model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jetplane"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    sizes = [10 ** (6 + step / 4) for step in range(25)]
    for number, (name, link) in enumerate(LINKS.items()):
        axes[0].plot(
            sizes, [scaling.all_reduce_seconds(1000, 2 * size, link) for size in sizes], f"C{number}", label=name
        )
        axes[0].axhline(scaling.plane_seconds(1000, 2, link, tree=True), color=f"C{number}", linestyle=":")
    axes[0].set(
        xscale="log", yscale="log", xlabel="parameters", ylabel="seconds", title="1,000 workers: exchange of a step"
    )
    axes[0].legend(fontsize=7, title="gradient (plane: dotted)", title_fontsize=7)
    workers = [10 ** (step / 4) for step in range(4, 17)]
    for number, (name, link) in enumerate(LINKS.items()):
        for tree, line in ((False, "-"), (True, ":")):
            times = [scaling.plane_seconds(round(count), 2, link, tree=tree) for count in workers]
            axes[1].plot(workers, times, f"C{number}{line}", label=None if tree else name)
    axes[1].set(
        xscale="log", yscale="log", xlabel="workers", ylabel="seconds", title="a plane's exchange: ring, tree (dotted)"
    )
    figure.tight_layout()
    figure.savefig(options.out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    one.add_argument("--out", type=Path)
    two = commands.add_parser("model")
    two.add_argument("measured", type=Path, nargs="?")
    three = commands.add_parser("draw")
    three.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        found = measure(options)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    elif options.command == "model":
        model(options)
    else:
        draw(options)


if __name__ == "__main__":
    main()
