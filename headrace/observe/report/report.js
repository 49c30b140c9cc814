"use strict";
// Reads a chart under the pointer: the nearest point's text, beside it. Without this script the SVG titles do it.
const tip = document.getElementById("tip");

function nearest(chart, event) {
  const box = chart.getBoundingClientRect();
  const scale = chart.viewBox.baseVal.width / box.width;
  const x = (event.clientX - box.left) * scale;
  const y = (event.clientY - box.top) * scale;
  let best = null;
  let least = Infinity;
  for (const point of chart.querySelectorAll(".pt")) {
    const far = Math.abs(point.dataset.x - x) + 0.2 * Math.abs(point.dataset.y - y);
    if (far < least) [best, least] = [point, far];
  }
  return best && { point: best, left: box.left + best.dataset.x / scale, top: box.top + best.dataset.y / scale };
}

function hide(chart) {
  tip.hidden = true;
  for (const point of chart.querySelectorAll(".pt.on")) point.classList.remove("on");
}

for (const chart of document.querySelectorAll("svg.chart")) {
  for (const title of chart.querySelectorAll("title")) title.remove();
  chart.addEventListener("pointermove", (event) => {
    hide(chart);
    const found = nearest(chart, event);
    if (!found) return;
    found.point.classList.add("on");
    tip.textContent = found.point.dataset.tip;
    tip.hidden = false;
    const half = tip.offsetWidth / 2 + 8;
    const left = Math.min(Math.max(found.left, half), document.documentElement.clientWidth - half);
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${found.top + window.scrollY}px`;
  });
  chart.addEventListener("pointerleave", () => hide(chart));
}
document.documentElement.dataset.ready = "yes";
