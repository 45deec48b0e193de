"use strict";
// Densities one above the other on the same logarithmic axis: on top of each other they could not be distinguished.

// spec: {label, rows: [{name, style, points: [{x, y, lines}]}], x: {title}, decades}
function drawRidges(host, spec) {
  const width = Math.max(240, Math.floor(host.clientWidth)), narrow = width < 560, tall = narrow ? 58 : 66;
  const height = 30 + tall * Math.max(1, spec.rows.length) + 46;
  const svg = blank(host, width, height, `${spec.label}. ${spec.rows.length} rows; arrow keys read the points.`);
  const inner = { x0: narrow ? 46 : 58, x1: width - 16, y0: height - 46, y1: 30 };
  const all = spec.rows.flatMap((row) => row.points);
  const highest = Math.max(...all.map((p) => p.y), 1e-300), lowest = highest / 10 ** spec.decades;
  const kept = all.filter((p) => p.y > lowest);
  const xs = scale(extent(kept.map((p) => p.x), false, 0.02), [inner.x0, inner.x1], false, narrow ? 4 : 8);
  const readable = [];
  spec.rows.forEach((row, k) => {
    const foot = inner.y1 + tall * (k + 1), ys = scale([lowest, highest], [foot, foot - tall * 0.86], true, 3);
    const g = groupOf(row, "series", svg);
    element("svg:line", { x1: inner.x0, x2: inner.x1, y1: foot, y2: foot, class: "grid" }, g);
    const inside = row.points.filter((p) => p.x >= xs.domain[0] && p.x <= xs.domain[1]);
    const at = inside.map((p) => ({ ...p, px: xs.to(p.x), py: ys.to(Math.max(p.y, lowest)) }));
    if (at.length) {
      const path = at.map((p) => `${p.px.toFixed(1)},${p.py.toFixed(1)}`).join("L");
      element("svg:path", { d: `M${at[0].px},${foot}L${path}L${at.at(-1).px},${foot}Z`, class: "band" }, g);
      element("svg:path", { d: `M${path}`, class: "line" }, g);
    }
    const place = { x: inner.x1, y: foot - tall * 0.62, "text-anchor": "end" };
    element("svg:text", place, groupOf(row, "name", svg), cut(row.name, narrow ? 22 : 40));
    if (k === 0) drawRowAxis(svg, ys, inner);
    readable.push({ name: row.name, points: at.filter((p) => p.y > lowest) });
  });
  drawAxes(svg, xs, { ticks: [] }, inner, { x: spec.x, y: { title: "" } });
  addReadout(host, svg, false, readable.filter((r) => r.points.length), inner);
}

// Only the first row has a vertical axis; the others have the same one.
function drawRowAxis(svg, ys, inner) {
  const axes = element("svg:g", { class: "axes", "aria-hidden": "true" }, svg);
  const [low, high] = ys.domain, ends = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  for (const power of ends) {
    const y = ys.to(10 ** power);
    element("svg:line", { x1: inner.x0 - 4, x2: inner.x0, y1: y, y2: y, class: "axis" }, axes);
    const text = power === 0 ? "1" : `10${raised(power)}`;
    element("svg:text", { x: inner.x0 - 8, y: y + 4, "text-anchor": "end" }, axes, text);
  }
  const [y1, y2] = ends.map((power) => ys.to(10 ** power));
  element("svg:line", { x1: inner.x0, x2: inner.x0, y1, y2, class: "axis" }, axes);
  element("svg:text", { x: inner.x0, y: 14, class: "title" }, axes, "density");
}
