"""The wheel, built from the tree and run from site-packages of an environment that cannot see the tree."""

from __future__ import annotations

import sysconfig
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.deploy.conftest import ROOT
from tests.deploy.supervisor.process_output import Begin
from tests.system import NO_TLS, START_S_MAX, Process, chat_body, eventually, free_port, is_ready

PACKAGES = ("protocol", "broker", "worker", "deploy")
WHEEL_BYTES_MAX = 5_000_000
"""Most of it is the embedded model."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))))


def test_wheel_contains_all_files_of_the_packages_and_nothing_else(wheel: Path) -> None:
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    expected = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in packed if ".dist-info/" not in name} == expected
    assert wheel.stat().st_size < WHEEL_BYTES_MAX


def test_wheel_serves_a_chat_and_the_page_from_an_empty_environment(
    wheel: Path, tmp_path: Path, runtime_folder: Path, begin: Begin
) -> None:
    port = free_port()
    begin(
        [*_installed(wheel, tmp_path / "env"), "serve", f"--port={port}", "--spare=0"],
        cwd=tmp_path,
        env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(Process.cache)},
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=NO_TLS) as http:
        eventually(lambda: is_ready(http), within_s=START_S_MAX, what="the installed server is ready")
        reply = http.post("/v1/chat/completions", json=chat_body("Hello")).json()
        assert "Hello" in reply["choices"][0]["message"]["content"]
        assert "<title>" in http.get("/").text


def _installed(wheel: Path, folder: Path) -> list[str]:
    """Install `wheel` into an empty environment and return the command of its entry point.

    A wheel of pure Python is installed by unpacking it. The environment sees the dependencies of this one,
    but not its `.pth` files, through which the tree would be found.
    """
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (distribution,) = distributions(path=[str(packages)])
    (script,) = distribution.entry_points.select(group="console_scripts", name="roundhouse")
    call = f"from {script.module} import {script.attr}; {script.attr}()"
    return [str(folder / "bin" / "python"), "-P", "-c", call]
