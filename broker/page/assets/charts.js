/** Definitions of the charts, and their SVG paths in a box of 300 by 100. Pure. Values may be missing. */

import { bytes, count, percent, rate, seconds } from "./formats.js";
import { greatest, latest } from "./samples.js";

export const WIDTH = 300;
export const HEIGHT = 100;
const SPANS_S = [60, 120, 180, 240, 300];

const one = (column) => [{ column, name: "" }];
const both = ([running, waiting]) => (waiting ? `${count(running)} + ${count(waiting)}` : count(running));

export const CHARTS = [
  { title: "Tokens per second", series: one("tokens_per_s"), write: rate, within: 1 },
  { title: "Time to first token", write: seconds, isLogarithmic: true, within: 1,
    series: [{ column: "first_token_p50_s", name: "p50" }, { column: "first_token_p95_s", name: "p95" }] },
  { title: "Batch size", series: one("batch"), write: rate, atLeast: 4, within: 5 },
  { title: "Active requests", series: [{ column: "running", name: "running" }, { column: "waiting", name: "waiting" }],
    write: count, head: both, atLeast: 4, within: 1 },
  { title: "Prefix-cache hit rate", series: one("cache_hit_rate_1m"), write: percent, most: 1, within: 1 },
  { title: "Memory", within: 1, write: bytes, base: 1024,
    series: [{ column: "resident_bytes", name: "process" }, { column: "device_bytes", name: "device" },
      { column: "cache_bytes", name: "cache" }] },
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
 * @returns {{title, now, top, bottom, label, lines, area, bands}} SVG paths and texts; `bands` are pauses: x and width
 */
export function plot(place, samples, pauses, time) {
  const chart = CHARTS[place];
  const columns = chart.series.map((series) => series.column);
  const scale = chart.isLogarithmic ? logarithmic(samples, columns) : linear(chart, samples, columns);
  const runs = columns.map((column) => points(samples, column, time, scale));
  const values = columns.map((column) => current(chart, samples, column));
  return {
    title: chart.title,
    now: head(chart, values),
    top: scale.top ? chart.write(scale.top) : "",
    bottom: scale.bottom ? chart.write(scale.bottom) : "",
    label: `${told(place, values)}; at most ${chart.write(greatest(samples, columns))} in ${minutes(time.span)}`,
    values: values.map(chart.write),
    lines: runs.map(path),
    area: columns.length === 1 ? area(runs[0]) : "",
    bands: pauses.map((pause) => band(pause, time)).filter((found) => found.width > 0),
  };
}

const current = (chart, samples, column) => latest(samples, column, chart.within);

const head = (chart, values) => (chart.head ? chart.head(values) : chart.write(values[0]));

/** Return what a chart shows of one sample. @returns {{now, label, values}} texts; `values` of each series */
export function reading(place, sample) {
  const chart = CHARTS[place];
  const values = chart.series.map(({ column }) => sample[column]);
  return { now: head(chart, values), label: told(place, values), values: values.map(chart.write) };
}

function told(place, values) {
  const { series, write } = CHARTS[place];
  return series.map(({ name }, number) => `${name} ${write(values[number])}`.trim()).join(", ");
}

export const minutes = (span) => `${span / 60} min`;

// --- scales ---

/** Return the scale from 0 to a round number above all values. */
function linear(chart, samples, columns) {
  const top = chart.most ?? ceiling(Math.max(greatest(samples, columns), chart.atLeast ?? 0), chart.base);
  return { top, bottom: 0, share: (value) => (top ? value / top : 0) };
}

/** Return the logarithmic scale around all values, of a decade or more: an outlier leaves the others apart. */
function logarithmic(samples, columns) {
  const values = samples.flatMap((sample) => columns.map((column) => sample[column])).filter((value) => value > 0);
  if (!values.length) return { top: 0, bottom: 0, share: () => 0 };
  const top = ceiling(Math.max(...values));
  const bottom = Math.min(top / 10, 10 ** Math.floor(Math.log10(Math.min(...values))));
  return { top, bottom, share: (value) => Math.log(Math.max(value, bottom) / bottom) / Math.log(top / bottom) };
}

/** Round up to 1, 2 or 5 times a power of ten, in units that are powers of `base`. */
export function ceiling(value, base = 10) {
  if (value <= 0) return 0;
  const unit = base === 10 ? 1 : base ** Math.floor(Math.log(value) / Math.log(base));
  const power = 10 ** Math.floor(Math.log10(value / unit)) * unit;
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999999);
}

/** Return runs of points; a missing value ends a run. */
function points(samples, column, time, { top, share }) {
  const runs = [[]];
  for (const sample of samples) {
    const x = across(sample.time, time);
    if (sample[column] === null) runs.push([]);
    else if (x >= 0 && top > 0) runs.at(-1).push([x, HEIGHT * (1 - Math.min(1, share(sample[column])))]);
  }
  return runs.filter((run) => run.length);
}

const at = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

/** A line of one point has no length, and is drawn as a dot because of its round caps. */
const path = (runs) => runs.map((run) => `M${run.map(at).join("L")}${run.length === 1 ? "h0.01" : ""}`).join("");

const area = (runs) =>
  runs.map((run) => `M${run[0][0].toFixed(1)} ${HEIGHT}L${run.map(at).join("L")}V${HEIGHT}Z`).join("");

function band(pause, time) {
  const [from, to] = [pause.from, pause.to ?? time.now].map((moment) => Math.max(0, across(moment, time)));
  return { x: from, width: to > 0 ? Math.max(1, to - from) : 0 };
}
