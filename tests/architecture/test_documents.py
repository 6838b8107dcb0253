"""Documents: the files, folders, messages and settings they name exist, and required ones are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from deploy.serving.settings import ServeSettings
from protocol import messages
from protocol.settings.gateway import GatewaySettings
from protocol.settings.worker import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
PACKAGES = ("protocol", "broker", "worker", "deploy")
TOP = (*PACKAGES, "tests", "bench", "recipes", "docs")

PAGE_WORDS_MAX = 900
DECISION_WORDS_MAX = 200

MESSAGES = {kind.__name__ for kind in (*get_args(messages.ToWorker), *get_args(messages.ToGateway))}

# Command flags that are not settings of a process.
OF_COMMANDS = {
    "--config", "--with", "--gateway", "--help", "--version", "--dry-run", "--http2", "--print", "--url",
    "--report", "--share", "--once", "--json", "--system", "--yes", "--no-history",
    "--max-concurrent", "--concurrency",
    "--prompt-tokens", "--shared-tokens", "--compare", "--rounds", "--rate", "--requests", "--no-keep-awake",
    # of other programs
    "--install", "--auth-type", "--branch", "--excludes", "--from", "--hf-path", "--user",
    "--over", "--auto-setup", "--output-hostfile", "--hostfile",
}  # fmt: skip


def code(text: str) -> Iterator[str]:
    """Yield the words in backticks and in fenced blocks."""
    fences = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    for fenced in fences.findall(text):
        yield from re.findall(r"[\w./-]+", fenced)
    for quoted in re.findall(r"`([^`\n]+)`", fences.sub("", text)):
        yield from quoted.split()


def named_paths(text: str) -> set[str]:
    """Return the named files and folders of this repository, as paths from its root."""
    words = {word.rstrip(".,:;") for word in code(text)}
    return {word for word in words if word.split("/")[0] in TOP and "/" in word and "…" not in word}


def named_settings(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]+", text)) - OF_COMMANDS


def settings_of(*kinds: type[msgspec.Struct]) -> set[str]:
    names = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    # The flag of a setting that takes several values is in the singular.
    return {f"--{name.replace('_', '-')}" for name in names | {name.removesuffix("s") for name in names}}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_path_that_is_named_exists(name: str) -> None:
    missing = {path for path in named_paths(DOCUMENTS[name]) if not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CONTRIBUTING.md"])
def test_each_setting_that_is_named_exists(name: str) -> None:
    known = settings_of(GatewaySettings, WorkerSettings, ServeSettings)
    assert named_settings(DOCUMENTS[name]) <= known


def test_each_message_has_its_row_and_no_other_has_one() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENTS["docs/protocol.md"], re.MULTILINE)
    assert sorted(rows) == sorted(MESSAGES)
    assert all(f"`{name}`" in DOCUMENTS["docs/protocol.md"] for name in ("ModelStates", "DesiredModels"))


def test_each_folder_has_its_line_on_the_page_of_the_architecture() -> None:
    page = DOCUMENTS["docs/architecture.md"]
    for package in PACKAGES:
        for subpackage in (ROOT / package).iterdir():
            if (subpackage / "__init__.py").exists():
                assert f"\n* `{package}/{subpackage.name}/`: " in page, subpackage
    assert len(page.split()) <= PAGE_WORDS_MAX


def test_a_request_passes_twelve_files_and_what_is_read_first_has_5000_lines() -> None:
    page = DOCUMENTS["docs/architecture.md"]
    steps = dict(re.findall(r"^(\d+)\. `([\w/.]+)`: ", page, re.MULTILINE))
    assert [*steps] == [str(number) for number in range(1, 13)]
    first = page.partition("Read these 5,000 lines first**: ")[2].partition("\n\n")[0]
    files = [*map(steps.get, re.findall(r"\b\d+\b", first)), *re.findall(r"`([\w/.]+)`", first)]
    lines = sum((ROOT / str(file)).read_text(encoding="utf-8").count("\n") for file in files)
    assert len(files) > 10
    assert 4500 <= lines <= 5500


def test_a_decision_has_at_most_200_words() -> None:
    records = [name for name in DOCUMENTS if name.startswith("docs/decisions/")]
    assert len(records) > 10
    assert all(len(DOCUMENTS[name].split()) <= DECISION_WORDS_MAX for name in records)


def test_each_promise_names_its_test() -> None:
    table = DOCUMENTS["docs/guarantees.md"].partition("| promise | test |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "---" not in row]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py`", row), row


# --- links -------------------------------------------------------------------------------------------


def links(name: str) -> Iterator[tuple[Path, str]]:
    """Yield the files that a document links to, each with the anchor. URLs are ignored."""
    for target in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield ((ROOT / name).parent / path if path else ROOT / name).resolve(), anchor


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_link_leads_somewhere(name: str) -> None:
    for path, anchor in links(name):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_each_document_is_found_from_the_readme() -> None:
    found, ahead = set[str](), ["README.md"]
    while ahead:
        name = ahead.pop()
        if name in DOCUMENTS and name not in found:
            found.add(name)
            ahead += [str(path.relative_to(ROOT)) for path, _ in links(name)]
    assert found == DOCUMENTS.keys()
