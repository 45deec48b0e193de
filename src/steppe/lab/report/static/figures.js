"use strict";
// The figures of one problem: the data that each is drawn from.

const COLOURS = 8, DASHES = [null, "7 3", "2 3", "9 3 2 3"], LONGER = ["5 4", "2 3", "8 3 2 3"];
const MARKERS = ["circle", "square", "triangle", "diamond", "plus", "down"];
const AXES = { epoch: "epochs", gradients: "gradient evaluations", seconds: "seconds of training" };
const FEW = 8; // methods that can be distinguished in one chart

// Colour, line style and marker by the row in the table: the same in all figures.
function styles(groups) {
  let k = 0, longer = 0, rivals = 0;
  return new Map(groups.map((group) => {
    if (group.role === "base") return [group.label, { colour: "var(--base)", dash: null, marker: "circle" }];
    if (group.role === "equal-cost") {
      return [group.label, { colour: "var(--base)", dash: LONGER[longer++ % 3], marker: "circle", open: true }];
    }
    if (group.role === "rival") {
      const made = { colour: "var(--base)", dash: DASHES[(rivals + 1) % 4], marker: MARKERS[1 + (rivals % 5)], open: true };
      rivals++;
      return [group.label, made];
    }
    const place = (k % COLOURS) + Math.floor(k / COLOURS); // where colours repeat, line styles and markers differ
    const made = { colour: `var(--c${k % COLOURS})`, dash: DASHES[place % 4], marker: MARKERS[place % 6] };
    k++;
    return [group.label, made];
  }));
}

function outliersAside(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const median = (list) => (list[Math.floor((list.length - 1) / 2)] + list[Math.ceil((list.length - 1) / 2)]) / 2;
  const middle = median(sorted);
  const spread = median(sorted.map((v) => Math.abs(v - middle)).sort((a, b) => a - b));
  return (v) => Math.abs(v - middle) <= 6 * spread + 1e-12 * Math.abs(middle);
}

const FIGURES = {
  cost(problem) {
    const { data, state } = problem, percent = data.metric.endsWith("accuracy"), unit = percent ? 100 : 1;
    const axis = state.cost, each = state.runs === "seeds";
    const point = (g) => {
      const [value, error, low, high] = g.mean.map((v) => (v === null ? null : unit * v));
      const trusted = g.n > 2; // the interval of two runs is too wide for a chart
      const spread = error === null ? ", one run" : ` ± ${shown(error, 2)}, n = ${g.n}`;
      const lines = [`${shown(value, 4)}${percent ? " %" : ""}${spread}`];
      if (low !== null) lines.push(`95 % interval ${shown(low, 4)} to ${shown(high, 4)}`);
      lines.push(`${shown(g.gradients, 4)} gradients, ${shown(g.seconds, 3)} s`);
      if (g.diverged) lines.push(`${g.diverged} diverged`);
      if (g.settings) lines.push(g.settings);
      return { x: g[axis], y: value, error, low, high, lines, trusted, name: g.label };
    };
    const seeds = (g) => g.runs.filter((run) => each && g.n > 1 && !problem.faint(g) && data.metric in run).map((run) => {
      const lines = [`seed ${run.seed}: ${shown(unit * run[data.metric], 4)}${percent ? " %" : ""}`];
      return { x: g[axis], y: unit * run[data.metric], lines, seed: true, name: g.label };
    });
    const groups = data.groups.filter((g) => g.mean && g[axis] !== null);
    const series = groups.map((g) => ({
      name: g.label, style: problem.styles.get(g.label), role: g.role, faint: problem.faint(g),
      points: [point(g), ...seeds(g)], dots: true,
    })).filter((s) => !s.faint || data.groups.length > FEW);
    const longest = groups.filter((g) => g.role === "equal-cost").sort((a, b) => b[axis] - a[axis])[0];
    for (const s of series) {
      if (s.role === "equal-cost" && s.name !== longest.label) s.label = false; // one label for the whole line
    }
    const kept = outliersAside(series.map((s) => s.points[0].y));
    const inside = series.filter((s) => kept(s.points[0].y)).flatMap((s) => s.points);
    const ends = inside.flatMap((p) => [p.y - (p.error || 0), p.y + (p.error || 0), ...(p.trusted ? [p.low, p.high] : [])]);
    const longer = groups.filter((g) => ["base", "equal-cost"].includes(g.role)).map(point).filter((p) => kept(p.y)).sort((a, b) => a.x - b.x);
    const across = series.map((s) => s.points[0].x), log = Math.max(...across) > 12 * Math.min(...across);
    return {
      label: `${data.metric.replaceAll("_", " ")} against ${AXES[axis]}`, scatter: true, series,
      x: { title: AXES[axis], log, domain: log ? extent(across, true, 0.08) : [0, 1.08 * Math.max(...across)] },
      y: { title: data.metric.replaceAll("_", " ") + (percent ? ", %" : ""), domain: extent(ends, false, 0.1) },
      guide(plot, xs, ys) {
        if (longer.length < 2) return;
        const path = longer.map((p) => `${xs.to(p.x)},${ys.to(p.y)}`);
        const right = `${xs.range[1]},${ys.to(longer.at(-1).y)}`;
        element("svg:path", { d: `M${path.join("L")}L${right}`, class: "longer" }, plot);
      },
    };
  },

  curves(problem) {
    const { data, state } = problem, name = state.quantity, percent = name === "test_error";
    const each = state.runs === "seeds";
    const column = Object.keys(AXES).indexOf(state.axis), title = data.quantities[name] + (percent ? ", %" : "");
    const series = [], below = []; // the seeds are below the means
    for (const group of data.groups) {
      const style = problem.styles.get(group.label), faint = problem.faint(group);
      if (faint && data.groups.length <= FEW) continue;
      // Over epochs the base trained longer is not comparable, and would compress the other curves.
      if (state.axis === "epoch" && group.longer) continue;
      const progress = (p) => `epoch ${p[0]}, ${shown(p[1], 4)} gradients, ${shown(p[2])} s`;
      const points = (group.curves[name] || []).map((p) => ({
        x: p[column], y: p[3], low: p[4], high: p[5],
        lines: [`${shown(p[3], 4)}${percent ? " %" : ""}` + (p[4] === null ? "" : ` [${shown(p[4])}, ${shown(p[5])}]`),
          progress(p), ...(group.settings ? [group.settings] : [])],
      }));
      const { at = [], curves = [] } = (each && !faint && group.seeds[name]) || {};
      for (const [seed, values] of curves) {
        const one = values.map((y, k) => ({
          x: at[k][column], y, lines: [`seed ${seed}: ${shown(y, 4)}${percent ? " %" : ""}`, progress(at[k])],
        }));
        const solid = { ...style, dash: null };
        below.push({ name: group.label, style: solid, each: true, label: false, points: one, line: true });
      }
      if (points.length) series.push({ name: group.label, style, faint, points, line: true, band: !curves.length });
      for (const [k, lost] of (group.broken[name] || []).entries()) {
        const linesOf = (p) => [shown(p[3], 4), `epoch ${p[0]}, a run that diverged`];
        const left = lost.map((p) => ({ x: p[column], y: p[3], lines: linesOf(p) })), label = !points.length && k === 0;
        series.push({ name: group.label, style, faint, thin: true, points: left, line: true, cross: true, label });
      }
    }
    series.unshift(...below);
    const values = series.flatMap((s) => s.points.map((p) => p.y)), lowest = Math.min(...values);
    const log = name !== "lr" && lowest > 0 && Math.max(...values) > 3 * lowest;
    const crowded = series.filter((s) => !s.faint && s.band).length > 4;
    for (const s of series) s.crowded = crowded;
    const x = { title: AXES[state.axis], whole: state.axis === "epoch" };
    if (!x.whole && values.length) x.domain = [0, Math.max(...series.flatMap((s) => s.points.map((p) => p.x)))];
    return { label: `${title} over ${AXES[state.axis]}`, series, x, y: { title, log } };
  },

  spectrum(problem) {
    const rows = problem.seen((g) => g.density).map((g) => ({
      name: g.label, style: problem.styles.get(g.label),
      points: g.density.points.map(([x, y]) => {
        return { x, y, lines: [`density ${shown(y)} at λ = ${shown(x)}`, `seed ${g.density.seed}`] };
      }),
    }));
    return { label: "Spectral density of the Hessian", rows, x: { title: "eigenvalue λ" }, decades: 8 };
  },

  gamma(problem) {
    const seen = problem.seen((g) => g.gamma);
    const series = seen.flatMap((g) => g.gamma.curves.map((curve, t) => {
      const which = `γ${sub(t + 1)}`, style = { ...problem.styles.get(g.label), dash: DASHES[t % 4] };
      const points = curve.map(([epoch, , , y, low, high]) => {
        return { x: epoch, y, low, high, lines: [`${which} = ${shown(y)}`, `epoch ${epoch}`] };
      });
      return { name: (seen.length > 1 ? `${g.label}: ` : "") + which, style, points, line: true, band: true };
    }));
    const domain = extent([0, ...series.flatMap((s) => s.points.flatMap((p) => [p.y, p.low, p.high]))]); // γ starts at 0
    const label = "Learned coefficients over training";
    return { label, series, x: { title: "epochs", whole: true }, y: { title: "γ", domain } };
  },

  polynomial(problem) {
    const seen = problem.seen((g) => g.gamma?.polynomials.length), series = [];
    for (const g of seen) {
      const style = problem.styles.get(g.label), all = g.gamma.polynomials;
      const mean = all[0].map(([x], k) => [x, all.reduce((sum, one) => sum + one[k][1], 0) / all.length]);
      const made = (points) => points.map(([x, y]) => ({ x, y, lines: [`P(${shown(x)}) = ${shown(y)}`] }));
      for (const one of all.length > 1 ? all : []) {
        series.push({ name: g.label, style, thin: true, label: false, points: made(one), line: true });
      }
      series.push({ name: g.label, style, points: made(mean), line: true });
    }
    return {
      label: "Learned polynomial P(λ)", series, x: { title: "eigenvalue λ" }, y: { title: "P(λ)" },
      guide(plot, xs, ys) {
        const [a, b] = xs.domain;
        element("svg:path", { d: `M${xs.to(a)},${ys.to(a)}L${xs.to(b)},${ys.to(b)}`, class: "longer" }, plot);
      },
    };
  },
};

function sub(k) {
  return String(k).replace(/\d/g, (c) => "₀₁₂₃₄₅₆₇₈₉"[c]);
}
