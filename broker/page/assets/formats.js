/** Formats numbers for people. Pure. A missing value is a dash. */

const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const known = (value, write) => (value === null || value === undefined ? NONE : write(value));
const digits = (value) => value.toFixed(value < 10 && value !== Math.round(value) ? 1 : 0);

export const count = (value) => known(value, (n) => Math.round(n).toLocaleString("en-US"));
export const rate = (value) => known(value, digits);
export const percent = (value) => known(value, (share) => `${Math.round(share * 100)}%`);

export function bytes(value) {
  return known(value, (left) => {
    let unit = 0;
    for (; left >= 1024 && unit < UNITS.length - 1; unit += 1) left /= 1024;
    return `${digits(left)} ${UNITS[unit]}`;
  });
}

/** Format a duration: in milliseconds below a second, to the minute above an hour. */
export function seconds(value) {
  return known(value, (s) => {
    if (s < 1) return `${Math.round(s * 1000)} ms`;
    if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
    const minutes = Math.floor(s / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
    return `${Math.floor(minutes / 1440)} days`;
  });
}

/** Format Unix time as local time of day. */
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

/** Join the nonempty parts with dots. */
export const listed = (...parts) => parts.filter(Boolean).join(" · ");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
