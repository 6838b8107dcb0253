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
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
PACKAGES = ("protocol", "broker", "worker", "deploy")
TOP = (*PACKAGES, "tests", "bench", "recipes", "docs")

MESSAGES = {kind.__name__ for kind in (*get_args(messages.ToWorker), *get_args(messages.ToGateway))}

# Command flags that are not settings of a process.
OF_COMMANDS = {
    "--config", "--with", "--gateway", "--help", "--version", "--dry-run", "--http2", "--print", "--url",
    "--once", "--json", "--system", "--yes", "--no-history", "--max-concurrent", "--concurrency",
    "--prompt-tokens", "--shared-tokens", "--compare", "--rounds", "--rate", "--requests", "--no-keep-awake",
    # of other programs
    "--auth-type", "--branch", "--from", "--hf-path", "--user",
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


def test_each_subpackage_is_in_the_table() -> None:
    architecture = named_paths(DOCUMENTS["docs/architecture.md"])
    for package in PACKAGES:
        for subpackage in (ROOT / package).iterdir():
            if (subpackage / "__init__.py").exists():
                assert f"{package}/{subpackage.name}/" in architecture, subpackage


def test_each_module_in_the_table_is_in_its_package() -> None:
    table = DOCUMENTS["docs/architecture.md"].partition("\n## Packages\n")[2].partition("\n\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)/` \|(.*)\|[^|]*\|$", table, re.MULTILINE)
    assert len(rows) > 20
    for folder, row in rows:
        for name in set(re.findall(r"`(\w+/?)`", row)) - {"roundhouse", "bench/", *TOP}:
            places = [ROOT / folder, ROOT / "deploy/command"]  # the names of commands are in any row
            assert any((place / name).is_dir() or (place / f"{name}.py").exists() for place in places), row


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
