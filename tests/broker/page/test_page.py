"""Files of the page: how they are served, and checks that need no browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import PurePath

import pytest

from broker.page.page import PATHS, files
from tests.broker.application import House
from tests.broker.page.scripts import ASSETS

INDEX = (ASSETS / "index.html").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in ASSETS.glob("*.js")}
STYLES = {path.name: path.read_text(encoding="utf-8") for path in ASSETS.glob("*.css")}


class Markup(HTMLParser):
    """Parser that records every element's name and attributes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


MARKUP = Markup(INDEX)
IDS = [attributes["id"] for _, attributes in MARKUP.elements if "id" in attributes]


TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/html"}


async def test_the_page_needs_no_key_and_runs_nothing_from_elsewhere() -> None:
    keyed = House(api_keys=("sesame",))
    for path in PATHS:
        answer = await keyed.get(path).end()
        assert answer.status == 200
        assert answer.body == files()[path].content
        assert answer.headers["content-type"].startswith(TYPES[PurePath(path).suffix])
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = await keyed.get(path, if_none_match=answer.headers["etag"]).end()
        assert (again.status, again.body) == (304, b"")
        assert (await keyed.get(path, if_none_match='"other"').end()).status == 200
    for path in ("/v1/status", "/v1/status/stream", "/v1/models", "/page/main.js/../../v1/status"):
        assert (await keyed.get(path).end()).status == 401, "its data needs a key"


# --- contents ---


def test_markup_has_no_inline_scripts_or_styles() -> None:
    for tag, attributes in MARKUP.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], attributes
        assert tag != "style"
        assert tag != "script" or attributes.get("src")


def test_the_files_that_are_named_are_those_that_are_served() -> None:
    named = re.findall(r'(?:src|href)="([^"#]+)"', INDEX)
    named += [f"/page/{name}" for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert set(named) == PATHS - {"/"}


def test_page_references_no_external_urls() -> None:
    for name, text in {"index.html": INDEX, **SCRIPTS, **STYLES}.items():
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert "@import" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_never_turns_text_into_markup_or_code(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|javascript:"
    assert not re.search(forbidden, SCRIPTS[name])


def test_no_color_is_named_outside_of_the_table_of_colors() -> None:
    known = set(re.findall(r"--([\w-]+): light-dark\(", STYLES["colors.css"]))
    for name in STYLES.keys() - {"colors.css"}:
        assert not re.findall(r"(?<![\w&-])#[0-9a-fA-F]{3,8}\b(?!\s*\{)", STYLES[name]), name
        assert set(re.findall(r"var\(--([\w-]+)\)", STYLES[name])) <= known | {"unlikely"}, name


def test_scripts_and_markup_mean_the_same_elements() -> None:
    assert len(IDS) == len(set(IDS))
    text = "".join(SCRIPTS.values())
    meant = set(re.findall(r'byId\("([\w-]+)"\)', text))
    meant |= {f"{name}-template" for name in re.findall(r'copy\("(\w+)"\)', text)}
    assert len(meant) > 20
    assert meant <= set(IDS)


# --- accessibility ---


def test_every_control_has_a_name() -> None:
    labelled = re.findall(r"<label\b.*?</label>", INDEX, re.DOTALL)
    inside = [attributes for text in labelled for tag, attributes in Markup(text).elements]
    for tag, attributes in MARKUP.elements:
        if tag in ("input", "select", "textarea"):
            assert "aria-label" in attributes or attributes in inside, attributes
        if tag in ("dialog", "progress", "nav"):
            assert "aria-label" in attributes or "aria-labelledby" in attributes, attributes
    for _, attributes in MARKUP.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name) is None or attributes[name] in IDS


def test_clickable_elements_are_keyboard_accessible() -> None:
    clicked = set(re.findall(r'byId\("([\w-]+)"\)\.addEventListener\("click"', "".join(SCRIPTS.values())))
    assert clicked
    for tag, attributes in MARKUP.elements:
        assert attributes.get("tabindex", "0") == "0"
        assert attributes.get("id") not in clicked or tag == "button", attributes
    assert ":focus-visible" in STYLES["frame.css"]
    assert not re.search(r"outline:\s*(none|0)", "".join(STYLES.values()))


# Foreground, backgrounds, and the minimum contrast by WCAG 2.2 (AA).
SHAPES = ("control", "good", "busy", "bad", "idle", "line-1", "line-2", "line-3")
APART = [
    *((text, ("ground", "surface", "sunken"), 4.5) for text in ("ink", "muted", "accent")),
    *((text, ("surface",), 4.5) for text in ("bad", "busy", "good")),
    *((text, ("bad-ground",), 4.5) for text in ("ink", "bad")),
    ("on-accent", ("accent",), 4.5),
    *((shape, ("surface",), 3.0) for shape in SHAPES),
    ("control", ("ground",), 3.0),
    ("accent", ("sunken",), 3.0),
]


def luminance(color: str) -> float:
    """Return the relative luminance of an sRGB color."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_are_far_enough_apart(theme: str) -> None:
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", STYLES["colors.css"])
    brightness = {name: luminance(light if theme == "light" else dark) for name, light, dark in pairs}
    for what, grounds, least in APART:
        for ground in grounds:
            darker, lighter = sorted((brightness[what], brightness[ground]))
            assert (lighter + 0.05) / (darker + 0.05) >= least, (what, ground)
    tested = {name for what, grounds, _ in APART for name in (what, *grounds)}
    assert brightness.keys() - tested == {"edge"}, "it only decorates"
