"use strict";
// Files made from the page: tables as CSV, everything as JSON, charts as PNG. Nothing is fetched.

const PICTURE = 960, SHARP = 2; // width of a picture in units of the chart, and its pixels for each
const DRAWN_WITH = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order",
  "font-family", "font-size", "font-weight"];

function save(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

function fileName(problem, what) {
  const words = `${problem.data.problem} ${what}`.toLowerCase().match(/[\p{L}\p{N}]+/gu) || ["steppe"];
  return words.join("-");
}

// Comma-separated values: a column for every name that some line has.
function csv(lines) {
  const names = [...new Set(lines.flatMap(Object.keys))];
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [names, ...lines.map((line) => names.map((name) => line[name]))].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

function methodLines({ data }) {
  return data.groups.map((g) => ({ ...g.line, settings: g.settings }));
}

function runLines({ data }) {
  return data.groups.flatMap((g) => g.runs.map((run) => {
    return { problem: data.problem, method: g.label, role: g.role, settings: g.settings, ...run };
  }));
}

function everything({ data }) {
  const names = ["epoch", "gradients", "seconds", "mean", "low", "high"];
  const named = (point) => Object.fromEntries(names.map((name, k) => [name, point[k]]));
  const curves = (g) => Object.fromEntries(Object.entries(g.curves).map(([name, points]) => [name, points.map(named)]));
  const methods = data.groups.map((g) => ({ ...g.line, settings: g.settings, by_seed: g.runs, curves: curves(g) }));
  return { problem: data.problem, metric: data.metric, methods };
}

// The chart as it would be on a wide screen, with its title above and its legend below.
function chartPicture(kind, name, problem) {
  const host = element("div", { class: "chart offscreen", style: `width:${PICTURE}px` }, document.body);
  try {
    const spec = FIGURES[kind](problem);
    (kind === "spectrum" ? drawRidges : drawChart)(host, spec);
    const svg = host.querySelector("svg"), height = Number(svg.getAttribute("height")), top = 44;
    const below = kind === "spectrum" ? 0 : drawLegend(svg, spec.series, height + 16) - height;
    svg.setAttribute("viewBox", `0 ${-top} ${PICTURE} ${top + height + below}`);
    svg.setAttribute("height", top + height + below);
    const titles = element("svg:g", { class: "picture-title" }, svg);
    element("svg:text", { x: 16, y: -18 }, titles, cut(`${name}: ${problem.data.problem}`, 90));
    for (const one of svg.querySelectorAll("*")) {
      const style = getComputedStyle(one);
      for (const property of DRAWN_WITH) one.style.setProperty(property, style.getPropertyValue(property));
    }
    svg.querySelector(".ring")?.remove();
    return { text: new XMLSerializer().serializeToString(svg), height: top + height + below };
  } finally {
    host.remove();
  }
}

// The names of all methods in rows, each with its line style and marker. Returns where they end.
function drawLegend(svg, series, y) {
  const shownOnce = new Map(series.filter((s) => !s.faint && s.points.length).map((s) => [s.name, s]));
  let x = 24;
  for (const one of shownOnce.values()) {
    const name = cut(one.name, 60), wide = 34 + textWidth(svg, name) + 22;
    if (x + wide > PICTURE && x > 24) [x, y] = [24, y + 22];
    const g = groupOf(one, "name", svg);
    element("svg:line", { x1: x, x2: x + 26, y1: y, y2: y, class: "line", "stroke-dasharray": one.style.dash }, g);
    marker(one.style, x + 13, y, 3.6, g);
    element("svg:text", { x: x + 34, y: y + 4 }, g, name);
    x += wide;
  }
  return y + 22;
}

async function painted({ text, height }) {
  const image = new Image(PICTURE, height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const { canvas, pen } = paper(PICTURE, height);
  pen.drawImage(image, 0, 0, PICTURE, height);
  return canvas;
}

function paper(width, height) {
  const canvas = element("canvas", { width: SHARP * width, height: SHARP * height }), pen = canvas.getContext("2d");
  pen.scale(SHARP, SHARP);
  pen.fillStyle = getComputedStyle(document.body).backgroundColor;
  pen.fillRect(0, 0, width, height);
  return { canvas, pen };
}

// The landscapes side by side, in their present orientation.
function landscapePicture(host, name, problem) {
  const tiles = [...host.querySelectorAll(".tile")], across = Math.max(1, Math.min(3, tiles.length));
  const source = tiles[0]?.querySelector("canvas"), wide = PICTURE / across;
  const tall = source ? (wide - 24) * source.height / source.width : 0;
  const { canvas, pen } = paper(PICTURE, 50 + Math.ceil(tiles.length / across) * (tall + 44));
  const body = getComputedStyle(document.body);
  pen.fillStyle = body.color;
  pen.font = `600 17px ${body.fontFamily}`;
  pen.fillText(cut(`${name}: ${problem.data.problem}`, 90), 16, 26);
  pen.font = `600 13px ${body.fontFamily}`;
  tiles.forEach((tile, k) => {
    const x = 12 + (k % across) * wide, y = 50 + Math.floor(k / across) * (tall + 44);
    pen.fillText(tile.querySelector(".tile-name").textContent, x, y + 16);
    pen.drawImage(tile.querySelector("canvas"), x, y + 24, wide - 24, tall);
  });
  return canvas;
}

// Synchronous: toBlob waits until the browser is idle, which may take seconds.
function png(canvas) {
  const bytes = atob(canvas.toDataURL("image/png").split(",")[1]);
  return new Blob([Uint8Array.from(bytes, (c) => c.charCodeAt(0))], { type: "image/png" });
}

function saveButton(parent, text, label, make) {
  const button = element("button", { type: "button", "aria-label": label, title: label }, parent, text);
  button.addEventListener("click", make);
}

function setUpDownloads(problem) {
  const text = (kind, content) => new Blob([content], { type: `${kind};charset=utf-8` });
  for (const bar of problem.section.querySelectorAll("[data-downloads]")) {
    const row = element("div", { class: "choice saves", role: "group", "aria-label": "Download" }, bar);
    element("span", { class: "said", "aria-hidden": "true" }, row, "Download");
    saveButton(row, "table CSV", "Download the table as CSV, one line per method", () =>
      save(`${fileName(problem, "methods")}.csv`, text("text/csv", csv(methodLines(problem)))));
    saveButton(row, "runs CSV", "Download the runs as CSV, one line per run", () =>
      save(`${fileName(problem, "runs")}.csv`, text("text/csv", csv(runLines(problem)))));
    saveButton(row, "JSON", "Download methods, runs and curves as JSON", () =>
      save(`${fileName(problem, "")}.json`, text("application/json", JSON.stringify(everything(problem), null, 1))));
  }
  for (const host of problem.section.querySelectorAll("[data-chart]")) {
    const kind = host.dataset.chart, bar = host.closest("figure").querySelector(".bar");
    const name = bar.querySelector("h3, h4").textContent;
    const row = element("div", { class: "choice saves" }, bar.querySelector(".controls") || bar);
    saveButton(row, "PNG", `Download as PNG: ${name}`, async () => {
      const canvas = kind === "landscape" ? landscapePicture(host, name, problem)
        : await painted(chartPicture(kind, name, problem));
      save(`${fileName(problem, name)}.png`, png(canvas));
    });
  }
}
