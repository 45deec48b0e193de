"use strict";
// One chart: axes, lines with bands, points with error bars, labels at the curves, a readout for pointer and keyboard.

const SVG = "http://www.w3.org/2000/svg";
let charts = 0;

function element(name, attributes, parent, text) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function shown(value, figures = 3) {
  if (value === null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
    const power = Math.floor(Math.log10(size) + 1e-9);
    const digits = String(Number((value / 10 ** power).toPrecision(figures)));
    text = (digits === "1" ? "" : `${digits}·`) + `10${raised(power)}`;
  } else if (size >= 1e4) {
    text = `${Number((value / 1000).toPrecision(Math.max(figures, 3)))}k`;
  } else {
    text = String(Number(value.toPrecision(Math.max(figures, Math.floor(Math.log10(size || 1)) + 1))));
  }
  return text.replace("-", "−");
}

function raised(power) {
  return String(power).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
}

function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / Math.max(1, count), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= high / step + 1e-9; k++) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const factors = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / Math.max(2, count)));
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
    if (p % every) continue;
    for (const f of factors) {
      const value = f * 10 ** p;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length >= 2 ? found : ticks(low, high, count).filter((v) => v > 0);
}

function scale(domain, range, log, count, whole = false) {
  const warp = log ? Math.log : (v) => v;
  const [a, b] = domain.map(warp);
  const to = (v) => range[0] + ((warp(v) - a) / (b - a || 1)) * (range[1] - range[0]);
  return { to, domain, range, log, ticks: (log ? logTicks : ticks)(domain[0], domain[1], count, whole) };
}

// The range of the values with a margin; on a log axis only positive values count.
function extent(values, log, air = 0.06) {
  const good = values.filter((v) => v !== null && v !== undefined && isFinite(v) && (!log || v > 0));
  if (!good.length) return log ? [0.1, 1] : [0, 1];
  let low = Math.min(...good), high = Math.max(...good);
  if (log) {
    const factor = high > low ? (high / low) ** air : 1.2;
    return [low / factor, high * factor];
  }
  const margin = high > low ? (high - low) * air : Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

const SHAPES = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  square: (r) => `M${-r * 0.9},${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}Z`,
  triangle: (r) => `M0,${-r * 1.15}L${r * 1.1},${r * 0.8}L${-r * 1.1},${r * 0.8}Z`,
  diamond: (r) => `M0,${-r * 1.3}L${r * 1.1},0L0,${r * 1.3}L${-r * 1.1},0Z`,
  cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
  down: (r) => `M0,${r * 1.15}L${r * 1.1},${-r * 0.8}L${-r * 1.1},${-r * 0.8}Z`,
  plus: (r) => `M0,${-r * 1.2}V${r * 1.2}M${-r * 1.2},0H${r * 1.2}`,
};

function marker(style, x, y, r, parent) {
  return element("svg:path", {
    d: SHAPES[style.marker](r), transform: `translate(${x},${y})`, class: "marker" + (style.open ? " open" : ""),
    style: `--colour:${style.colour}`,
  }, parent);
}

// spec: {label, x: {title, log, domain}, y: {...}, series: [{name, style, faint, points, line, band, dots}], guide}
// a point: {x, y, low, high, error, lines}; points outside the y domain become arrows at the edge.
function drawChart(host, spec) {
  const width = Math.max(240, Math.floor(host.clientWidth)), narrow = width < 560;
  const height = Math.round(Math.min(420, Math.max(260, width * 0.5)));
  const svg = blank(host, width, height, `${spec.label}. ${spec.series.length} series; arrow keys read the points.`);
  const named = spec.series.filter((s) => !s.faint && s.label !== false && s.points.length);
  const widest = Math.max(0, ...named.map((s) => textWidth(svg, cut(s.name, 24))));
  const direct = named.length <= (narrow ? 4 : 12) && (spec.scatter ? !narrow : widest < 0.28 * width);
  const right = direct && !spec.scatter ? widest + 26 : 16;
  const inner = { x0: 58, x1: width - right, y0: height - 46, y1: 14 };
  const all = spec.series.flatMap((s) => s.points);
  const across = spec.x.domain || extent(all.map((p) => p.x), spec.x.log, 0);
  const up = spec.y.domain || extent(all.map((p) => p.y), spec.y.log);
  const ys = scale(up, [inner.y0, inner.y1], spec.y.log, 6);
  inner.x0 = Math.max(narrow ? 46 : 58, 34 + Math.max(0, ...ys.ticks.map((v) => textWidth(svg, shown(v, 4)))));
  const xs = scale(across, [inner.x0, inner.x1], spec.x.log, narrow ? 4 : 7, spec.x.whole);
  const clip = `clip-${++charts}`;
  element("svg:rect", { x: inner.x0, y: inner.y1 - 8, width: inner.x1 - inner.x0 + 8, height: inner.y0 - inner.y1 + 8 },
    element("svg:clipPath", { id: clip }, svg));
  drawAxes(svg, xs, ys, inner, spec);
  const plot = element("svg:g", { "clip-path": `url(#${clip})` }, svg);
  if (spec.guide) spec.guide(plot, xs, ys);
  if (spec.scatter) moveApart(spec.series, xs);
  const readable = [];
  for (const series of spec.series) readable.push(drawSeries(plot, series, xs, ys, inner));
  if (direct) labelSeries(svg, named, readable, inner, spec.scatter);
  addReadout(host, svg, spec.scatter, readable.filter((r) => r.points.length), inner);
}

// Series with the same x are moved apart; the first of them stays in place. Seeds are beside their mean.
function moveApart(series, xs) {
  const seen = [];
  for (const { points: [mean, ...seeds] } of series.filter((s) => !s.faint && s.points.length)) {
    const same = seen.find((one) => Math.abs(xs.to(one.x) - xs.to(mean.x)) < 9), step = seeds.length ? 18 : 10;
    if (same) {
      same.count++;
      mean.shift = step * Math.ceil(same.count / 2) * (same.count % 2 ? 1 : -1);
    } else seen.push({ x: mean.x, count: 0 });
    for (const p of seeds) p.shift = (mean.shift || 0) + 8;
  }
}

function blank(host, width, height, label) {
  host.replaceChildren();
  const viewBox = `0 0 ${width} ${height}`;
  return element("svg:svg", { viewBox, width, height, role: "img", tabindex: 0, "aria-label": label }, host);
}

function drawAxes(svg, xs, ys, inner, spec) {
  const axes = element("svg:g", { class: "axes", "aria-hidden": "true" }, svg);
  for (const value of ys.ticks) {
    const y = ys.to(value);
    element("svg:line", { x1: inner.x0, x2: inner.x1, y1: y, y2: y, class: "grid" }, axes);
    element("svg:text", { x: inner.x0 - 8, y: y + 4, "text-anchor": "end" }, axes, shown(value, 4));
  }
  element("svg:line", { x1: inner.x0, x2: inner.x1, y1: inner.y0, y2: inner.y0, class: "axis" }, axes);
  let edge = -Infinity;
  for (const value of xs.ticks) {
    const x = xs.to(value), text = shown(value, 4), half = text.length * 3.6;
    element("svg:line", { x1: x, x2: x, y1: inner.y0, y2: inner.y0 + 4, class: "axis" }, axes);
    if (x - half < edge + 6) continue;
    element("svg:text", { x, y: inner.y0 + 18, "text-anchor": "middle" }, axes, text);
    edge = x + half;
  }
  const middle = { x: (inner.x0 + inner.x1) / 2, y: inner.y0 + 38, "text-anchor": "middle", class: "title" };
  element("svg:text", middle, axes, spec.x.title);
  element("svg:text", {
    transform: `translate(14,${(inner.y0 + inner.y1) / 2}) rotate(-90)`, "text-anchor": "middle", class: "title",
  }, axes, spec.y.title);
}

// The elements of one series, in its colour; pointing at one of them highlights all.
function groupOf(series, kind, parent) {
  return element("svg:g", { class: kind, "data-series": series.name, style: `--colour:${series.style.colour}` }, parent);
}

function drawSeries(plot, series, xs, ys, inner) {
  const kinds = ["faint", "thin", "each", "crowded"].filter((kind) => series[kind]);
  const g = groupOf(series, ["series", ...kinds].join(" "), plot);
  const drawable = (value, log) => value !== null && (!log || value > 0);
  const good = series.points.filter((p) => drawable(p.x, xs.log) && drawable(p.y, ys.log));
  const inside = (v) => Math.max(inner.y1 - 20, Math.min(inner.y0 + 20, ys.log && v <= 0 ? inner.y0 + 20 : ys.to(v)));
  const at = good.map((p) => ({ ...p, px: xs.to(p.x) + (p.shift || 0), py: ys.to(p.y) }));
  if (series.band && !series.faint) {
    const banded = at.filter((p) => p.low !== null && p.high !== null);
    if (banded.length > 1) {
      const up = banded.map((p) => `${p.px},${inside(p.high)}`);
      const down = banded.map((p) => `${p.px},${inside(p.low)}`).reverse();
      element("svg:path", { d: `M${up.join("L")}L${down.join("L")}Z`, class: "band" }, g);
    }
  }
  if (series.line && at.length) {
    const path = at.map((p) => `${p.px.toFixed(1)},${p.py.toFixed(1)}`).join("L");
    element("svg:path", { d: `M${path}`, class: "line", "stroke-dasharray": series.style.dash }, g);
  }
  if (series.line && at.length === 1 && !series.cross) marker(series.style, at[0].px, at[0].py, 3.5, g);
  if (series.cross && at.length) marker({ ...series.style, marker: "cross" }, at.at(-1).px, at.at(-1).py, 4, g);
  if (series.dots) {
    for (const p of at) {
      const outside = p.py > inner.y0 ? 1 : p.py < inner.y1 ? -1 : 0;
      if (p.seed) {
        if (!outside) element("svg:circle", { cx: p.px, cy: p.py, r: 2, class: "seed" }, g);
        continue;
      }
      if (outside) {
        p.py = outside > 0 ? inner.y0 - 6 : inner.y1 + 6;
        const arrow = { ...series.style, marker: outside > 0 ? "down" : "triangle" };
        marker(arrow, p.px, p.py, 5, g).classList.add("outside");
        continue;
      }
      if (!series.faint && p.low !== null && p.low !== undefined) {
        [p.top, p.bottom] = [inside(p.high), inside(p.low)];
        element("svg:line", { x1: p.px, x2: p.px, y1: p.bottom, y2: p.top, class: "interval" }, g);
      }
      if (!series.faint && p.error) {
        const [y1, y2] = [inside(p.y - p.error), inside(p.y + p.error)];
        element("svg:line", { x1: p.px, x2: p.px, y1, y2, class: "error" }, g);
      }
      marker(series.style, p.px, p.py, series.faint ? 3 : 5, g);
    }
  }
  return { series, name: series.name, points: at };
}

// A tooltip for the point under the pointer or selected by the arrow keys.
function addReadout(host, svg, scatter, readable, inner) {
  const tip = element("div", { class: "tip", role: "status", hidden: "" }, host);
  const ring = element("svg:circle", { r: 7, class: "ring", visibility: "hidden" }, svg);
  let at = null;
  const hide = () => { at = null; tip.hidden = true; ring.setAttribute("visibility", "hidden"); heat(svg, null); };
  const show = (s, i) => {
    at = [s, i];
    const p = readable[s].points[i];
    tip.hidden = false;
    const spans = (p.lines || []).map((line) => element("span", {}, null, line));
    tip.replaceChildren(element("b", {}, null, p.name || readable[s].name), ...spans);
    ring.setAttribute("cx", p.px);
    ring.setAttribute("cy", p.py);
    ring.setAttribute("visibility", "visible");
    const room = host.clientWidth - tip.offsetWidth;
    const left = p.px + 16 < room ? p.px + 16 : Math.max(0, Math.min(p.px - 16 - tip.offsetWidth, room));
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(0, Math.min(p.py - tip.offsetHeight - 10, inner.y0 - tip.offsetHeight))}px`;
    heat(svg, readable[s].name);
  };
  const look = (event) => {
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 40 ** 2;
    readable.forEach((r, s) => r.points.forEach((p, i) => {
      const d = (p.px - x) ** 2 + (p.py - y) ** 2;
      if (d < least) [best, least] = [[s, i], d];
    }));
    best ? show(...best) : hide();
  };
  svg.addEventListener("pointermove", look);
  svg.addEventListener("pointerdown", look);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hide(); // a finger leaves at once: its tooltip stays
  });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !readable.length) return;
    event.preventDefault();
    if (!at) return show(0, 0);
    let [s, i] = at;
    s = (s + move[0] + readable.length) % readable.length;
    i = Math.max(0, Math.min(readable[s].points.length - 1, i + move[1]));
    if (scatter) { // left and right: the methods; up and down: the seeds of one, or else the methods
      const many = readable[at[0]].points.length > 1;
      if (move[0] && many) [s, i] = [at[0], Math.max(0, Math.min(readable[at[0]].points.length - 1, at[1] + move[0]))];
      else [s, i] = [(at[0] + move[0] + move[1] + readable.length) % readable.length, 0];
    }
    show(s, i);
  });
}

// Highlight one series and fade the others; without a name, reset all.
function heat(root, name) {
  for (const g of root.querySelectorAll("[data-series]")) {
    g.classList.toggle("cold", name !== null && g.dataset.series !== name);
    g.classList.toggle("hot", name !== null && g.dataset.series === name);
  }
}
