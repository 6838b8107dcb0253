/** Draws the charts, one figure each; the pointer or the arrow keys show the values of a sample. */

import { CHARTS, WIDTH, across, minutes, plot, span, told } from "./charts.js";
import { byId, copy, element, fill, write } from "./dom.js";
import { clock } from "./formats.js";
import { nearest } from "./samples.js";

const SVG = "http://www.w3.org/2000/svg";
const figures = [];
let shown = { samples: [], pauses: [], time: { now: 0, span: span([]) } };

export function start() {
  CHARTS.forEach((chart, place) => {
    const figure = copy("chart");
    legend(figure.querySelector(".legend"), chart);
    byId("charts").append(figure);
    const entry = { chart, place, figure, at: null };
    figures.push(entry);
    listen(entry);
  });
  draw([], [], 0);
}

/** Redraw all charts. */
export function draw(samples, pauses, now) {
  shown = { samples, pauses, time: { now, span: span(samples) } };
  figures.forEach(drawOne);
}

function legend(place, chart) {
  chart.series.filter(({ name }) => name).forEach(({ name }, number) => {
    place.append(element("span", {}, element("i", { className: `swatch line-${number + 1}` }), name));
  });
  place.append(element("span", { className: "span" }));
}

function drawOne(entry) {
  const drawn = plot(entry.place, shown.samples, shown.pauses, shown.time);
  const svg = entry.figure.querySelector("svg");
  svg.replaceChildren(
    ...drawn.bands.map((band) => shape("rect", "pause", { x: band.x, width: band.width, y: 0, height: 100 })),
    shape("path", "grid", { d: `M0 100H${WIDTH}M0 0H${WIDTH}` }),
    ...(drawn.area ? [shape("path", "area", { d: drawn.area })] : []),
    ...drawn.lines.map((d, number) => shape("path", `line-${number + 1}${entry.chart.dots ? " dots" : ""}`, { d })),
  );
  svg.setAttribute("aria-label", drawn.label);
  fill(entry.figure, drawn);
  write(entry.figure.querySelector(".span"), minutes(shown.time.span));
  point(entry);
}

function shape(name, className, attributes) {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", className);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// --- cursor ---

function listen(entry) {
  const plotted = entry.figure.querySelector(".plot");
  plotted.addEventListener("pointermove", (event) => {
    const box = plotted.getBoundingClientRect();
    choose(entry, shown.time.now - shown.time.span * (1 - (event.clientX - box.left) / box.width));
  });
  plotted.addEventListener("pointerleave", () => choose(entry, null));
  entry.figure.addEventListener("blur", () => choose(entry, null));
  entry.figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !shown.samples.length) return;
    event.preventDefault();
    const place = entry.at === null ? shown.samples.length : nearest(shown.samples, entry.at);
    const next = Math.max(0, Math.min(shown.samples.length - 1, place + step));
    choose(entry, shown.samples[next].time);
  });
}

function choose(entry, time) {
  entry.at = time;
  drawOne(entry);
}

function point({ chart, place, figure, at }) {
  const sample = at === null ? null : shown.samples[nearest(shown.samples, at)];
  const cursor = figure.querySelector(".cursor");
  cursor.hidden = !sample;
  if (!sample) return write(figure.querySelector(".title"), chart.title);
  cursor.style.left = `${(across(sample.time, shown.time) / WIDTH) * 100}%`;
  write(figure.querySelector(".title"), clock(sample.time));
  return write(figure.querySelector(".now"), told(place, [], sample));
}
