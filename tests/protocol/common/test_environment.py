"""Environment variables that cannot be used, and the command's one line about each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from protocol.common.environment import EnvironmentFault, network_variables

BYTES = "/tmp/caf\udce9"


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("ALL_PROXY", "socks5h://u:secret@127.0.0.1:9", "socks5h://: pip install socksio"),
        ("https_proxy", "socks4://127.0.0.1:9", "socks4://, which is not supported"),
        ("HTTP_PROXY", "http://u:secret@host:abc", "is not a valid URL"),
        ("all_proxy", "http://[::1", "is not a valid URL"),
        ("SSL_CERT_FILE", "/nowhere/at.all", "No such file or directory"),
        ("SSL_CERT_FILE", __file__, "cannot be read as certificates"),
    ],
)
def test_a_client_that_cannot_be_made_names_the_variable(
    name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault, match=f"^{name}") as raised:  # noqa: SIM117
        with network_variables(os.environ, httpx.InvalidURL):
            httpx.Client()
    assert fault in str(raised.value)
    assert "unset it" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (["serve"], {"HOME": BYTES}, r"HOME: '/tmp/caf\udce9' is not UTF-8"),
        (["status"], {"TMPDIR": BYTES}, r"TMPDIR: '/tmp/caf\udce9' is not UTF-8"),
        (["serve", "--model", BYTES], {}, r"'/tmp/caf\udce9' is not UTF-8"),
        (["serve", "--host", "unix:/tmp/x.sock"], {}, "'unix:/tmp/x.sock' is neither an IP address nor"),
        (["serve"], {"XDG_RUNTIME_DIR": "/nowhere/at/all"}, "unset XDG_RUNTIME_DIR"),
        (
            ["serve"],
            {"PYTHONPATH": "{tmp}:{here}"},
            "PYTHONPATH hides the package 'worker' of Roundhouse by {tmp}",
        ),
        (
            ["serve"],
            {"PYTHONPATH": "{tmp}/own:{here}"},
            "hides the package 'protocol' of Roundhouse by {tmp}/own",
        ),
    ],
)
def test_a_command_names_what_breaks_it_in_one_line(
    words: list[str], variables: dict[str, str], line: str, tmp_path: Path
) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "__init__.py").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "protocol.py").touch()
    here = str(Path(__file__).parents[3])
    given = {
        key: text.replace("{tmp}", str(tmp_path)).replace("{here}", here) for key, text in variables.items()
    }
    command = [sys.executable, "-P", "-m", "deploy", *words]
    environ = os.environ | {"PYTHONPATH": here} | given
    ended = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", timeout=60)
    assert ended.returncode == 78, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert line.replace("{tmp}", str(tmp_path)) in ended.stderr
