/** The last minutes in numbers, as the server samples them: kept, and asked. Pure. */

const SAMPLES_MAX = 300;

/**
 * The samples known, and those that are new in a status document's `history`.
 * @returns {object[]} the eldest first, each with a value for every column of the history
 */
export function joined(samples, history) {
  if (!history) return samples;
  const last = samples.at(-1)?.time ?? -Infinity;
  // The same sample's time wavers by a millisecond from one document to the next.
  const fresh = history.rows.map((row) => named(history.columns, row)).filter((s) => s.time > last + 0.1);
  return [...samples, ...fresh].slice(-SAMPLES_MAX);
}

const named = (columns, row) => Object.fromEntries(columns.map((column, place) => [column, row[place]]));

/** The last value of a column that is known, not older than so many samples; else null. */
export function latest(samples, column, within = SAMPLES_MAX) {
  return samples.slice(-within).findLast((sample) => sample[column] !== null)?.[column] ?? null;
}

/** The greatest value of some columns. */
export function greatest(samples, columns) {
  return Math.max(0, ...samples.flatMap((sample) => columns.map((column) => sample[column] ?? 0)));
}

/** The place of the sample nearest to a moment; -1 where there is none. */
export function nearest(samples, time) {
  const distances = samples.map((sample) => Math.abs(sample.time - time));
  return distances.indexOf(Math.min(...distances));
}
