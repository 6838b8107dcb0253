"""The Homebrew formula: current, and generated as brew and pip would have it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from recipes.homebrew import (
    FORMULA,
    LOCK,
    TAP,
    FormulaError,
    best_wheel,
    digest,
    formula,
    locked_hashes,
    own_version,
    resources_of,
    tag_ranks,
)

TEXT = (TAP / FORMULA).read_text()
RESOURCE = re.compile(
    r'resource "([^"]+)" do\n    url "([^"]+)", using: :nounzip\n    sha256 "([0-9a-f]{64})"'
)
A, B, C = "a" * 64, "b" * 64, "c" * 64


def wheel(name: str, sha256: str = A) -> dict[str, Any]:
    return {"url": f"https://files.example/{name}.whl", "hashes": {"sha256": sha256}}


def test_formula_is_of_this_lock_and_this_version() -> None:
    assert f"sha256 {digest(LOCK.read_bytes())})" in TEXT, "make formula"
    assert f"/mlx_roundhouse-{own_version()}-py3-none-any.whl" in TEXT


def test_each_resource_is_a_wheel_that_the_lock_allows() -> None:
    allowed = {sha256: name for name, hashes in locked_hashes(LOCK.read_text()).items() for sha256 in hashes}
    found = RESOURCE.findall(TEXT)
    assert len(found) == TEXT.count("  resource ") > 50
    for name, url, sha256 in found:
        assert allowed[sha256].partition("==")[0] == name
        assert url.startswith("https://files.pythonhosted.org/")
        assert url.endswith(".whl")
        assert "linux" not in url
    names = [name for name, _, _ in found]
    assert {"mlx", "mlx-metal", "mlx-lm", "pyzmq"} <= set(names)
    assert not {"mlx-cpu", "pytest", "ruff"} & set(names)


def test_a_release_adds_the_hash_of_its_wheel() -> None:
    unreleased, released = formula("9.9", [], "lock"), formula("9.9", [], "lock", C)
    assert f'mlx_roundhouse-9.9-py3-none-any.whl", using: :nounzip\n  sha256 "{C}"\n' in released
    assert released.replace(f'  sha256 "{C}"\n', "") == unreleased
    assert "{" not in re.sub(r"#\{[^}]*\}|\{ \|resource\|.*\}", "", unreleased)
    blocks = re.findall(r"^ *(?:class|def|begin|\w.* do$|service do|test do)", released, re.MULTILINE)
    assert len(blocks) == len(re.findall(r"^ *end$", released, re.MULTILINE))


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["x-1-cp313-cp313-macosx_14_0_arm64", "x-1-cp313-cp313-macosx_11_0_arm64"], 0),
        (["x-1-cp313-cp313-macosx_15_0_arm64", "x-1-cp37-abi3-macosx_11_0_universal2"], 1),
    ],
)
def test_the_wheel_is_that_which_pip_would_choose(names: list[str], best: int) -> None:
    assert best_wheel("x==1", [wheel(name) for name in names], tag_ranks()).url == wheel(names[best])["url"]


def test_a_package_without_a_wheel_for_macs_or_outside_the_lock_is_refused() -> None:
    with pytest.raises(FormulaError, match="no wheel for macOS 14"):
        best_wheel("x==1", [wheel("x-1-cp313-cp313-win_amd64")], tag_ranks())
    pylock = {"packages": [{"name": "x", "version": "1", "wheels": [wheel("x-1-py3-none-any", A)]}]}
    lock = f"x[extra]==1 ; marker \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\ny==1\n"
    assert [each.sha256 for each in resources_of(pylock, lock)] == [A]
    for other in (lock.replace(A, C), lock.replace("x[extra]==1", "x==2")):
        with pytest.raises(FormulaError, match="make lock"):
            resources_of(pylock, other)
