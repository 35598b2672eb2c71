"""The report in a real browser: it renders in light, dark and narrow, sorts, hides lines, reads out, and prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy
import pytest

from jetplane_lab import presets, report
from synthetic_runs import write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("CHROME") or next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium, or name one in CHROME")

# What a reader does, and what the page then shows, written where --dump-dom finds it.
SCRIPT = """
const seen = {errors: []};
window.addEventListener('error', event => seen.errors.push(event.message));
try {
  const table = document.querySelector('table.sort'), head = table.querySelectorAll('th[data-column]')[0];
  const column = table.querySelector('th[data-column="3"]');
  const first = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const values = () => [...table.tBodies[0].rows].map(row => row.cells[3].dataset.v);
  column.querySelector('button').click();
  seen.up = [column.getAttribute('aria-sort'), values()];
  column.querySelector('button').click();
  seen.down = [column.getAttribute('aria-sort'), values()];
  head.querySelector('button').click();
  seen.names = [head.getAttribute('aria-sort'), column.getAttribute('aria-sort'), first()];
  const figure = document.querySelector('figure.curves'), key = figure.querySelector('.key');
  const lines = () => [...figure.querySelectorAll(`.line[data-row="${key.dataset.row}"]`)];
  seen.before = lines().map(line => getComputedStyle(line).display);
  key.click();
  seen.hidden = [key.getAttribute('aria-pressed'), lines().map(line => getComputedStyle(line).display)];
  const panel = figure.querySelector('svg.panel'), box = panel.getBoundingClientRect();
  const at = {clientX: box.left + box.width * 0.6, clientY: box.top + box.height / 2, bubbles: true};
  panel.dispatchEvent(new PointerEvent('pointermove', at));
  const readout = figure.querySelector('.readout');
  seen.readout = [readout.hidden, [...readout.children].map(line => line.textContent)];
  panel.dispatchEvent(new PointerEvent('pointerleave', at));
  seen.left = readout.hidden;
  key.click();
  seen.shown = lines().map(line => getComputedStyle(line).display);
  const axes = () => [...figure.querySelectorAll('.panels')].map(one => getComputedStyle(one).display !== 'none');
  seen.axes = [axes()];
  figure.querySelector('input[value=passes]').click();
  seen.axes.push(axes());
  const ends = [...document.querySelectorAll('.wide tr')].map(row => row.cells[row.cells.length - 1]);
  seen.right = Math.max(...ends.map(cell => cell.getBoundingClientRect().right));
  let saved = null;
  URL.createObjectURL = blob => { saved = blob; return '#'; };
  HTMLAnchorElement.prototype.click = () => {};
  const files = [];
  const keep = button => { button.click(); files.push(saved); };
  keep(document.querySelector('.wide .save'));
  keep(document.querySelector('figure .save'));
  seen.saved = files.map(blob => blob.type);
  seen.wide = [document.documentElement.scrollWidth, innerWidth];
  seen.paper = getComputedStyle(document.body).backgroundColor;
} catch (error) { seen.errors.push(String(error)); }
const result = document.createElement('pre');
result.id = 'seen'; result.textContent = JSON.stringify(seen);
document.body.replaceChildren(result);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three rows with two seeds each."""
    root = tmp_path_factory.mktemp("browser")
    for name, speed in (("lr-fgd", 0.5), ("lr-fomoh-2d", 2.0), ("lr-backprop", 6.0)):
        for seed in (0, 1):
            write_run(root / name / str(seed), presets.find(name).config.replace(seed=seed, epochs=60), speed=speed)
    path = root / "report.html"
    path.write_text(report.page(report.read([root])), encoding="utf-8")
    return path


def browse(page: Path, folder: Path, *options: str) -> str:
    """What the browser prints; its profile is new and goes with the test's folder."""
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", *options, page.as_uri()]
    environment = {**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen(page: Path, folder: Path, *options: str) -> dict[str, object]:
    """What the script saw on a copy of the page that runs it at the end."""
    copy = folder / "scripted.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{SCRIPT}</script></body>"))
    found = re.search(r'<pre id="seen">(.*?)</pre>', browse(copy, folder, "--dump-dom", *options), re.DOTALL)
    assert found is not None
    result: dict[str, object] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert result["errors"] == []
    return result


def pixels(path: Path) -> tuple[tuple[int, ...], Counter[int]]:
    """Height and width of a picture, and how often each colour 0xRRGGBB occurs."""
    image = numpy.rint(255 * matplotlib.image.imread(path)[:, :, :3]).astype(int)
    colours, counts = numpy.unique(image @ [0x10000, 0x100, 1], return_counts=True)
    return image.shape[:2], Counter(dict(zip(colours.tolist(), counts.tolist(), strict=True)))


def test_tables_sort_and_lines_hide(page: Path, tmp_path: Path) -> None:
    result = seen(page, tmp_path, "--window-size=1200,900")
    direction, values = result["up"]  # type: ignore[misc]
    numbers = [float(value) for value in values if value]
    assert direction == "ascending" and len(numbers) == 9 and numbers == sorted(numbers)
    direction, values = result["down"]  # type: ignore[misc]
    assert direction == "descending" and [float(value) for value in values if value] == numbers[::-1]
    assert result["names"][:2] == ["ascending", None]  # type: ignore[index]
    assert result["names"][2] == sorted(result["names"][2], key=str.lower)  # type: ignore[index]
    assert set(result["before"]) == set(result["shown"]) == {"inline"}  # type: ignore[call-overload]
    assert result["hidden"][0] == "false" and set(result["hidden"][1]) == {"none"}  # type: ignore[index]
    hidden, lines = result["readout"]  # type: ignore[misc]
    assert not hidden and lines[0].startswith("steps: ") and len(lines) == 3 and "FoMoH-2D" in lines[1]
    assert re.match(r"[\d.]+ ± ", lines[1]) and result["left"] is True


def test_curves_have_one_axis_at_a_time_and_tables_and_figures_are_saved(page: Path, tmp_path: Path) -> None:
    result = seen(page, tmp_path, "--window-size=1200,900")
    assert result["axes"] == [[True, False, False], [False, True, False]]
    assert result["saved"] == ["text/csv", "image/svg+xml"]


@pytest.mark.parametrize("width", [1200, 500])
def test_neither_the_page_nor_a_table_is_wider_than_the_window(page: Path, tmp_path: Path, width: int) -> None:
    result = seen(page, tmp_path, f"--window-size={width},900")
    needs, has = result["wide"]  # type: ignore[misc]
    assert needs <= has == width and result["right"] <= width  # type: ignore[operator]


LIGHT = (0xFFFFFF, 0x009E73, 0xC98500)  # paper, FoMoH-2D, FGD
DARK = (0x16181D, 0x1BC79A, 0xF0B429)


@pytest.mark.parametrize(("scheme", "expected"), [(1, LIGHT), (0, DARK)], ids=["light", "dark"])
def test_screenshots_show_the_page(page: Path, tmp_path: Path, scheme: int, expected: tuple[int, ...]) -> None:
    shot = tmp_path / "shot.png"
    options = ("--window-size=1000,3200", f"--blink-settings=preferredColorScheme={scheme}")
    browse(page, tmp_path, f"--screenshot={shot}", *options)
    shape, colours = pixels(shot)
    paper, *lines = expected
    assert shape == (3200, 1000) and colours.most_common(1)[0][0] == paper
    assert len(colours) > 100 and all(colours[line] > 50 for line in lines)


def test_the_page_prints(page: Path, tmp_path: Path) -> None:
    browse(page, tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    data = (tmp_path / "page.pdf").read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert data.startswith(b"%PDF") and 3 <= pages <= 12
