// Charts drawn as SVG from numbers; no text of a run is ever parsed as markup.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 480, HEIGHT = 220, LEFT = 54, RIGHT = 12, TOP = 16, BOTTOM = 30, GAP = 14;

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  for (const child of children) node.append(child);
  return node;
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  if (size >= 1000) return value.toFixed(0);
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

// Labels of an axis: with more digits where two of them would read the same.
function tickTexts(ticks, form) {
  const texts = ticks.map((tick) => form(tick));
  if (form !== number || new Set(texts).size === texts.length) return texts;
  for (let digits = 5; digits < 13; digits += 1) {
    const longer = ticks.map((tick) => String(Number(tick.toPrecision(digits))));
    if (new Set(longer).size === longer.length) return longer;
  }
  return texts;
}

export const percent = (value) => `${(100 * value).toFixed(1).replace(".0", "")}%`;

function roundTicks(low, high, about) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index <= Math.floor(high / step + 1e-9); index += 1) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function axisOf(values, share) {
  let low = Math.min(...values), high = Math.max(...values);
  if (share && low >= 0 && high <= 1) return { low: 0, high: 1, ticks: [0, 0.25, 0.5, 0.75, 1], place: (value) => value };
  if (low > 1e-300 && high > 1000 * low) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.ceil((last - first + 1) / 5), ticks = [];
    for (let decade = first; decade <= last; decade += every) ticks.push(10 ** decade);
    return { low: 10 ** first, high: 10 ** last, ticks, log: true, place: (value) => (Math.log10(Math.max(value, 10 ** first)) - first) / (last - first) };
  }
  if (low >= 0 && low <= high / 2) low = 0;
  if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) {
    const half = Math.abs(low) / 2 || 0.5;
    low -= low ? half : 0; high += low || half === 0.5 ? half : 1;
  }
  const first = roundTicks(low, high, 4);
  const step = first.length > 1 ? first[1] - first[0] : high - low;
  low = Math.floor(low / step + 1e-9) * step; high = Math.ceil(high / step - 1e-9) * step;
  return { low, high, ticks: roundTicks(low, high, 4), place: (value) => (value - low) / (high - low) };
}

function smooth(values) {
  const reach = Math.max(2, Math.floor(values.length / 12)), last = values.length - 1;
  return values.map((_, index) => {
    const near = Math.min(reach, index, last - index);
    let sum = 0;
    for (let place = index - near; place <= index + near; place += 1) sum += values[place];
    return sum / (2 * near + 1);
  });
}

function isNoisy(values) {
  if (values.length < 24) return false;
  let travelled = 0;
  for (let index = 1; index < values.length; index += 1) travelled += Math.abs(values[index] - values[index - 1]);
  return travelled > 3 * (Math.max(...values) - Math.min(...values));
}

// The stages side by side, in the order of the run.
function panels({ series, stages = [] }) {
  const spans = new Map();
  const place = (one) => stages.indexOf(one.stage);
  for (const one of [...series].sort((a, b) => place(a) - place(b))) {
    const span = spans.get(one.stage) || [Infinity, -Infinity];
    spans.set(one.stage, [Math.min(span[0], one.steps[0]), Math.max(span[1], one.steps[one.steps.length - 1])]);
  }
  const pitch = (WIDTH - LEFT - RIGHT + GAP) / Math.max(1, spans.size);
  return [...spans].map(([stage, [first, last]], index) => ({ stage, first, last, left: LEFT + index * pitch, right: LEFT + index * pitch + pitch - GAP }));
}

const across = (panel, step) => (panel.last === panel.first ? (panel.left + panel.right) / 2 : panel.left + ((step - panel.first) / (panel.last - panel.first)) * (panel.right - panel.left));
const path = (places) => places.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function frame(figure, axis, places, form, log) {
  for (const panel of places) {
    figure.append(svg("rect", { class: "band", x: panel.left - 4, y: TOP - 3, width: panel.right - panel.left + 8, height: HEIGHT - TOP - BOTTOM + 6, rx: 4 }));
    if (places.length > 1) figure.append(svg("text", { class: `stage s-${panel.stage}`, x: panel.left, y: TOP - 6 }, panel.stage.toUpperCase()));
    const about = Math.max(2, Math.floor((panel.right - panel.left) / 60));
    const ticks = panel.last > panel.first ? roundTicks(panel.first, panel.last, about).filter(Number.isInteger) : [panel.first];
    for (const tick of ticks) figure.append(svg("text", { class: "tick", x: across(panel, tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, String(tick)));
  }
  const texts = tickTexts(axis.ticks, form);
  axis.ticks.forEach((tick, index) => {
    const y = HEIGHT - BOTTOM - axis.place(tick) * (HEIGHT - TOP - BOTTOM);
    figure.append(svg("line", { class: "grid", x1: LEFT - 4, x2: WIDTH - RIGHT + 4, y1: y, y2: y }));
    figure.append(svg("text", { class: "tick", x: LEFT - 10, y: y + 4, "text-anchor": "end" }, texts[index]));
  });
  if (log) figure.append(svg("text", { class: "tick", x: WIDTH - RIGHT, y: HEIGHT - 2, "text-anchor": "end" }, "logarithmic"));
}

// Draw a chart of the answer of /curves. `tone` gives the class of a series.
export function drawChart(chart, tone = (one) => `c${one.style} s-${one.stage}`) {
  return chart.unit === "s" ? drawBars(chart, tone) : drawCurves(chart, tone);
}

function drawCurves(chart, tone) {
  const form = chart.share ? percent : number;
  const axis = axisOf(chart.series.flatMap((one) => (one.low ? [...one.mean, ...one.low, ...one.high] : one.mean)), chart.share);
  const places = panels(chart);
  const at = (value) => HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM);
  const figure = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  frame(figure, axis, places, form, axis.log);
  const points = [];
  for (const one of chart.series) {
    const panel = places.find((candidate) => candidate.stage === one.stage);
    const xs = one.steps.map((step) => across(panel, step));
    if (one.low) {
      const corners = [...xs.map((x, index) => [x, at(one.high[index])]), ...xs.map((x, index) => [x, at(one.low[index])]).reverse()];
      figure.append(svg("path", { class: `spread ${tone(one)}`, d: `${path(corners)}Z` }));
    }
    const raw = xs.map((x, index) => [x, at(one.mean[index])]);
    if (!chart.marked && isNoisy(one.mean)) {
      if (!one.low) figure.append(svg("path", { class: `curve raw ${tone(one)}`, d: path(raw) }));
      const means = smooth(one.mean);
      figure.append(svg("path", { class: `curve ${tone(one)}`, d: path(xs.map((x, index) => [x, at(means[index])])) }));
    } else figure.append(svg("path", { class: `curve ${tone(one)}`, d: path(raw) }));
    if (chart.marked || one.steps.length === 1) for (const [x, y] of raw) figure.append(svg("circle", { class: `dot ${tone(one)}`, cx: x, cy: y, r: 3.4 }));
    const end = raw[raw.length - 1];
    figure.append(svg("circle", { class: `end ${tone(one)}`, cx: end[0], cy: end[1], r: 3.2 }));
    raw.forEach(([x, y], index) => points.push({ x, y, tip: `${one.stage.toUpperCase()} step ${one.steps[index]}: ${one.label} ${form(one.mean[index])}${one.run ? ` · ${one.run}` : ""}` }));
  }
  hover(figure, points);
  return figure;
}

function drawBars(chart, tone) {
  const places = panels(chart);
  const columns = new Map();
  for (const one of chart.series) one.steps.forEach((step, index) => {
    const key = `${one.stage} ${Math.round((index / one.steps.length) * 60)}`;
    const column = columns.get(key) || { stage: one.stage, step, parts: [] };
    column.parts.push({ one, value: Math.max(0, one.mean[index]) });
    columns.set(key, column);
  });
  const heights = [...columns.values()].map((column) => column.parts.reduce((sum, part) => sum + part.value, 0));
  const axis = axisOf([0, ...heights], false);
  const figure = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  frame(figure, axis, places, number, false);
  const at = (value) => HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM);
  const points = [];
  for (const panel of places) {
    const own = [...columns.values()].filter((column) => column.stage === panel.stage);
    const pitch = (panel.right - panel.left) / own.length;
    own.forEach((column, index) => {
      let floor = 0;
      for (const part of column.parts) {
        const top = at(floor + part.value);
        figure.append(svg("rect", { class: `bar ${tone({ ...part.one, stage: "" })}`, x: panel.left + index * pitch + 0.1 * pitch, y: top, width: 0.8 * pitch, height: Math.max(0, at(floor) - top) }));
        floor += part.value;
      }
      points.push({ x: panel.left + (index + 0.5) * pitch, y: at(floor), tip: `step ${column.step}: ${column.parts.map((part) => `${part.one.label} ${number(part.value)} s`).join(", ")}` });
    });
  }
  hover(figure, points);
  return figure;
}

function hover(figure, points) {
  const cross = svg("line", { class: "cross", y1: TOP - 3, y2: HEIGHT - BOTTOM + 3, x1: 0, x2: 0, visibility: "hidden" });
  const ring = svg("circle", { class: "ring", r: 4.5, cx: 0, cy: 0, visibility: "hidden" });
  figure.append(cross, ring);
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); ring.setAttribute("visibility", "hidden"); };
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * HEIGHT;
    let best = null, least = Infinity;
    for (const point of points) {
      const distance = Math.abs(point.x - x) * 3 + Math.abs(point.y - y);
      if (distance < least) { least = distance; best = point; }
    }
    if (!best) return hide();
    for (const line of [cross]) { line.setAttribute("x1", best.x); line.setAttribute("x2", best.x); line.setAttribute("visibility", "visible"); }
    ring.setAttribute("cx", best.x); ring.setAttribute("cy", best.y); ring.setAttribute("visibility", "visible");
    tip.textContent = best.tip;
    tip.hidden = false;
    const left = box.left + (best.x / WIDTH) * box.width, half = tip.offsetWidth / 2 + 6;
    tip.style.setProperty("left", `${Math.min(Math.max(left, half), innerWidth - half) + scrollX}px`);
    tip.style.setProperty("top", `${box.top + (best.y / HEIGHT) * box.height + scrollY}px`);
  });
  figure.addEventListener("pointerleave", hide);
}

export function spark(values) {
  const finite = values.filter(Number.isFinite);
  const figure = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (finite.length < 2) return figure;
  const low = Math.min(...finite), high = Math.max(...finite), span = high - low || 1;
  const places = finite.map((value, index) => [(index / (finite.length - 1)) * 100, 21 - ((value - low) / span) * 18]);
  figure.append(svg("path", { class: "spark-area", d: `${path(places)}L100 24L0 24Z` }), svg("path", { class: "spark-line", d: path(places) }));
  return figure;
}
