/** Draws the charts, one figure each; the pointer or the arrow keys show the values of a sample in all of them. */

import { CHARTS, WIDTH, across, minutes, plot, reading, span } from "./charts.js";
import { byId, copy, element, fill, write } from "./dom.js";
import { clock } from "./formats.js";
import { nearest } from "./samples.js";

const SVG = "http://www.w3.org/2000/svg";
const figures = [];
let shown = { samples: [], pauses: [], time: { now: 0, span: span([]) } };
let moment = null; // the time under the cursor, the same in all charts

export function start() {
  CHARTS.forEach((chart, place) => {
    const figure = copy("chart");
    legend(figure.querySelector(".legend"), chart);
    figure.querySelector(".plot").setAttribute("aria-label", chart.title);
    byId("charts").append(figure);
    figures.push({ place, figure });
    listen(figure.querySelector(".plot"));
  });
  draw([], [], 0);
}

/** Redraw all charts. */
export function draw(samples, pauses, now) {
  shown = { samples, pauses, time: { now, span: span(samples) } };
  figures.forEach(drawOne);
}

function legend(place, { series }) {
  series.filter(({ name }) => name).forEach(({ name }, number) => {
    place.append(element("span", {}, element("i", { className: `swatch line-${number + 1}` }), `${name} `, element("b")));
  });
  place.append(element("span", { className: "span" }));
}

function drawOne({ place, figure }) {
  const drawn = plot(place, shown.samples, shown.pauses, shown.time);
  figure.querySelector("svg").replaceChildren(
    ...drawn.bands.map((band) => shape("rect", "pause", { x: band.x, width: band.width, y: 0, height: 100 })),
    shape("path", "grid", { d: `M0 100H${WIDTH}M0 0H${WIDTH}` }),
    ...(drawn.area ? [shape("path", "area", { d: drawn.area })] : []),
    ...drawn.lines.map((d, number) => shape("path", `line-${number + 1}`, { d })),
  );
  const sample = moment === null ? null : shown.samples[nearest(shown.samples, moment)] ?? null;
  const told = sample ? reading(place, sample) : drawn;
  fill(figure, { ...drawn, now: told.now });
  figure.querySelectorAll(".legend b").forEach((node, number) => write(node, told.values[number]));
  write(figure.querySelector(".span"), sample ? clock(sample.time) : minutes(shown.time.span));
  point(figure.querySelector(".plot"), sample, told.label);
}

function shape(name, className, attributes) {
  const made = document.createElementNS(SVG, name);
  made.setAttribute("class", className);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// --- cursor ---

const STEPS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };

/** The pointer and the keys move the same cursor. */
function listen(plotted) {
  plotted.addEventListener("pointermove", (event) => {
    const box = plotted.getBoundingClientRect();
    choose(shown.time.now - shown.time.span * (1 - (event.clientX - box.left) / box.width));
  });
  plotted.addEventListener("pointerleave", () => choose(null));
  plotted.addEventListener("blur", () => choose(null));
  plotted.addEventListener("keydown", (event) => {
    const { samples } = shown;
    if (event.key === "Escape") choose(null);
    if (!(event.key in STEPS) || !samples.length) return;
    event.preventDefault();
    const place = moment === null ? samples.length : nearest(samples, moment);
    choose(samples[Math.max(0, Math.min(samples.length - 1, place + STEPS[event.key]))].time);
  });
}

function choose(time) {
  moment = time;
  figures.forEach(drawOne);
}

function point(plotted, sample, label) {
  const cursor = plotted.querySelector(".cursor");
  const { samples, time } = shown;
  cursor.hidden = !sample;
  if (sample) cursor.style.left = `${(across(sample.time, time) / WIDTH) * 100}%`;
  plotted.setAttribute("aria-valuemax", String(Math.max(0, samples.length - 1)));
  plotted.setAttribute("aria-valuenow", String(sample ? samples.indexOf(sample) : Math.max(0, samples.length - 1)));
  plotted.setAttribute("aria-valuetext", sample ? `${clock(sample.time)}: ${label}` : label);
}
