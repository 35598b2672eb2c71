"""The report: reading runs, intervals, rows beside the paper's, claims, page, Markdown, thinned JSON, the commands."""

from __future__ import annotations

import csv
import html.parser
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scipy import stats

from jetplane import cli
from jetplane.cli import entries
from jetplane_lab import presets, report
from jetplane_lab.commands import demo
from jetplane_lab.presets import PRESETS
from jetplane_lab.report import claims, groups, intervals, lead, runs, tables
from jetplane_lab.training import Config, Summary
from synthetic_runs import write_run

ROWS = {  # invented: how fast, and how far
    "fgd": (0.3, 0.3, 0.91),
    "fomoh": (0.6, 0.32, 0.911),
    "fomoh-kd": (1.2, 0.30, 0.915),
    "fomoh-bp": (5.0, 0.23, 0.926),
    "backprop": (6.0, 0.2265, 0.927),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows of logistic regression but one, with two seeds and 40 epochs, and one row of the CNN."""
    root = tmp_path_factory.mktemp("table")
    for name, preset in PRESETS.items():
        if name.startswith("lr-") and name != "lr-fomoh-sch":
            speed, nll, accuracy = ROWS[preset.config.method]
            for seed in (0, 1):
                config = preset.config.replace(seed=seed, epochs=60)
                rise = 0.8 if config.schedule == "none" and config.method in ("fomoh", "fomoh-kd") else 0.0
                write_run(
                    root / name / f"seed-{seed}",
                    config,
                    speed=speed * config.k,
                    nll=nll,
                    accuracy=accuracy + 0.001 * config.k,
                    rise=rise,
                )
    write_run(root / "cnn-fgd", presets.find("cnn-fgd").config.replace(epochs=60), epochs=7, reason=None)
    return root


@pytest.fixture
def warnings() -> list[str]:
    return []


# -- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 3.7, 8, 60, 1e5])
def test_quantiles_are_those_of_scipy(freedom: float) -> None:
    for p in (0.01, 0.4, 0.5, 0.6, 0.9, 0.975, 0.9995):
        assert intervals.t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-7, abs=1e-9)
        assert intervals.t_cdf(1.3, freedom) == pytest.approx(stats.t.cdf(1.3, freedom), rel=1e-9)


def test_quantile_of_no_probability() -> None:
    with pytest.raises(ValueError, match=r"p is 1; a quantile needs a probability between 0 and 1"):
        intervals.t_quantile(1.0, 3)


def test_welch_interval_is_scipys() -> None:
    a, b = [0.31, 0.32, 0.30, 0.33], [0.29, 0.30, 0.295]
    ours = intervals.difference(intervals.sample(a), intervals.sample(b))
    theirs = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-7)
    assert ours.stds == pytest.approx(ours.value / intervals.sample(b).std)


def test_one_run_gives_a_prediction_interval() -> None:
    d = intervals.difference(intervals.sample([0.32]), intervals.Sample(0.30, 0.01, 5))
    half = stats.t.ppf(0.975, 4) * 0.01 * math.sqrt(1 + 1 / 5)
    assert (d.low, d.high) == pytest.approx((0.02 - half, 0.02 + half))
    other_way = intervals.difference(intervals.Sample(0.30, 0.01, 5), intervals.sample([0.32]))
    assert other_way.high == pytest.approx(-d.low)
    neither = intervals.difference(intervals.sample([0.32]), intervals.sample([0.3]))
    assert neither.value == pytest.approx(0.02) and math.isnan(neither.low)


def test_a_printed_std_of_zero_is_what_rounding_hides() -> None:
    d = intervals.difference(intervals.Sample(0.2266, 0.00001, 5), intervals.Sample(0.2265, 0.0, 5))
    assert d.stds == pytest.approx(2.0)


# -- reading ------------------------------------------------------------------------------------------------------


def test_read_finds_folders_and_their_state(table: Path) -> None:
    records = report.read([table])
    assert len(records) == 17 and sum(record.finished for record in records) == 16
    going = next(record for record in records if not record.finished)
    assert (going.epoch, going.state) == (7, "in progress, epoch 7 of 60")
    assert going.facts.seconds_per_epoch == pytest.approx(0.5) and going.last("validation_nll") > 0.3
    assert math.isnan(going.last("train_nll_after")) and math.isnan(going.last("nothing"))


def test_nothing_found_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run was found under .*; expected folders with config.json"):
        report.read([tmp_path])
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere; expected a run's folder"):
        report.read([tmp_path / "nowhere"])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Path]:
    """Two runs, of which the second is damaged by the tests."""
    for seed in (0, 1):
        write_run(tmp_path / f"run-{seed}", Config(method="fomoh", seed=seed, epochs=5))
    yield tmp_path


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("config.json", '{"model": "cn', "config.json is damaged"),
        ("config.json", "[1]", "config.json holds a list; expected an object"),
        ("config.json", '{"model": "cnm"}', "did you mean cnn?"),
        ("config.json", '{"colour": 3}', "colour"),
        ("metrics.jsonl", '{"epoch":1}\n{"epo\n{"epoch":3}\n', "line 2 of metrics.jsonl is damaged"),
        ("metrics.jsonl", "[3]\n", "line 1 of metrics.jsonl is not the metrics of an epoch"),
        ("metrics.jsonl", '{"epoch":2}\n{"epoch":2}\n', "line 2 of metrics.jsonl has epoch 2 after 2"),
        ("metrics.jsonl", '{"epoch":1,"lr":0.1}\n', "metrics.jsonl has no train_nll"),
        ("metrics.jsonl", "", "it has no finished epoch yet"),
    ],
)
def test_a_damaged_run_is_named_and_left_out(
    pair: Path, warnings: list[str], name: str, contents: str, message: str
) -> None:
    (pair / "run-1" / name).write_text(contents)
    assert [record.config.seed for record in report.read([pair], warnings.append)] == [0]
    assert len(warnings) == 1 and message in warnings[0] and str(pair / "run-1") in warnings[0]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("summary.json", '{"reason"', "summary.json is damaged"),
        ("summary.json", "{}", "says no reason; the run counts as in progress"),
        ("environment.json", "\x00", "environment.json is damaged"),
    ],
)
def test_a_run_is_reported_without_a_damaged_side_file(
    pair: Path, warnings: list[str], name: str, contents: str, message: str
) -> None:
    (pair / "run-1" / name).write_text(contents)
    first, second = report.read([pair], warnings.append)
    assert first.finished and second.finished == (name != "summary.json")
    assert len(warnings) == 1 and message in warnings[0]


def test_a_last_line_that_is_cut_off_is_dropped(pair: Path, warnings: list[str]) -> None:
    path = pair / "run-1" / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert [record.epoch for record in report.read([pair], warnings.append)] == [5, 4]
    assert len(warnings) == 1 and "is cut off; the 4 before it are used" in warnings[0]


def test_values_that_are_not_finite_are_not_averaged_away(pair: Path) -> None:
    path = pair / "run-1" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1]["validation_nll"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = report.sections(report.read([pair]))[0].groups
    assert math.isnan(group.runs[1].last("validation_nll")) and math.isnan(group.final("validation_nll").mean)
    assert tables.results(report.sections(report.read([pair]))[0]).rows[0][3].text == "\u2013"
    assert group.curve("validation_nll", 10).epochs == [1, 2, 3, 4] and group.curve("train_nll", 10).epochs[-1] == 5


def test_of_two_copies_the_longer_is_used(pair: Path, warnings: list[str]) -> None:
    write_run(pair / "again", Config(method="fomoh", seed=1, epochs=5), epochs=3, reason=None)
    records = report.read([pair], warnings.append)
    assert [record.path.name for record in records] == ["run-0", "run-1"] or len(records) == 2
    assert {record.epoch for record in records} == {5}
    assert len(warnings) == 1 and "are the same run; the longer one is used" in warnings[0]
    assert (
        len(report.read([pair / "run-0", pair], warnings.append)) == 2 and len(warnings) == 2
    )  # one folder twice is no copy


# -- thinned ------------------------------------------------------------------------------------------------------


def test_thinned_runs_give_the_same_report(table: Path, tmp_path: Path) -> None:
    records = report.read([table])
    for number, record in enumerate(records):
        (tmp_path / f"{number:02}.json").write_text(json.dumps(report.thin(record), allow_nan=False))
    thinned = report.read([tmp_path])
    assert len(thinned) == 17
    whole, small = (report.markdown(some).split("## Runs that")[0] for some in (records, thinned))
    assert whole == small  # the last table names the files


def test_thinned_runs_are_small_and_keep_their_facts(tmp_path: Path, warnings: list[str]) -> None:
    config = Config(method="fomoh", epochs=2500)
    (record,) = report.read([write_run(tmp_path / "run", config)])
    thin = report.thin(record)
    epochs = thin["metrics"]["epoch"]
    assert epochs[:20] == list(range(1, 21)) and epochs[-1] == 2500 and 250 < len(epochs) <= 321
    assert max(b - a for a, b in itertools.pairwise(epochs)) < 30
    text = json.dumps(thin, allow_nan=False)
    assert len(text) < 80_000 and "/secret" not in text
    path = tmp_path / "thin.json"
    path.write_text(text)
    (again,) = report.read([path], warnings.append)
    assert again.facts.windows["train_nll"] == pytest.approx(record.facts.windows["train_nll"], rel=1e-5)
    assert {k: v[0] for k, v in again.facts.reached.items()} == {k: v[0] for k, v in record.facts.reached.items()}
    assert again.config == config and again.finished and not warnings
    assert thin["metrics"]["train_nll"][5] == float(f"{record.columns['train_nll'][5]:.6g}")


def test_damaged_thinned_files(tmp_path: Path, warnings: list[str]) -> None:
    (record,) = report.read([write_run(tmp_path / "run", Config(method="fomoh", epochs=3))])
    good = report.thin(record)
    (tmp_path / "cut.json").write_text(json.dumps(good)[:100])
    (tmp_path / "uneven.json").write_text(json.dumps(good | {"metrics": {"epoch": [1, 2], "seconds": [1]}}))
    (tmp_path / "less.json").write_text(json.dumps({k: v for k, v in good.items() if k != "facts"}))
    (tmp_path / "other.json").write_text('{"study": 3}')
    assert len(report.read([tmp_path], warnings.append)) == 1
    expected = ["cut.json is damaged", "it has no 'facts'", "are empty or of different lengths"]
    assert len(warnings) == 3 and all(text in line for text, line in zip(expected, warnings, strict=True))
    with pytest.raises(ValueError, match="no run was found"):
        report.read([tmp_path / "other.json"], warnings.append)
    assert "other.json is left out: it is not a thinned run" in warnings[-1]


# -- rows ---------------------------------------------------------------------------------------------------------


def test_runs_are_gathered_into_the_papers_rows(table: Path) -> None:
    first, second = report.sections(report.read([table]))
    assert (first.title, second.title) == ("Logistic regression on MNIST", "CNN on MNIST")
    assert "Validation is the test split of MNIST, as in the paper" in first.validation
    assert [group.label for group in first.groups][:3] == ["FGD", "FoMoH", "FoMoH-2D"]
    assert all(group.paper and len(group.counted) == 2 for group in first.groups)
    assert first.groups[0].remark == "60 of the paper's 2000 epochs" and not first.groups[0].comparable
    assert second.groups[0].remark == "in progress, epoch 7 of 60; 60 of the paper's 3000 epochs"


def test_what_differs_from_a_row_is_not_that_row(tmp_path: Path) -> None:
    config = presets.find("cnn-fgd").config.replace(epochs=4)
    for number, change in enumerate(
        [{}, {"device": "cuda", "seed": 1, "tf32": True}, {"lr": 0.1}, {"dataset": "digits"}, {"hold_out": 5000}]
    ):
        write_run(tmp_path / str(number), config.replace(**change))
    first, held, digits = sorted(
        report.sections(report.read([tmp_path])), key=lambda s: (s.dataset != "mnist", s.hold_out)
    )
    assert [group.label for group in first.groups] == [
        "FGD, lr 0.0001376, tf32 False",
        "FGD, lr 0.0001376, tf32 True",
        "FGD, lr 0.1, tf32 False",
    ]
    assert [group.paper for group in first.groups] == [True, True, False]
    assert not held.papers and not digits.papers
    assert "5,000 samples held out" in held.validation and "the embedded digits" in digits.title


def test_runs_that_diverged_are_counted_apart(tmp_path: Path) -> None:
    config = Config(method="fomoh", epochs=6)
    for seed, reason in enumerate(["finished", "finished", "diverged"]):
        epochs = 6 if reason == "finished" else 2
        write_run(tmp_path / str(seed), config.replace(seed=seed), epochs=epochs, reason=reason)
    write_run(tmp_path / "3", config.replace(seed=3), epochs=4, reason=None)
    records = report.read([tmp_path])
    (group,) = report.sections(records)[0].groups
    assert [run.config.seed for run in group.counted] == [0, 1] and group.complete
    assert group.remark == "1 more in progress; 1 of 4 diverged"
    state = tables.status(records)
    assert state is not None
    assert [row[-1].text for row in state.rows] == ["diverged in epoch 2: invented.", "in progress, epoch 4 of 6"]


def test_differences_are_flagged_beyond_three_stds(tmp_path: Path) -> None:
    preset = presets.find("lr-backprop")
    assert preset.paper is not None
    for seed in preset.seeds:
        nll, accuracy = preset.paper.train_nll[0], preset.paper.validation_accuracy[0]
        write_run(tmp_path / str(seed), preset.config.replace(seed=seed), speed=500, nll=nll, accuracy=accuracy + 0.01)
    (section,) = report.sections(report.read([tmp_path]))
    (row,) = tables.differences(section).rows
    assert section.groups[0].comparable and row[1].text == "5"
    ours = section.groups[0].final("validation_accuracy")
    theirs = intervals.Sample(*preset.paper.validation_accuracy, 5)
    d = intervals.difference(ours, theirs)
    assert row[5].mark == "flag" and "▲" in row[5].text and d.value == pytest.approx(0.01, abs=1e-3)
    assert row[5].text.replace("\u2212", "-").startswith(f"{d.value:+.4f} ▲ [{d.low:+.4f}, {d.high:+.4f}]")
    shown = {
        column.title: cell
        for column, cell in zip(tables.results(section).columns, tables.results(section).rows[-1], strict=True)
    }
    assert shown["approach"].text == "Backpropagation"
    assert len(tables.results(section).rows) == 9 and tables.results(section).rows[0][2].text == "\u2013"


def test_cost_is_relative_to_backprop_on_the_same_device(table: Path, tmp_path: Path) -> None:
    section = report.sections(report.read([table]))[0]
    costs = {row[0].text: [cell.text for cell in row[3:]] for row in tables.cost(section).rows}
    assert costs["FoMoH-3D"] == ["1.5", "3.00", "3", "3.00", "7.00", "2.33"]
    assert costs["Backpropagation"] == ["0.5", "1.00", "1", "1.00", "3.00", "1.00"]
    memory = tables.cost(report.sections(report.read([table / "cnn-fgd"]))[0]).rows[0][5]
    assert memory.text == "\u2013"  # it goes on, on a CPU
    write_run(tmp_path / "a", Config(method="backprop", epochs=3), device="GPU")
    write_run(tmp_path / "b", Config(method="fomoh", epochs=3), device="CPU")
    (lone,) = report.sections(report.read([tmp_path]))
    assert [row[4].text for row in tables.cost(lone).rows] == ["\u2013", "1.00"]


def test_accuracies_are_reached_at_the_first_epoch(table: Path) -> None:
    section = report.sections(report.read([table]))[0]
    epochs, passes, seconds = tables.reach(section)
    assert [column.title for column in epochs.columns[2:]] == ["80%", "85%", "88%", "90%", "91%", "92%"]
    row = next(position for position, cells in enumerate(epochs.rows) if cells[0].text == "FoMoH-3D")
    values = [run.columns["validation_accuracy"] for run in section.find("fomoh-kd", 3).counted]  # type: ignore[union-attr]
    firsts = sorted(1 + next(i for i, v in enumerate(column) if v >= 0.8) for column in values)
    assert epochs.rows[row][2].value == sum(firsts) / 2
    assert passes.rows[row][2].value == pytest.approx(7 * sum(firsts) / 2)
    assert seconds.rows[row][2].value == pytest.approx(1.5 * sum(firsts) / 2)
    assert epochs.rows[0][-1].text == "not reached"


def test_levels_below_tell_slow_rows_apart(tmp_path: Path) -> None:
    for method, accuracy in (("fgd", 0.2), ("fomoh", 0.4), ("backprop", 0.965)):
        write_run(tmp_path / method, Config(method=method, epochs=60), speed=20, accuracy=accuracy)
    (section,) = report.sections(report.read([tmp_path]))
    titles = [column.title for column in tables.reach(section)[0].columns[2:]]
    assert titles == ["30%", "90%", "95%", "96%"]
    assert section.caution == "Rows with one seed have no spread: an order between them can be chance."


# -- claims -------------------------------------------------------------------------------------------------------


def test_claims_are_answered_from_the_curves(table: Path) -> None:
    found = claims.claims(report.sections(report.read([table]))[0])
    assert [claim.answer for claim in found] == ["yes", "yes", "yes", "yes", "yes", "yes"]
    assert "FoMoH-2D" in found[0].numbers and "Batch sizes differ: FoMoH 1024, FoMoH-2D 512" in found[0].numbers
    assert "FoMoH-2D" in found[2].numbers and "FoMoH-3D" in found[2].numbers


def test_claims_can_fail(tmp_path: Path) -> None:
    config = Config(model="cnn", epochs=40, dataset="digits", batch_size=100)
    for name, changes, speed, accuracy in [
        ("fgd", {"method": "fgd"}, 3.0, 0.97),
        ("fomoh", {"method": "fomoh"}, 1.0, 0.95),
        ("2d", {"method": "fomoh-kd", "k": 2}, 0.5, 0.94),
        ("sch", {"method": "fomoh", "schedule": "step"}, 0.2, 0.9),
        ("backprop", {"method": "backprop"}, 1.0, 0.96),
    ]:
        nll = 0.5 if name == "sch" else 0.1
        write_run(tmp_path / name, config.replace(**changes), speed=speed, accuracy=accuracy, nll=nll)
    found = claims.claims(report.sections(report.read([tmp_path]))[0])
    assert [claim.answer for claim in found] == ["no"] * 6


def test_claims_that_these_runs_cannot_answer(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Config(method="fomoh", epochs=4))
    found = claims.claims(report.sections(report.read([tmp_path]))[0])
    assert {claim.answer for claim in found} == {"cannot be answered from these runs"}
    assert [claim.numbers for claim in found] == [
        "Needs FoMoH and FoMoH-KD at a fixed lr; there is FoMoH.",
        "Needs runs of at least 20 epochs.",
        "Needs a method both with a schedule and without.",
        "Needs FGD and at least one FoMoH variant at a fixed lr.",
        "Needs FoMoH-KD and at least one of FGD and FoMoH.",
        "Needs rows of both kinds.",
    ]
    write_run(tmp_path / "b", Config(method="fomoh-kd", k=2, epochs=4), accuracy=0.12)
    slow = claims.claims(report.sections(report.read([tmp_path]))[0])[0]
    assert slow.holds is None and "is reached by all of FoMoH, FoMoH-2D" in slow.numbers
    (backprop,) = report.sections(report.read([write_run(tmp_path / "c", Config(method="backprop", epochs=4))]))
    assert "Needs FoMoH or FoMoH-KD at a fixed lr." in [claim.numbers for claim in claims.claims(backprop)]


def test_a_run_that_diverged_is_shown_by_its_size(tmp_path: Path) -> None:
    config = Config(method="fomoh", epochs=40)
    folder = write_run(tmp_path / "fixed", config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[20:]:
        line["validation_nll"] = 1.5e23
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run(tmp_path / "scheduled", config.replace(schedule="step"))
    found = claims.claims(report.sections(report.read([tmp_path]))[0])
    degrades, helps = found[1], found[2]
    assert degrades.holds and "to 1.5e+23 (diverged, times" in degrades.numbers
    assert helps.holds and "-1.5e+23" in helps.numbers


# -- page and Markdown --------------------------------------------------------------------------------------------


class _Balance(html.parser.HTMLParser):
    """Holds a page to closing what it opens, and notes what it would load."""

    void = frozenset({"meta", "path", "rect", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(table: Path) -> None:
    page = report.page(report.read([table]))
    parsed = _Balance()
    parsed.feed(page)
    assert not parsed.open and len(parsed.ids) == len(set(parsed.ids))
    assert parsed.loads and all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.loads)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and str(table) not in page
    assert page.count("class=panel data-metric") == 24  # two sections, four metrics over steps, passes and seconds
    assert page.index("<p class=lead>") < page.index("<svg") < page.index("<nav")
    assert "Some rows are under way, or have fewer epochs" in page
    assert "figure 3" in page and "Runs that have not reached their end" in page and "/secret" not in page


def test_tables_and_figures_are_exported(table: Path, tmp_path: Path) -> None:
    chapter = report.Chapter(
        "More", "", [], [report.Table("A, b", "", [report.Column("x")], [[report.Cell("1.0", 1)]])]
    )
    paths = report.export(report.read([table]), tmp_path, [chapter])
    assert all(path.is_file() for path in paths) and len({path.name for path in paths}) == len(paths)
    drawn = [path for path in paths if path.suffix == ".svg"]
    assert len(drawn) == 28  # of two sections: four metrics over three axes, the results and the cost
    for path in drawn:
        text = path.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg") and "var(--" not in text and "#0001" not in text
    (results,) = (path for path in paths if path.name == "logistic-regression-mnist-0-results.csv")
    rows = list(csv.DictReader(results.read_text().splitlines()))
    assert rows[0]["approach"] == "FGD" and float(rows[0]["validation NLL: ours"]) == pytest.approx(0.41, abs=0.1)
    assert "±" in rows[0]["validation NLL: ours (as shown)"]


def test_the_result_stands_first_with_its_baseline_and_settings(table: Path) -> None:
    section = report.sections(report.read([table]))[0]
    said = lead.sentence(section)
    assert (
        said.startswith("With forward passes alone FoMoH-3D")
        and " of the validation samples right after 60 epochs" in said
    )
    assert "backprop (SGD, learning rate 0.03561, batches of 2048, no schedule) 92." in said
    assert "forward passes of its batch, and one of backprop as 3.0." in said and section.baseline is not None
    assert any("Backprop is Backpropagation (SGD, learning rate 0.03561" in one.note for one in tables.all_of(section))


def test_the_result_of_backprop_or_forward_passes_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "one", Config(method="adam", epochs=2))
    said = [lead.sentence(section) for section in report.sections(report.read([tmp_path]))]
    write_run(tmp_path / "other", Config(method="fgd", epochs=2, model="logistic-regression"))
    said += [lead.sentence(section) for section in report.sections(report.read([tmp_path / "other"]))]
    assert said[0].startswith("Adam got ") and "there is no run of forward passes alone beside it" in said[0]
    assert "; no run of backprop is here." in said[1] and said[1].endswith(" One seed.")


def test_the_page_of_all_runs_stays_small(tmp_path: Path) -> None:
    config = presets.find("lr-fomoh-2d").config
    for seed in range(2):
        write_run(tmp_path / str(seed), config.replace(seed=seed))
    # each row costs about as much whatever its epochs and seeds: the 89 committed runs make 1.7 MB
    assert len(report.page(report.read([tmp_path]))) < 200_000


def test_text_from_runs_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Config(method="fomoh", epochs=2), device="</script><b>&amp;")
    page = report.page(
        report.read([tmp_path]),
        title="<i>",
        after=[report.Chapter("<u>", "<u>", [], [report.Table("<u>", "<u>", [], [])])],
    )
    assert "<b>" not in page and "<i>" not in page and "<u>" not in page and page.count("</script>") == 2


def test_single_epochs_and_runs_have_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Config(method="fgd", k=3, epochs=1))
    page = report.page(report.read([tmp_path]))
    assert "FGD (K = 3)" in page and page.count("class=line data-row=0>") == 12  # lines, and no bands


def test_markdown_holds_the_same_tables(table: Path) -> None:
    text = report.markdown(report.read([table]))
    assert text.startswith("## Logistic regression on MNIST\n") and text.count("\n## ") == 2
    for title in ("Results", "Ours minus theirs", "Hyper-parameters", "Cost", "Epochs to a validation accuracy"):
        assert f"### {title}\n" in text
    assert "| FoMoH (LR-Sch.) | \u2013 | \u2013 | 0.3192 ± 0.0012 |" in text
    widths = {
        line.count("|") - line.count("\\|") for line in text.split("### Results")[1].split("\n\n")[2].splitlines()
    }
    assert len(widths) == 1


def test_lines_of_one_method_differ(tmp_path: Path) -> None:
    from jetplane_lab.report import charts

    for number, changes in enumerate(
        [{}, {"lr": 0.2}, {"schedule": "step"}, {"method": "fgd"}, {"method": "fgd", "k": 2}]
    ):
        config = Config(**({"method": "fomoh", "epochs": 2} | changes))  # type: ignore[arg-type]
        write_run(tmp_path / str(number), config)
    (section,) = report.sections(report.read([tmp_path]))
    styles = [charts.style_class(group, section.groups) for group in section.groups]
    assert len(set(styles)) == 5


def test_groups_choose_epochs_at_equal_ratios(table: Path) -> None:
    group = report.sections(report.read([table]))[0].groups[0]
    curve = group.curve("train_nll", 10)
    assert curve.epochs[0] == 1 and curve.epochs[-1] == 60 and 8 <= len(curve.epochs) <= 11
    values = [run.columns["train_nll"][0] for run in group.counted]
    assert curve.mean[0] == pytest.approx(sum(values) / 2) and len(curve.std) == len(curve.mean)
    assert group.curve("nothing", 10).epochs == []


def test_labels_of_methods() -> None:
    assert groups.method_label(Config(method="fomoh", schedule="step")) == "FoMoH (LR-Sch.)"
    assert groups.method_label(Config(method="adam")) == "Adam"
    assert report.slug(presets.find("lr-fgd").config.replace(epochs=3)) == "lr-fgd"


# -- commands -----------------------------------------------------------------------------------------------------


def test_report_command(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "new" / "page.html"
    extra = ["--markdown", str(tmp_path / "tables.md"), "--json", str(tmp_path / "json"), "--open"]
    assert cli.main(["report", str(table), "--out", str(out), *extra]) == 0
    assert f"report: {out}" in capsys.readouterr().out and opened == [out.resolve().as_uri()]
    assert out.read_text().startswith("<!doctype html>") and "## CNN" in (tmp_path / "tables.md").read_text()
    names = sorted(path.name for path in (tmp_path / "json").iterdir())
    assert len(names) == 17 and names[0] == "cnn-fgd-seed-0.json" and "lr-fomoh-2d-sch-seed-1.json" in names
    assert cli.main(["report", str(tmp_path / "json"), "--out", str(out)]) == 0


def test_report_command_names_equal_rows_apart(tmp_path: Path) -> None:
    for number, lr in enumerate((0.1, 0.2)):
        write_run(tmp_path / "runs" / str(number), Config(method="fomoh", lr=lr, epochs=2))
    arguments = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html"), "--json", str(tmp_path / "json")]
    assert cli.main(arguments) == 0
    names = [path.name for path in (tmp_path / "json").iterdir()]
    assert len(names) == 2 and all(name.startswith("cnn-fomoh-mnist-seed-0-") for name in names)


def test_a_directory_in_the_place_of_the_page_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", Config(method="fomoh", epochs=2))
    assert cli.main(["report", str(run), "--out", str(tmp_path)]) == 1
    assert f"{tmp_path} is a directory; expected a file to write" in capsys.readouterr().err


def test_report_command_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "no run was found under" in capsys.readouterr().err and not (tmp_path / "r.html").exists()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", str(tmp_path), "--points", "0"])


def test_reproduce_trains_skips_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["reproduce", "logistic-regression", "--quick", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main([*asked, "--rows", "fomoh-2d", "backprop", "--seeds", "0", "1", "--together"]) == 0
    out, err = capsys.readouterr()
    assert f"report: {tmp_path / 'report.html'}" in out and "[2/2] lr-backprop, about" in err
    before = (tmp_path / "lr-backprop" / "seed-1" / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main([*asked, "--rows", "backprop", "--seeds", "0", "1"]) == 0
    assert "2 of 2 seeds already there" in capsys.readouterr().err
    assert (tmp_path / "lr-backprop" / "seed-1" / "metrics.jsonl").stat().st_mtime_ns == before
    (section,) = report.sections(report.read([tmp_path]))
    assert [group.label for group in section.groups] == ["FoMoH-2D", "Backpropagation"]
    assert all(len(group.counted) == 2 and not group.paper for group in section.groups)
    assert section.groups[0].config.batch_size == 250
    read = [run.columns["together"][-1] for run in section.groups[0].runs]
    assert read == [2, 2] and tables.cost(section).rows[0][1].text == "cpu, 2 together"


def test_reproduce_goes_on_past_a_row_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["reproduce", "logistic-regression", "--quick", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)]
    other = Config(model="logistic-regression", method="fgd", epochs=9)
    write_run(tmp_path / "lr-fgd" / "seed-0", other)
    assert cli.main([*asked, "--rows", "fgd", "backprop"]) == 1
    out, err = capsys.readouterr()
    assert "lr-fgd failed:" in err and "holds a run with" in err
    assert "report:" in out and (tmp_path / "lr-backprop" / "seed-0" / "summary.json").exists()
    assert cli.main(["--debug", *asked, "--rows", "backprop"]) == 0
    with pytest.raises(ValueError, match="holds a run with"):
        cli.main(["--debug", *asked, "--rows", "fgd"])


def test_reproduce_reports_a_run_that_diverges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = presets.find("lr-backprop")
    wild = {
        **PRESETS,
        "lr-backprop": presets.Preset("lr-backprop", "B", preset.config.replace(lr=1e30, divergence=10.0), None, True),
    }
    monkeypatch.setattr(presets, "PRESETS", wild)
    asked = ["reproduce", "logistic-regression", "--quick", "--epochs", "5", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main([*asked, "--rows", "backprop", "--seeds", "0"]) == 1
    assert "jetplane reproduce: lr-backprop diverged in epoch" in capsys.readouterr().err
    (record,) = report.read([tmp_path])
    assert record.diverged
    (row,) = tables.results(report.sections([record])[0]).rows
    assert re.fullmatch(r"\d(\.\d+)?e\+\d+", row[2].text)  # not thirty digits


def test_reproduce_with_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "cnn", "--rows", "fomoh2d", "--out", str(tmp_path / "none")]) == 2
    assert "row is 'fomoh2d'; did you mean fomoh-2d?" in capsys.readouterr().err and not (tmp_path / "none").exists()
    with pytest.raises(SystemExit, match="2"):
        cli.main(["reproduce", "mnist"])


def test_reproduce_stops_at_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetplane_lab.training import Trainer

    fit = Trainer.fit

    def interrupted(self: Trainer) -> Summary:
        steps = self.epochs()
        next(steps)
        self.stop.by = "SIGINT"
        list(steps)
        assert self.summary is not None
        return self.summary

    monkeypatch.setattr(Trainer, "fit", interrupted)
    asked = [
        "reproduce",
        "logistic-regression",
        "--quick",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--rows",
        "backprop",
    ]
    assert cli.main([*asked, "fomoh"]) == 130
    out, err = capsys.readouterr()
    assert "The same command goes on from here." in err and "lr-fomoh" not in err and "report:" in out
    monkeypatch.setattr(Trainer, "fit", fit)
    assert cli.main(asked) == 0
    assert report.read([tmp_path])[0].epoch == 3


def test_reproduce_runs_the_rosenbrock_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, bool]] = []

    def study(arguments: object) -> int:
        asked.append((arguments.out, arguments.quick))  # type: ignore[attr-defined]
        raise RuntimeError("no space left")

    monkeypatch.setattr("jetplane_lab.commands.rosenbrock.run", study)  # its own tests run it
    assert cli.main(["reproduce", "rosenbrock", "--quick", "--out", str(tmp_path)]) == 1
    assert asked == [(tmp_path / "rosenbrock", True)] and "rosenbrock failed: no space left" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no space left"):
        cli.main(["--debug", "reproduce", "rosenbrock", "--out", str(tmp_path)])


# -- demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # over an earlier one
        assert cli.main(["demo", "--out", str(tmp_path), "--epochs", "1"]) == 0
        out = capsys.readouterr().out
        assert "MLP (LayerNorm, GELU)" in out and f"report: {tmp_path / 'report.html'}" in out
        for label in ("HorizonAdam (J = 4)", "FGD", "FoMoH ", "FoMoH-2D", "FoMoH-3D", "Backpropagation", "Newton"):
            assert f"\n{label}" in out
        assert max(map(len, out.replace(str(tmp_path), "runs/demo").splitlines())) <= 80
        assert re.search(r"after training with forward passes alone: \d\d\.\d%;\n  with backprop: \d\d\.\d%", out)
    records = report.read([tmp_path])
    assert len(records) == 6 and all(record.epoch == 1 for record in records)
    page = (tmp_path / "report.html").read_text()
    assert "The Rosenbrock function in 2D" in page and "Exact curvature" in page and len(page) < 3_000_000
    assert page.count("<svg viewBox") == 2 + 12 + 2 + 2 + 6  # results, curves, curvature, Rosenbrock, keys of lines


def test_what_the_demo_says_at_its_end() -> None:
    text = demo.what_to_look_at([("HorizonAdam", 0.94), ("FGD", 0.1), ("backprop", 0.91)], Path("runs/demo"))
    assert "forward passes alone: 94.0%;" in text and "with backprop: 91.0%." in text
    assert "runs/demo/report.html" in text and max(map(len, text.splitlines())) <= 80
    parser = cli.parser(entries.registered())
    for command in re.findall(r"- jetplane ([\w -]+?)  ", text):
        assert parser.parse_args(command.split())
    for page in re.findall(r"docs/[\w.-]+", text):
        assert (Path(__file__).parents[3] / page).exists()


def test_demo_with_bad_arguments() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--epochs", "x"])


def test_facts_of_a_first_epoch(tmp_path: Path) -> None:
    (record,) = report.read([write_run(tmp_path / "run", Config(method="fomoh", epochs=1))])
    assert record.facts.seconds_per_epoch == pytest.approx(0.5) and len(record.facts.windows["train_nll"]) == 1
    assert tuple(sorted(runs.LEVELS)) == runs.LEVELS


# -- folders from others ------------------------------------------------------------------------------------------

HOSTILE = '\'><script>alert(1)</script><img src=x onerror="alert(2)"> \ud800 | {0} `'


class _Tags(html.parser.HTMLParser):
    """All tags and the attributes that a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def _spoiled(value: object) -> object:
    """A JSON value with every text in it hostile, names apart."""
    if isinstance(value, dict):
        return {name: _spoiled(item) for name, item in value.items()}
    return HOSTILE if isinstance(value, str) else value


def test_a_hostile_folder_cannot_write_into_the_page(tmp_path: Path, warnings: list[str]) -> None:
    run = write_run(tmp_path / "runs" / "<b onclick=x>", Config(method="fomoh", epochs=3), reason="diverged")
    usual = _Tags()
    usual.feed(report.page(report.read([run])))
    config = json.loads((run / "config.json").read_text()) | {"dataset": HOSTILE}
    (run / "config.json").write_text(json.dumps(config))
    for name in ("environment.json", "summary.json"):
        held = json.loads((run / name).read_text())
        reason = {"reason": held["reason"]} if name == "summary.json" else {}
        (run / name).write_text(json.dumps({**_spoiled(held), "commit": HOSTILE, **reason}))  # type: ignore[dict-item]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**line, HOSTILE: HOSTILE}) + "\n" for line in lines))
    out = tmp_path / "out" / "page.html"
    arguments = ["report", str(run), "--out", str(out), "--json", str(out.parent / "thin")]
    assert cli.main([*arguments, "--markdown", str(out.parent / "page.md")]) == 0
    found = _Tags()
    found.feed(out.read_text(encoding="utf-8"))
    assert found.tags == usual.tags and not found.handlers
    assert "&lt;script&gt;alert(1)" in out.read_text(encoding="utf-8")
    assert "<script" not in (out.parent / "page.md").read_text(encoding="utf-8")
    (thinned,) = (out.parent / "thin").iterdir()
    assert re.fullmatch(r"[A-Za-z0-9-]+\.json", thinned.name)
    again = report.page(report.read([out.parent / "thin"], warnings.append))
    assert not warnings and again.replace(thinned.name, run.name).count("<script") == 2


def test_a_data_set_with_a_path_for_a_name_stays_in_the_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Config(method="fomoh", epochs=2, dataset="/../../../elsewhere"))
    out = tmp_path / "a" / "b" / "c"
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html"), "--json", str(out)]) == 0
    assert len(list(out.iterdir())) == 1 and not list(tmp_path.glob("**/elsewhere*"))


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("metrics.jsonl", '{"epoch":' + "[" * 100_000 + "\n", "nested too deeply"),
        ("metrics.jsonl", '{"epoch":0}\n', "line 1 of metrics.jsonl is not the metrics of an epoch"),
        ("metrics.jsonl", '{"epoch":true}\n', "line 1 of metrics.jsonl is not the metrics of an epoch"),
        ("config.json", None, "Is a directory"),
        ("metrics.jsonl", None, "Is a directory"),
    ],
)
def test_a_run_that_cannot_be_read_does_not_take_the_others_with_it(
    pair: Path, warnings: list[str], name: str, contents: str | None, message: str
) -> None:
    path = pair / "run-1" / name
    path.unlink()
    if contents is None:
        path.mkdir()
    else:
        path.write_text(contents)
    assert [record.config.seed for record in report.read([pair], warnings.append)] == [0]
    assert len(warnings) == 1 and message in warnings[0] and str(pair / "run-1") in warnings[0]


@pytest.mark.parametrize("name", ["environment.json", "summary.json"])
def test_a_side_file_that_is_nested_too_deeply_is_named(pair: Path, warnings: list[str], name: str) -> None:
    (pair / "run-1" / name).write_text("[" * 100_000)
    assert len(report.read([pair], warnings.append)) == 2
    assert len(warnings) == 1 and f"{name} is left out: its JSON is nested too deeply." in warnings[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("environment", ["x"], "its environment is a list; expected an object."),
        ("summary", 3, "its summary is a int; expected an object."),
        ("summary", {}, "its summary says no reason."),
        ("metrics", {"epoch": [0], "train_nll": [1.0]}, "its epochs are not whole numbers from 1."),
    ],
)
def test_a_thinned_run_of_wrong_types_is_named(
    pair: Path, warnings: list[str], field: str, value: object, message: str
) -> None:
    held = report.thin(report.read([pair / "run-1"])[0])
    (pair / "thin.json").write_text(json.dumps({**held, field: value}))
    report.read([pair / "run-0", pair / "thin.json"], warnings.append)
    assert warnings == [f"{pair / 'thin.json'} is left out: {message}"]


def test_numbers_that_no_float_holds_are_missing(pair: Path) -> None:
    path = pair / "run-1" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["slope"] = 10**400
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert math.isnan(report.read([pair / "run-1"])[0].last("slope"))


def test_the_claim_about_backprop_counts_every_forward_only_row(tmp_path: Path) -> None:
    config = Config(model="cnn", epochs=40, dataset="digits", batch_size=100)
    for name, changes, accuracy in [
        ("fgd", {"method": "fgd"}, 0.90),
        ("horizon", {"method": "horizon"}, 0.97),
        ("backprop", {"method": "backprop"}, 0.96),
    ]:
        write_run(tmp_path / name, config.replace(**changes), accuracy=accuracy)
    last = claims.claims(report.sections(report.read([tmp_path]))[0])[-1]
    assert last.answer == "no" and "the best forward-only HorizonAdam" in last.numbers
