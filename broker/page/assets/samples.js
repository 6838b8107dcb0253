/** Samples of the last minutes from the server, and queries on them. Pure. */

const SAMPLES_MAX = 300;

/**
 * Return the samples with the new ones of a status document's `history` added.
 * @returns {object[]} the oldest first, each with a value for every column of the history
 */
export function joined(samples, history) {
  if (!history) return samples;
  const last = samples.at(-1)?.time ?? -Infinity;
  // The time of the same sample varies by a millisecond between documents.
  const fresh = history.rows.map((row) => named(history.columns, row)).filter((s) => s.time > last + 0.1);
  return [...samples, ...fresh].slice(-SAMPLES_MAX);
}

const named = (columns, row) => Object.fromEntries(columns.map((column, place) => [column, row[place]]));

/** Return the last known value of a column within the last `within` samples, or null. */
export function latest(samples, column, within = SAMPLES_MAX) {
  return samples.slice(-within).findLast((sample) => sample[column] !== null)?.[column] ?? null;
}

/** Return the maximum over some columns. */
export function greatest(samples, columns) {
  return Math.max(0, ...samples.flatMap((sample) => columns.map((column) => sample[column] ?? 0)));
}

/** Return the index of the sample nearest to a time; -1 if there are none. */
export function nearest(samples, time) {
  const distances = samples.map((sample) => Math.abs(sample.time - time));
  return distances.indexOf(Math.min(...distances));
}
