"""Re-execution of the process under an OpenBLAS: once, with its arguments, and only where it helps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from worker.process import preload

LIBRARY = Path("/somewhere/libopenblas.so.0")


class Replaced(Exception):
    """Raised in place of replacing the process, with the command that would have run."""


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a Linux CPU with an OpenBLAS and an unset environment."""

    def execve(program: str, argv: list[str], environ: dict[str, str]) -> NoReturn:
        raise Replaced(program, argv, environ)

    for name in (preload.SWITCH, preload.GUARD, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(preload, "find_openblas", lambda: LIBRARY)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "worker", "--model", "m"])
    return monkeypatch


ARGV = ["/x/worker/__main__.py", "--model", "m"]


def replaced() -> tuple[str, list[str], dict[str, str]]:
    with pytest.raises(Replaced) as caught:
        preload.preload_openblas(ARGV)
    program, argv, environ = caught.value.args
    return program, argv, environ


def test_the_process_starts_again_with_the_same_command(linux: pytest.MonkeyPatch) -> None:
    program, argv, environ = replaced()
    assert [program, *argv[1:]] == [argv[0], "-X", "dev", "-m", "worker", "--model", "m"]
    assert (program, environ["LD_PRELOAD"]) == (sys.executable, str(LIBRARY))


def test_the_second_life_is_the_last(linux: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    linux.setenv("LD_PRELOAD", "/x/a.so")
    environ = replaced()[2]
    for name in ("LD_PRELOAD", preload.GUARD):
        linux.setenv(name, environ[name])
    with caplog.at_level(logging.INFO):
        preload.preload_openblas(ARGV)
        preload.preload_openblas(ARGV)
    assert f"found {LIBRARY}" in caplog.text
    assert os.environ["LD_PRELOAD"] == "/x/a.so"


@pytest.mark.parametrize("what", ["switched off", "darwin", "a CUDA build"])
def test_where_it_does_not_help_the_process_goes_on(linux: pytest.MonkeyPatch, what: str) -> None:
    if what == "switched off":
        linux.setenv(preload.SWITCH, "off")
    elif what == "a CUDA build":
        linux.setattr("importlib.metadata.version", lambda name: "0.32.4")
    else:
        linux.setattr(sys, "platform", what)
    preload.preload_openblas(ARGV)


def bundled_blas() -> Path | None:
    """Return the reference BLAS in MLX's wheel, which exports an OpenBLAS's symbols."""
    import mlx.core as mx

    folder = Path(mx.__file__).parents[1] / "mlx_cpu.libs"
    return next((library for library in folder.glob("libblas*.so*") if preload._is_usable(library)), None)


_PROGRAM = """
import logging, os, sys
logging.basicConfig(level="INFO", format="%(message)s")
from worker.process import preload
preload._PATTERNS = (os.environ["CANDIDATE"],)
preload.preload_openblas(sys.argv)
print(sys.argv[1:], os.environ["CANDIDATE"] in open("/proc/self/maps").read(), "LD_PRELOAD" in os.environ)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_a_real_process_runs_under_the_library_it_found(tmp_path: Path) -> None:
    library = bundled_blas()
    if library is None:
        pytest.skip("this build of MLX brings no BLAS")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    own = (preload.GUARD, preload.SWITCH)
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    ran = subprocess.run(
        [sys.executable, "-u", str(program), "one", "two words"],
        env=inherited | {"CANDIDATE": str(library), "PYTHONPATH": str(Path(preload.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split("\n")[0] == "['one', 'two words'] True False"
    assert ran.stderr.count("found") == 1
