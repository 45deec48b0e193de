"use strict";
// The loss around the trained weights: surfaces that rotate together, or maps with contours; all on one scale.

const RAMP = [[18, 53, 91], [29, 106, 133], [74, 154, 140], [157, 191, 138], [230, 214, 144], [247, 241, 213]];
const LEVELS = 9; // contours

function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1), k = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[k].map((low, c) => Math.round(low + (at - k) * (RAMP[k + 1][c] - low)));
}

function drawLandscapes(host, problem) {
  const groups = problem.seen((g) => g.landscape);
  const losses = groups.flatMap((g) => g.landscape.loss.flat()).filter((v) => v !== null);
  const lowest = Math.min(...losses), highest = Math.max(...losses);
  const between = (warp) => {
    const low = warp(lowest), span = warp(highest) - low || 1;
    return (v) => (v === null ? null : (warp(v) - low) / span);
  };
  const logarithm = between((v) => Math.log10(Math.max(v, 1e-12)));
  // Colours are always logarithmic: they show small losses that are invisible in a linear height.
  const shares = { colour: logarithm, height: problem.state.height === "log" ? logarithm : between((v) => v) };
  host.replaceChildren();
  const tiles = element("div", { class: "tiles" }, host);
  const redraws = [];
  const turned = () => redraws.forEach((redraw) => redraw());
  for (const group of groups) redraws.push(addTile(tiles, group, shares, problem, turned));
  if (groups.length) addRampLegend(host, lowest, highest);
  turned();
}

function addTile(tiles, group, shares, problem, turned) {
  const { axis, loss, seed } = group.landscape, n = axis.length;
  const tile = element("div", { class: "tile" }, tiles);
  const name = element("p", { class: "tile-name" }, tile);
  element("span", { class: "key", "data-group": group.label }, name);
  element("span", {}, name, cut(group.label, 40));
  const centre = loss[(n - 1) >> 1][(n - 1) >> 1], highest = Math.max(...loss.flat().filter((v) => v !== null));
  const rest = `seed ${seed}: ${shown(centre)} here, at most ${shown(highest)}`;
  const label = `Loss around ${group.label}, ${rest}`;
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": label }, tile);
  const readout = element("p", { class: "tile-said", role: "status" }, tile, rest);
  const spot = { i: null, j: null };
  let corners = [];

  const redraw = () => {
    const width = tile.clientWidth, height = Math.round(problem.state.view === "map" ? width : width * 0.8);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const finer = Math.max(1, Math.ceil(28 / (n - 1)));
    const fine = problem.state.view === "map" ? paintMap(pen, width, height, loss, shares)
      : paintSurface(pen, width, height, smooth(loss, finer, shares), problem.turn);
    corners = problem.state.view === "map" ? fine : loss.map((row, i) => row.map((_, j) => fine[i * finer][j * finer]));
    const mark = spot.i === null ? corners[(n - 1) >> 1][(n - 1) >> 1] : corners[spot.i][spot.j];
    dot(pen, mark, spot.i === null ? "#d4532a" : "#ffffff");
  };
  const read = (i, j) => {
    [spot.i, spot.j] = [i, j];
    readout.textContent = i === null ? rest : `loss ${shown(loss[i][j])} at (${shown(axis[j])}, ${shown(axis[i])})`;
    redraw();
  };
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (problem.state.view === "surface") {
      from = [event.clientX, event.clientY];
      canvas.setPointerCapture(event.pointerId);
    }
  });
  canvas.addEventListener("pointerup", () => { from = null; });
  canvas.addEventListener("pointercancel", () => { from = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (from) {
      turn(problem, (event.clientX - from[0]) / 120, (event.clientY - from[1]) / 160);
      from = [event.clientX, event.clientY];
      return turned();
    }
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = Infinity;
    corners.forEach((row, i) => row.forEach((c, j) => {
      const d = c ? (c[0] - x) ** 2 + (c[1] - y) ** 2 : Infinity;
      if (d < least) [best, least] = [[i, j], d];
    }));
    if (best) read(...best);
  });
  canvas.addEventListener("pointerleave", () => { if (!from) read(null, null); });
  canvas.addEventListener("blur", () => read(null, null));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    if (problem.state.view === "surface") {
      turn(problem, move[1] * 0.15, -move[0] * 0.1);
      return turned();
    }
    const middle = (n - 1) >> 1, inside = (k) => Math.max(0, Math.min(n - 1, k));
    read(inside((spot.i ?? middle) + move[0]), inside((spot.j ?? middle) + move[1]));
  });
  return redraw;
}

function turn(problem, around, tilt) {
  problem.turn.around += around;
  problem.turn.tilt = Math.max(0.15, Math.min(1.5, problem.turn.tilt + tilt));
}

// Heights and colours on a finer grid, by cubic interpolation of the measured points.
function smooth(loss, times, shares) {
  const between = (list) => {
    const out = [], at = (k) => list[Math.max(0, Math.min(list.length - 1, k))];
    for (let k = 0; k + 1 < list.length; k++) {
      const [a, b, c, d] = [at(k - 1), at(k), at(k + 1), at(k + 2)];
      for (let step = 0; step < times; step++) {
        const t = step / times;
        const curve = b + (t / 2) * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)));
        out.push([a, b, c, d].includes(null) ? (step === 0 ? b : null) : curve);
      }
    }
    return [...out, at(list.length - 1)];
  };
  const turned = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));
  const finer = (share) => turned(turned(loss.map((row) => between(row.map(share)))).map(between));
  return { height: finer(shares.height), colour: finer(shares.colour) };
}

// Draws far faces first, so that near ones cover them. Returns the position of each grid point on the canvas.
function paintSurface(pen, width, height, grid, view) {
  const n = grid.height.length, size = width * 0.345, rise = height * 0.55;
  const [ca, sa, ct, st] = [Math.cos(view.around), Math.sin(view.around), Math.cos(view.tilt), Math.sin(view.tilt)];
  const depths = [];
  const corners = grid.height.map((row, i) => row.map((z, j) => {
    const x = (2 * j) / (n - 1) - 1, y = (2 * i) / (n - 1) - 1;
    if (z === null) return null;
    const across = x * ca - y * sa, deep = x * sa + y * ca;
    const down = height * 0.5 + deep * size * st * 0.8 - (z - 0.5) * rise * ct;
    return [width / 2 + across * size, down, deep, z, grid.colour[i][j]];
  }));
  for (let i = 0; i + 1 < n; i++) {
    for (let j = 0; j + 1 < n; j++) {
      const face = [corners[i][j], corners[i][j + 1], corners[i + 1][j + 1], corners[i + 1][j]];
      if (face.every(Boolean)) depths.push([face.reduce((sum, c) => sum + c[2], 0), face]);
    }
  }
  depths.sort((a, b) => a[0] - b[0]);
  pen.lineJoin = "round";
  for (const [, face] of depths) {
    const shade = face.reduce((sum, c) => sum + c[4], 0) / 4;
    const [a, b, c, d] = face.map((corner) => corner[3]);
    const slope = (b - a + c - d) * ca + (d - a + c - b) * sa;
    const light = Math.max(0.75, Math.min(1.12, 1 + 0.08 * n * slope));
    pen.fillStyle = `rgb(${ramp(shade).map((c) => Math.min(255, Math.round(c * light))).join(",")})`;
    pen.strokeStyle = "rgba(0,0,0,0.16)";
    pen.lineWidth = 0.6;
    pen.beginPath();
    face.forEach((c, k) => (k ? pen.lineTo(c[0], c[1]) : pen.moveTo(c[0], c[1])));
    pen.closePath();
    pen.fill();
    pen.stroke();
  }
  return corners;
}

function paintMap(pen, width, height, loss, shares) {
  const n = loss.length, share = shares.colour, small = document.createElement("canvas");
  small.width = small.height = n;
  const image = small.getContext("2d").createImageData(n, n);
  loss.forEach((row, i) => row.forEach((value, j) => {
    const z = share(value);
    image.data.set(z === null ? [128, 128, 128, 60] : [...ramp(z), 255], 4 * ((n - 1 - i) * n + j));
  }));
  small.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = true;
  pen.imageSmoothingQuality = "high";
  pen.drawImage(small, 0, 0, width, height);
  const at = (i, j) => [((j + 0.5) / n) * width, (1 - (i + 0.5) / n) * height];
  pen.strokeStyle = "rgba(255,255,255,0.55)";
  pen.lineWidth = 0.8;
  for (let level = 1; level <= LEVELS; level++) contour(pen, loss, share, level / (LEVELS + 1), at);
  return loss.map((row, i) => row.map((_, j) => at(i, j)));
}

// The points where the level crosses the edges of each cell, joined in pairs.
function contour(pen, loss, share, level, at) {
  const n = loss.length;
  pen.beginPath();
  for (let i = 0; i + 1 < n; i++) {
    for (let j = 0; j + 1 < n; j++) {
      const cell = [[i, j], [i, j + 1], [i + 1, j + 1], [i + 1, j]], z = cell.map(([a, b]) => share(loss[a][b]));
      if (z.some((v) => v === null)) continue;
      const crossings = [];
      for (let k = 0; k < 4; k++) {
        const next = (k + 1) % 4;
        if ((z[k] < level) === (z[next] < level)) continue;
        const part = (level - z[k]) / (z[next] - z[k]), [p, q] = [at(...cell[k]), at(...cell[next])];
        crossings.push([p[0] + part * (q[0] - p[0]), p[1] + part * (q[1] - p[1])]);
      }
      for (let k = 0; k + 1 < crossings.length; k += 2) {
        pen.moveTo(...crossings[k]);
        pen.lineTo(...crossings[k + 1]);
      }
    }
  }
  pen.stroke();
}

function dot(pen, at, colour) {
  if (!at) return;
  pen.beginPath();
  pen.arc(at[0], at[1], 3.5, 0, 7);
  pen.fillStyle = colour;
  pen.strokeStyle = "rgba(0,0,0,0.6)";
  pen.lineWidth = 1;
  pen.fill();
  pen.stroke();
}

function addRampLegend(host, low, high) {
  const legend = element("p", { class: "ramp" }, host);
  element("span", {}, legend, `loss ${shown(low)}`);
  const stops = RAMP.map((c) => `rgb(${c.join(",")})`).join(",");
  const style = `background:linear-gradient(to right,${stops})`;
  element("span", { class: "ramp-bar", "aria-hidden": "true", style }, legend);
  element("span", {}, legend, `${shown(high)}, colours logarithmic`);
}
