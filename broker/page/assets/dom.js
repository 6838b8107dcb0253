/** DOM helpers: fill templates, update lists, create elements. They never parse HTML. */

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Clone the content of the `<template>` with this name. */
export const copy = (name) => byId(`${name}-template`).content.firstElementChild.cloneNode(true);

/** Set text if it differs: unchanged text is not read aloud again and stays selected. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Write values into the elements that name them: `data-text`, `data-value` (of a progress), `data-when`
 * (shown if true). A `tone` is the element's own.
 */
export function fill(root, values) {
  if (values.tone) root.dataset.tone = values.tone;
  for (const node of root.querySelectorAll("[data-text], [data-value], [data-when]")) {
    const { text, value, when } = node.dataset;
    if (text && text in values) write(node, String(values[text]));
    if (value && value in values) node.value = values[value];
    if (when && when in values) node.hidden = !values[when];
  }
}

/**
 * Update a list to one element per item, in order; existing elements are reused, so they keep the focus.
 * @param make called for each new item; @param update called with element and item for each item
 */
export function keep(list, items, make, update) {
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => known.get(item.key) ?? make(item));
  const stay = new Set(wanted);
  for (const child of [...list.children]) if (!stay.has(child)) child.remove();
  wanted.forEach((child, place) => {
    child.dataset.key = items[place].key;
    if (list.children[place] !== child) list.insertBefore(child, list.children[place] ?? null);
    update(child, items[place]);
  });
}
