/** Definitions of the charts, and their SVG paths in a box of 300 by 100. Pure. Values may be missing. */

import { bytes, count, percent, rate, seconds } from "./formats.js";
import { greatest, latest } from "./samples.js";

export const WIDTH = 300;
export const HEIGHT = 100;
/** Maximum age in samples of the number above a chart, for values that do not come every second. */
const RECENT = 60;
const SPANS_S = [60, 120, 180, 240, 300];

const one = (column) => [{ column, name: "" }];
const both = ([running, waiting]) => (waiting ? `${count(running)} + ${count(waiting)}` : count(running));

export const CHARTS = [
  { title: "Tokens per second", series: one("tokens_per_s"), write: rate, within: 1 },
  { title: "Time to first token", series: one("time_to_first_token_s"), write: seconds, dots: true },
  { title: "Batch size", series: one("batch"), write: rate, atLeast: 4, within: 5 },
  { title: "Requests", series: [{ column: "running", name: "running" }, { column: "waiting", name: "waiting" }],
    write: count, head: both, atLeast: 4, within: 1 },
  { title: "Cache hit rate", series: one("cache_hit_rate"), write: percent, most: 1, dots: true },
  { title: "Memory", within: 1, write: bytes, base: 1024,
    series: [{ column: "resident_bytes", name: "process" }, { column: "device_bytes", name: "device" },
      { column: "cache_bytes", name: "KV cache" }] },
];

/** Return the time span shown, in seconds: the age of the samples in whole minutes, up to five. */
export function span(samples) {
  const age = samples.length ? samples.at(-1).time - samples[0].time : 0;
  return SPANS_S.find((each) => each >= age - 2) ?? SPANS_S.at(-1);
}

/** Return the x coordinate of a time, on an axis that ends at `now`. */
export const across = (time, { now, span: width }) => WIDTH * (1 - (now - time) / width);

/**
 * Return the chart at an index of `CHARTS`, for the time axis `{now, span}`, both in seconds.
 * @returns {{title, now, top, label, lines, area, bands}} SVG paths and texts; `bands` are pauses: x and width
 */
export function plot(place, samples, pauses, time) {
  const chart = CHARTS[place];
  const columns = chart.series.map((series) => series.column);
  const top = chart.most ?? ceiling(Math.max(greatest(samples, columns), chart.atLeast ?? 0), chart.base);
  const runs = columns.map((column) => points(samples, column, time, top));
  return {
    title: chart.title,
    now: head(chart, samples),
    top: top ? chart.write(top) : "",
    label: `${chart.title}: ${told(place, samples)}; at most ${chart.write(greatest(samples, columns))} in ${minutes(time.span)}`,
    lines: runs.map(chart.dots ? dots : path),
    area: columns.length === 1 && !chart.dots ? area(runs[0]) : "",
    bands: pauses.map((pause) => band(pause, time)).filter((found) => found.width > 0),
  };
}

const current = (chart, samples, column) => latest(samples, column, chart.within ?? RECENT);

function head(chart, samples) {
  const values = chart.series.map(({ column }) => current(chart, samples, column));
  return chart.head ? chart.head(values) : chart.write(values[0]);
}

export const minutes = (span) => `${span / 60} min`;

/** Return the current values of a chart, or those of one sample, as text. */
export function told(place, samples, sample = null) {
  const chart = CHARTS[place];
  const values = chart.series.map(({ column, name }) => {
    const value = sample ? sample[column] : current(chart, samples, column);
    return `${name} ${chart.write(value)}`.trim();
  });
  return values.join(", ");
}

/** Round up to 1, 2 or 5 times a power of ten, in units that are powers of `base`. */
export function ceiling(value, base = 10) {
  if (value <= 0) return 0;
  const unit = base === 10 ? 1 : base ** Math.floor(Math.log(value) / Math.log(base));
  const power = 10 ** Math.floor(Math.log10(value / unit)) * unit;
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999999);
}

/** Return runs of points; a missing value ends a run. */
function points(samples, column, time, top) {
  const runs = [[]];
  for (const sample of samples) {
    const x = across(sample.time, time);
    if (sample[column] === null) runs.push([]);
    else if (x >= 0 && top > 0) runs.at(-1).push([x, HEIGHT * (1 - Math.min(1, sample[column] / top))]);
  }
  return runs.filter((run) => run.length);
}

const at = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

/** A zero-length line is drawn as a dot, because of its round caps. */
const DOT = "h0.01";
const dots = (runs) => runs.flat().map((point) => `M${at(point)}${DOT}`).join("");
const path = (runs) => runs.map((run) => `M${run.map(at).join("L")}${run.length === 1 ? DOT : ""}`).join("");

const area = (runs) =>
  runs.map((run) => `M${run[0][0].toFixed(1)} ${HEIGHT}L${run.map(at).join("L")}V${HEIGHT}Z`).join("");

function band(pause, time) {
  const [from, to] = [pause.from, pause.to ?? time.now].map((moment) => Math.max(0, across(moment, time)));
  return { x: from, width: to > 0 ? Math.max(1, to - from) : 0 };
}
