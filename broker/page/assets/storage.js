/** The browser's storage. It may be forbidden or full: the page works without it. */

/**
 * Return the text stored under a name; empty if there is none.
 * @param {"local" | "session"} area for all tabs until it is deleted, or for this tab until it is closed
 */
export function load(area, name) {
  try {
    return window[`${area}Storage`].getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** Store a text, or delete it if it is empty. Returns whether that was possible. */
export function save(area, name, text) {
  try {
    const place = window[`${area}Storage`];
    if (text) place.setItem(name, text);
    else place.removeItem(name);
    return true;
  } catch {
    return false;
  }
}
