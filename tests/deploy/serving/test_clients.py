"""Endpoint that clients derive from the same settings as `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.serving import clients
from deploy.supervisor.child import Child
from tests.deploy.conftest import config

pytestmark = pytest.mark.usefixtures("runtime_folder")


def private(file: Path, text: str) -> Path:
    file.touch(mode=0o600)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        (["--host=0.0.0.0", "--port=9"], "http://127.0.0.1:9"),
        (["--host=::"], "http://[::1]:8000"),
        (["--host=fe80::1"], "http://[fe80::1]:8000"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(argv: list[str], url: str) -> None:
    assert clients.url(argv, {}) == url


def test_keys_come_from_variables_and_from_the_gateways_section(tmp_path: Path) -> None:
    keys = private(tmp_path / "keys", "# ours\n\nfiled alice\n")
    assert clients.keys([], {}) == []
    environ = {"ROUNDHOUSE_API_KEYS": "a, b", "ROUNDHOUSE_API_KEYS_FILE": str(keys)}
    assert clients.keys([], environ) == ["a", "b", "filed"]
    file = config(tmp_path, f"[gateway]\napi_keys = ['a', 'b']\napi_keys_file = '{keys}'\n")
    assert clients.keys([f"--config={file}"], {}) == ["a", "b", "filed"]
    keys.chmod(0o644)
    with pytest.raises(PermissionError):
        clients.keys([f"--config={file}"], {})


def test_gateway_gets_a_key_for_serve_where_only_hashes_are_stored(tmp_path: Path) -> None:
    gateway = Child("gateway", ["broker"], {"HOME": "/"})
    assert clients.gateway_with_key(gateway, [], {}) == (gateway, [])
    file = private(tmp_path / "keys", f"sha256:{'0' * 64} ann\n")
    environ = {"ROUNDHOUSE_API_KEYS_FILE": str(file)}
    changed, [key] = clients.gateway_with_key(gateway, [], environ)
    assert changed.env == {"HOME": "/", "ROUNDHOUSE_API_KEYS": key}
    assert len(key) >= 43
    file.write_text("plain ann\n")
    assert clients.gateway_with_key(gateway, [], environ) == (gateway, ["plain"])
