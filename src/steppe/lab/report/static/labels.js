"use strict";
// Labels at the ends of curves or beside points: moved apart at the right edge, elsewhere placed where there is room.

const GAP = 15; // between two labels

function labelSeries(svg, named, readable, inner, scatter) {
  const all = readable.filter((r) => !r.series.faint && r.points.length).map((r) => {
    const p = scatter ? r.points[0] : r.points.at(-1), y = Math.max(inner.y1, Math.min(inner.y0 - 4, p.py));
    return { s: r.series, x: p.px, y, top: p.top ?? y - 6, bottom: p.bottom ?? y + 6 };
  });
  const spots = all.filter((e) => named.includes(e.s)).sort((a, b) => a.y - b.y);
  for (const e of spots) {
    e.name = cut(e.s.name, 24);
    e.w = textWidth(svg, e.name);
  }
  const atEdge = spots.filter((e) => !scatter && e.x > inner.x1 - 24);
  pushApart(atEdge, inner);
  const taken = all.flatMap((e) => [[e.x - 7, e.y - 7, e.x + 7, e.y + 7], [e.x - 2, e.top, e.x + 2, e.bottom]]);
  taken.push(...atEdge.map(boxOf), ...drawnIn(svg));
  for (const e of spots.filter((one) => !atEdge.includes(one))) {
    const room = placesFor(e, scatter).find(([x, y]) => x > inner.x0 && x + e.w < inner.x1 + 12
      && y > 7 && y < inner.y0 - 4 && !taken.some((t) => overlap(t, [x, y - 7, x + e.w, y + 7])));
    if (!room) continue; // the legend and the tooltip still have the name
    [e.lx, e.ly] = room;
    taken.push(boxOf(e));
  }
  for (const e of spots.filter((one) => one.lx !== undefined)) drawName(svg, e);
}

// Boxes along all lines and around the dots of seeds, which labels must not cover.
function drawnIn(svg) {
  const boxes = [];
  for (const line of svg.querySelectorAll(".series:not(.faint) .line, .longer")) {
    const length = line.getTotalLength();
    for (let at = 0; at <= length; at += 5) {
      const { x, y } = line.getPointAtLength(at);
      boxes.push([x - 2, y - 2, x + 2, y + 2]);
    }
  }
  for (const dot of svg.querySelectorAll(".seed")) {
    const [x, y] = [dot.cx.baseVal.value, dot.cy.baseVal.value];
    boxes.push([x - 3, y - 3, x + 3, y + 3]);
  }
  return boxes;
}

// Place labels one below the other at the right edge, as close to the ends of their curves as possible.
function pushApart(ends, inner) {
  ends.forEach((e, k) => {
    e.lx = inner.x1 + 17;
    e.ly = k ? Math.max(e.y, ends[k - 1].ly + GAP) : e.y;
  });
  let limit = inner.y0;
  for (const e of [...ends].reverse()) {
    e.ly = Math.min(e.ly, limit);
    limit = e.ly - GAP;
  }
}

// Candidate places for a label: right or left of the point, higher or lower; or above or below it. Closest first.
function placesFor(e, scatter) {
  const steps = [0, -13, 13, -26, 26, -39, 39];
  const places = steps.flatMap((d) => [10, 22, 34].flatMap((gap) => [[e.x + gap, e.y + d], [e.x - gap - e.w, e.y + d]]));
  const x = e.x - e.w / 2;
  if (scatter) places.push(...[12, 24, 36, 48].flatMap((d) => [[x, e.top - d], [x, e.bottom + d]]));
  const far = ([left, y]) => Math.max(left - e.x, e.x - left - e.w, 0) + 1.5 * Math.abs(y - e.y);
  return places.sort((a, b) => far(a) - far(b));
}

function drawName(svg, e) {
  const g = groupOf(e.s, "name", svg), side = e.lx > e.x ? 1 : e.lx + e.w < e.x ? -1 : 0;
  g.setAttribute("aria-hidden", "true");
  const end = side > 0 ? e.lx - 3 : e.lx + e.w + 3;
  const up = `M${e.x},${e.top}V${e.ly + 6}`, down = `M${e.x},${e.bottom}V${e.ly - 8}`;
  const leader = side ? `M${e.x + 5 * side},${e.y}L${end},${e.ly}` : e.ly < e.y ? up : down;
  const away = side === 0 || Math.abs(e.ly - e.y) > 14 || Math.abs(end - e.x) > 9;
  if (away) element("svg:path", { d: leader, class: "leader" }, g);
  element("svg:text", { x: e.lx, y: e.ly + 4 }, g, e.name);
}

function boxOf(e) {
  return [e.lx, e.ly - 7, e.lx + e.w, e.ly + 7];
}

function overlap(a, b) {
  return a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
}

function textWidth(svg, text) {
  const g = element("svg:g", { class: "name" }, svg);
  const width = element("svg:text", {}, g, text).getComputedTextLength();
  g.remove();
  return width;
}

function cut(label, most) {
  return label.length > most ? label.slice(0, most - 1) + "…" : label;
}
