"""Accessibility checks of an open page, as Lighthouse makes them. Each returns a list of defects."""

from __future__ import annotations

from typing import Any

from tests.browser.chromium import Page

NAMED_ROLES = frozenset(
    (
        *("button", "checkbox", "combobox", "DisclosureTriangle", "image", "link", "progressbar", "radio"),
        *("region", "searchbox", "slider", "spinbutton", "switch", "tab", "tablist", "tabpanel", "textbox"),
    )
)
"""Roles that need an accessible name."""

VISIBLE = "const visible = e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true });"

HEADINGS = """
return [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter(visible)
  .map(e => [Number(e.tagName[1]), e.innerText]);
"""

# Text against the colors behind it; WCAG 2.2, 1.4.3. Disabled controls are exempt.
CONTRAST = """
  const numbers = color => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const parsed = color => {
    const [r, g, b, alpha = 1] = numbers(color);
    return color.startsWith('color(') ? [r * 255, g * 255, b * 255, alpha] : [r, g, b, alpha];
  };
  const over = (top, below) => [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3]));
  const ground = e => {
    if (!e) return [255, 255, 255];
    const own = parsed(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(e.parentElement));
  };
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const defects = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    const text = walker.currentNode.nodeValue.trim();
    if (!text || !visible(e) || e.closest('.unseen, .skip, :disabled, script, style, option')) continue;
    const style = getComputedStyle(e);
    const below = ground(e);
    const pair = [luminance(over(parsed(style.color), below)), luminance(below)].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (ratio < least) defects.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return defects;
"""

# Within a section, what is reached next is never entirely above, unless it is in a column to the right.
FOCUS_ORDER = """
  const focusable = 'a[href], button, input, select, textarea, summary, [tabindex]';
  const reached = [...document.querySelectorAll(focusable)].filter(
    e => !e.disabled && e.tabIndex >= 0 && visible(e) && !e.closest('.skip, .unseen'));
  const scroller = e => {
    for (e = e.parentElement; e; e = e.parentElement) {
      if (/auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight) return e;
    }
    return null;
  };
  const shown = (e, other) => {  // what its scrolling box shows of it, unless the other is in the same box
    const [box, within] = [e.getBoundingClientRect(), scroller(e)];
    if (!within || within === scroller(other)) return box;
    const { top, bottom } = within.getBoundingClientRect();
    const inside = y => Math.min(Math.max(y, top), bottom);
    return { top: inside(box.top), bottom: inside(box.bottom), left: box.left, right: box.right };
  };
  const defects = reached.filter(e => e.tabIndex > 0).map(e => `tabindex of ${e.outerHTML.slice(0, 60)}`);
  reached.slice(1).forEach((e, place) => {
    const before = reached[place];
    if (before.contains(e) || e.closest('section') !== before.closest('section')) return;
    const [one, next] = [shown(before, e), shown(e, before)];
    if (next.bottom <= one.top && next.left < one.right) {
      defects.push(`${e.outerHTML.slice(0, 60)} comes after ${before.outerHTML.slice(0, 60)}`);
    }
  });
  return defects;
"""


def unnamed_controls(page: Page) -> list[str]:
    """Return controls without an accessible name, as the browser computes it."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    return [_described(node) for node in nodes if _needs_name(node) and not _value(node, "name")]


def _needs_name(node: dict[str, Any]) -> bool:
    return not node.get("ignored") and _value(node, "role") in NAMED_ROLES


def _value(node: dict[str, Any], field: str) -> str:
    return str(node.get(field, {}).get("value", "")).strip()


def _described(node: dict[str, Any]) -> str:
    return f"{_value(node, 'role')}: {node.get('properties')}"


def _run(page: Page, script: str) -> list[Any]:
    return list(page.run(f"(() => {{ {VISIBLE} {script} }})()"))


def disordered_headings(page: Page) -> list[str]:
    """Return headings that skip a level."""
    headings = _run(page, HEADINGS)
    levels = [0, *(level for level, _ in headings)]
    return [
        f"h{level} {text!r} after h{before}"
        for (level, text), before in zip(headings, levels, strict=False)
        if level > before + 1
    ]


def defects(page: Page) -> list[str]:
    """Return all defects of what is visible now."""
    checks = (
        _run(page, CONTRAST),
        _run(page, FOCUS_ORDER),
        disordered_headings(page),
        unnamed_controls(page),
    )
    return [defect for found in checks for defect in found]
