"""Style and script of the page. The script adds sorting, read-outs and a legend that hides lines; without it the page
is complete."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

# Colours of lines are those of Okabe and Ito, which colour-blind readers can tell apart, lightened for dark paper.
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #ffffff; --rule: #d1d9e0; --tint: #f4f6f8;
  --yes: #00704f; --no: #a33c00; --c0: #c98500; --c1: #0072b2; --c2: #009e73; --c3: #d55e00; --c4: #b8578c;
  --c5: #3a3f45; --c6: #8a929a; --c7: #3aa0e0; --c8: #7a5bb5; --c9: #7a5c00; --c10: #0b6e6e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a0a8b0; --paper: #16181d; --rule: #3a4048;
  --tint: #1f2329; --yes: #3fd0a4; --no: #ffa166; --c0: #f0b429; --c1: #4aa8e8; --c2: #1bc79a; --c3: #ff7f3f;
  --c4: #e39ac3; --c5: #e6e6e6; --c6: #9aa2aa; --c7: #8fd0ff; --c8: #b9a3e6; --c9: #e0c050; --c10: #62d4cc; } }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0 auto;
  max-width: 78rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .4rem; padding-top: .8rem; border-top: 2px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
p { max-width: 48rem; margin: .5rem 0; } .soft { color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: .8rem 0; padding: 0; }
a { color: var(--c1); }
.wide { overflow-x: auto; margin: .6rem 0; } table { border-collapse: collapse; font-size: .9rem; }
small { font-size: .82em; color: var(--soft); } .flag small { color: inherit; }
@media (max-width: 78rem) { td small { display: block; } }
th, td { border-bottom: 1px solid var(--rule); padding: .28rem .5rem; text-align: left; vertical-align: top; }
thead th { background: var(--tint); vertical-align: bottom; font-weight: 600; }
thead th[colspan] { text-align: center; border-left: 1px solid var(--rule); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody td:first-child { white-space: nowrap; font-weight: 600; } tbody tr:hover { background: var(--tint); }
.claims td:first-child { white-space: normal; font-weight: 400; min-width: 15rem; }
.claims td:last-child { min-width: 18rem; }
td.soft { color: var(--soft); } td.flag { color: var(--no); font-weight: 600; }
.yes { color: var(--yes); font-weight: 600; } .no { color: var(--no); font-weight: 600; }
th button { all: unset; cursor: pointer; font: inherit; } th button:hover { text-decoration: underline; }
th button:focus-visible, .key:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " \\25BC"; font-size: .7em; }
figure { margin: 1rem 0; position: relative; } figcaption { color: var(--soft); font-size: .9rem; max-width: 48rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: .4rem 1rem; }
.panel { width: 100%; height: auto; touch-action: pan-y; }
.lead { font-size: 1.12rem; max-width: 56rem; margin: .6rem 0; }
.choice { color: var(--soft); font-size: .9rem; }
.choice label { margin-left: .6rem; color: var(--ink); cursor: pointer; }
.curves:has(input[value=steps]:checked) .panels:not(.by-steps),
.curves:has(input[value=passes]:checked) .panels:not(.by-passes),
.curves:has(input[value=seconds]:checked) .panels:not(.by-seconds) { display: none; }
.save { all: unset; cursor: pointer; color: var(--soft); font-size: .8rem; text-decoration: underline; }
.save:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
.cursor { stroke: var(--soft); stroke-dasharray: 2 2; }
.mean { fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.off { display: none; }
.d1 .mean { stroke-dasharray: 6 3; stroke-linecap: butt; } .d2 .mean { stroke-dasharray: 2 2.5; stroke-linecap: butt; }
.d3 .mean { stroke-dasharray: 9 3 2 3; stroke-linecap: butt; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.c8 { color: var(--c8); } .c9 { color: var(--c9); } .c10 { color: var(--c10); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem .9rem; list-style: none; margin: .4rem 0; padding: 0; }
.key { background: none; border: 0; padding: .1rem .2rem; font: inherit; font-size: .88rem; cursor: pointer;
  display: inline-flex; align-items: center; gap: .4rem; }
.key svg { width: 28px; height: 10px; } .key[aria-pressed=false] { opacity: .4; text-decoration: line-through; }
.readout { position: absolute; z-index: 2; background: var(--paper); border: 1px solid var(--rule); border-radius: 4px;
  box-shadow: 0 2px 8px #0003; padding: .3rem .5rem; font-size: .8rem; line-height: 1.4; pointer-events: none;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
@media (max-width: 45rem) {
  .claims thead { display: none; } .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims tr { display: block; border-bottom: 1px solid var(--rule); padding: .4rem 0; }
  .sort thead { display: none; } .sort, .sort tbody, .sort tr { display: block; }
  .sort tr { border-bottom: 2px solid var(--rule); padding: .4rem 0; }
  .sort td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; text-align: right; }
  .sort td.n { white-space: normal; } .sort td small { display: inline; margin-left: .3rem; }
  .sort td::before { content: attr(data-label); color: var(--soft); font-weight: 400; text-align: left; }
  .sort td:first-child { text-align: left; white-space: normal; } .sort td:first-child::before { content: none; }
}
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --rule: #bbb; --tint: #f2f2f2; --yes: #00593f;
    --no: #8a3300; --c0: #b87700; --c1: #0072b2; --c2: #008560; --c3: #c45600; --c4: #a84a80; --c5: #222; --c6: #777; }
  html { font-size: 9pt; } body { max-width: none; padding: 0; font-size: 9.5pt; } h2, h3 { break-after: avoid; }
  .readout, nav, .save, .choice { display: none; }
  tr, .panel, .legend { break-inside: avoid; } .wide { overflow: visible; } table { font-size: 7.5pt; }
  th, td { padding: .15rem .3rem; } td.n, th.n { white-space: normal; } .panels { grid-template-columns: 1fr 1fr; }
}
@page { margin: 14mm; }
"""

SCRIPT = """
'use strict';
for (const table of document.querySelectorAll('table.sort')) {
  const heads = [...table.querySelectorAll('th[data-column]')], body = table.tBodies[0];
  for (const head of heads) {
    const button = document.createElement('button');
    button.type = 'button'; button.append(...head.childNodes); head.append(button);
    button.addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') !== 'ascending', column = +head.dataset.column;
      const key = row => { const cell = row.cells[column];
        return 'v' in cell.dataset ? (cell.dataset.v === '' ? null : +cell.dataset.v) : cell.textContent; };
      const order = (a, b) => {
        if (a === null || b === null) return (a === null) - (b === null);  // nothing to sort by stays last
        const less = typeof a === 'number' ? a - b : a.localeCompare(b);
        return up ? less : -less; };
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
    });
  }
}
const curves = JSON.parse(document.getElementById('curves').textContent);
for (const figure of document.querySelectorAll('figure.curves')) {
  const hidden = new Set(), data = curves[figure.dataset.curves];
  const shown = [...figure.querySelectorAll('.key')].map(key => +key.dataset.row);
  for (const key of figure.querySelectorAll('.key')) key.addEventListener('click', () => {
    const row = +key.dataset.row, off = !hidden.has(row);
    off ? hidden.add(row) : hidden.delete(row);
    key.setAttribute('aria-pressed', String(!off));
    figure.querySelectorAll(`.panel .line[data-row="${row}"]`).forEach(line => line.classList.toggle('off', off));
  });
  const box = document.createElement('div');
  box.className = 'readout'; box.hidden = true; figure.append(box);
  for (const panel of figure.querySelectorAll('svg.panel')) {
    const d = panel.dataset, first = +d.first, last = +d.last, left = +d.left, inner = +d.inner;
    const log = d.scale === 'log';
    const cursor = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    cursor.setAttribute('class', 'cursor'); panel.append(cursor);
    const leave = () => { box.hidden = true; cursor.removeAttribute('d'); };
    panel.addEventListener('pointerleave', leave);
    panel.addEventListener('pointermove', event => {
      const rect = panel.getBoundingClientRect(), scale = panel.viewBox.baseVal.width / rect.width;
      const share = ((event.clientX - rect.left) * scale - left) / inner;
      if (share < 0 || share > 1) return leave();
      const at = log ? first * (last / first) ** share : first + share * (last - first);
      const lines = [];
      for (const row of shown) {
        const one = data.rows[row].curves[d.metric], e = one && (one.at || data.rows[row].curves.at)[d.axis];
        if (hidden.has(row) || !e || !e.length || at > e[e.length - 1] * 1.02 + 1) continue;
        let i = 0;
        while (i + 1 < e.length && Math.abs(e[i + 1] - at) <= Math.abs(e[i] - at)) i++;
        lines.push([one.m[i], data.rows[row].label, one.s && one.s[i], data.rows[row].style]);
      }
      if (!lines.length) return leave();
      lines.sort((a, b) => b[0] - a[0]);
      box.replaceChildren(...[`${d.axis}: ${at < 10 ? at.toPrecision(2) : Math.round(at)}`].concat(lines).map(line => {
        const div = document.createElement('div');
        if (typeof line === 'string') { div.textContent = line; div.style.fontWeight = 600; return div; }
        div.className = line[3];
        const spread = line[2] == null ? '' : ' \\u00b1 ' + line[2].toPrecision(2);
        div.textContent = `${line[0].toPrecision(4)}${spread}  ${line[1]}`;
        return div;
      }));
      cursor.setAttribute('d', `M${left + share * inner} 26V264`);
      box.hidden = false;
      const frame = figure.getBoundingClientRect(), x = event.clientX - frame.left, wide = box.offsetWidth;
      box.style.left = Math.max(0, x + 14 + wide > frame.width ? x - wide - 14 : x + 14) + 'px';
      box.style.top = (event.clientY - frame.top + 12) + 'px';
    });
  }
}
function save(after, name, type, made) {
  const button = document.createElement('button');
  Object.assign(button, {type: 'button', className: 'save'});
  button.textContent = `save as ${name.split('.').pop().toUpperCase()}`;
  button.addEventListener('click', () => {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([made()], {type})); link.download = name; link.click();
    URL.revokeObjectURL(link.href);
  });
  after.append(button);
}
const cleaned = text => text.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '');
document.querySelectorAll('.wide').forEach((box, number) => {
  const table = box.querySelector('table'), name = `table-${number + 1}.csv`;
  const quoted = cell => `"${cell.replaceAll('"', '""').trim()}"`;
  save(box, name, 'text/csv', () => {
    const heads = [...table.querySelectorAll('th:not([colspan])')];
    const named = [...(table.tBodies[0].rows[0] || {cells: []}).cells];
    const first = named.length && named.every(cell => cell.dataset.label)
      ? named.map(cell => cell.dataset.label) : heads.map(head => head.textContent);
    return [first, ...[...table.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))]
      .map(row => row.map(quoted).join(',')).join('\\r\\n') + '\\r\\n'; });
});
document.querySelectorAll('svg.panel').forEach((panel, number) => {
  const box = document.createElement('div');
  panel.replaceWith(box); box.append(panel);
  save(box, `figure-${number + 1}.svg`, 'image/svg+xml', () => {
    const style = getComputedStyle(document.documentElement), copy = panel.cloneNode(true);
    copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
    copy.style.background = style.getPropertyValue('--paper');
    return new XMLSerializer().serializeToString(copy)
      .replace(/var\\((--[\\w]+)\\)/g, (_, name) => style.getPropertyValue(name).trim()); });
});
"""
