"use strict";
// The behaviour of the page: the legend, the buttons, sorting, and redrawing when the width changes.

function setUpProblem(section, data) {
  const quantity = Object.keys(data.quantities)[0];
  const state = { cost: "gradients", quantity, axis: "epoch", runs: "mean", view: "surface", height: "linear" };
  const methods = data.groups.filter((g) => g.role === "method");
  const first = new Set(methods.slice(0, methods.length > FEW ? 6 : FEW).map((g) => g.label));
  const problem = {
    data, state, section,
    styles: styles(data.groups),
    visible: new Set(data.groups.filter((g) => g.role !== "method" || first.has(g.label)).map((g) => g.label)),
    turn: { around: 0.6, tilt: 0.68 },
    faint: (group) => !problem.visible.has(group.label),
    seen: (has) => data.groups.filter((g) => has(g) && problem.visible.has(g.label)),
  };
  fillQuantities(section, data);
  for (const choice of section.querySelectorAll("[data-choice]")) setUpChoice(choice, problem);
  for (const host of section.querySelectorAll("[data-chart]")) {
    addLegend(host, problem);
    let width = 0;
    new ResizeObserver(() => {
      if (host.clientWidth !== width) {
        width = host.clientWidth;
        drawFigure(host, problem);
      }
    }).observe(host);
  }
  drawKeys(section, problem);
  setUpDownloads(problem);
  return problem;
}

function drawFigure(host, problem) {
  const kind = host.dataset.chart;
  if (kind === "landscape") drawLandscapes(host, problem);
  else if (kind === "spectrum") drawRidges(host, FIGURES.spectrum(problem));
  else drawChart(host, FIGURES[kind](problem));
  drawKeys(host, problem);
}

function drawAll(problem) {
  for (const host of problem.section.querySelectorAll("[data-chart]")) drawFigure(host, problem);
}

function fillQuantities(section, data) {
  const choice = section.querySelector('[data-choice="quantity"]');
  Object.entries(data.quantities).forEach(([name, title], k) => {
    if (choice) element("button", { type: "button", "data-value": name, "aria-pressed": k === 0 }, choice, title);
  });
}

function setUpChoice(choice, problem) {
  choice.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    problem.state[choice.dataset.choice] = button.dataset.value;
    for (const one of problem.section.querySelectorAll(`[data-choice="${choice.dataset.choice}"]`)) {
      for (const other of one.querySelectorAll("button")) {
        other.setAttribute("aria-pressed", other.dataset.value === button.dataset.value);
      }
      drawFigure(one.closest("figure").querySelector("[data-chart]"), problem);
    }
  });
}

// The groups that have data for a figure.
function groupsWithData(kind, data) {
  const has = {
    cost: (g) => g.mean,
    spectrum: (g) => g.density,
    landscape: (g) => g.landscape,
    gamma: (g) => g.gamma,
    polynomial: (g) => g.gamma?.polynomials.length,
    curves: (g) => Object.keys(g.curves).length || Object.keys(g.broken).length,
  }[kind];
  return data.groups.filter(has);
}

function addLegend(host, problem) {
  const groups = groupsWithData(host.dataset.chart, problem.data);
  const labelled = !["cost", "curves"].includes(host.dataset.chart);
  if (groups.length < 2 || (labelled && groups.length <= FEW + 4)) return; // rows and tiles have labels of their own
  const legend = element("div", { class: "legend", role: "group", "aria-label": "Show or hide" });
  for (const group of groups) {
    const chip = element("button", { type: "button", class: "chip", "data-label": group.label }, legend);
    chip.setAttribute("aria-pressed", problem.visible.has(group.label));
    if (group.settings) chip.title = group.settings;
    element("span", { class: "key", "data-group": group.label }, chip);
    element("span", {}, chip, cut(group.label, 40));
    chip.addEventListener("click", () => toggle(problem, group.label));
    chip.addEventListener("pointerenter", () => heat(host, group.label));
    chip.addEventListener("pointerleave", () => heat(host, null));
  }
  if (groups.length <= FEW + 4) return host.before(legend);
  const folded = element("details", { class: "folded" });
  element("summary", {}, folded, `Choose from ${groups.length} methods`);
  folded.append(legend);
  host.before(folded);
}

function toggle(problem, label) {
  if (!problem.visible.delete(label)) problem.visible.add(label);
  for (const chip of problem.section.querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", problem.visible.has(chip.dataset.label));
  }
  drawAll(problem);
}

// The line style and the marker of a group.
function drawKeys(root, problem) {
  for (const key of root.querySelectorAll(".key[data-group]")) {
    const style = problem.styles.get(key.dataset.group);
    if (!style || key.firstChild) continue;
    const svg = element("svg:svg", { viewBox: "0 0 26 12", width: 26, height: 12, "aria-hidden": "true" }, key);
    svg.style.setProperty("--colour", style.colour);
    element("svg:line", { x1: 0, x2: 26, y1: 6, y2: 6, class: "line", "stroke-dasharray": style.dash }, svg);
    marker(style, 13, 6, 3.6, svg);
  }
}

function setUpSorting(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], first = [...body.rows];
  heads.forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort"), numbers = head.classList.contains("number");
      const starts = numbers ? "descending" : "ascending", other = numbers ? "ascending" : "descending";
      const next = now === "none" ? starts : now === starts ? other : "none";
      for (const one of heads) one.setAttribute("aria-sort", one === head ? next : "none");
      const sign = next === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value;
      // Rows without a value stay at the end in both orders; the third click restores the original order.
      const rows = next === "none" ? first : [...first].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (numbers ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true }));
      });
      body.append(...rows);
    });
  });
}

// A hint above a table that can be scrolled sideways, as long as there is more to the right.
function setUpHint(scroll) {
  const hint = element("p", { class: "hint", "aria-hidden": "true", hidden: "" }, null, "scroll sideways for more →");
  scroll.before(hint);
  const look = () => { hint.hidden = scroll.scrollLeft + scroll.clientWidth >= scroll.scrollWidth - 2; };
  new ResizeObserver(look).observe(scroll);
  scroll.addEventListener("scroll", look);
}

function setUpCopying(button) {
  const source = document.getElementById(button.dataset.copies);
  button.addEventListener("click", async () => {
    const select = () => getSelection().selectAllChildren(source);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      select(); // a page opened from disk may not write to the clipboard
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

const payload = JSON.parse(document.getElementById("data").textContent);
payload.forEach((data, k) => setUpProblem(document.getElementById(`problem-${k}`), data));
document.querySelectorAll("table.sortable").forEach(setUpSorting);
document.querySelectorAll(".scroll").forEach(setUpHint);
document.querySelectorAll(".copy").forEach(setUpCopying);
