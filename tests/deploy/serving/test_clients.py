"""Endpoint that clients derive from the same settings as `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.serving import clients
from deploy.serving.resolution import resolve_gateway
from tests.deploy.conftest import config

pytestmark = pytest.mark.usefixtures("runtime_folder")


def private(file: Path, text: str) -> Path:
    file.touch(mode=0o600)
    file.write_text(text)
    return file


def keys(argv: list[str], environ: dict[str, str]) -> list[str]:
    return clients.keys(resolve_gateway(argv, environ))


def new_keys(environ: dict[str, str]) -> list[str]:
    return clients.new_keys(resolve_gateway([], environ))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("fe80::1", "http://[fe80::1]:9"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(host: str, url: str) -> None:
    assert clients.url(host, 9) == url


def test_keys_come_from_variables_and_from_the_gateways_section(tmp_path: Path) -> None:
    file = private(tmp_path / "keys", "# ours\n\nfiled alice\n")
    assert keys([], {}) == []
    environ = {"ROUNDHOUSE_API_KEYS": "a, b", "ROUNDHOUSE_API_KEYS_FILE": str(file)}
    assert keys([], environ) == ["a", "b", "filed"]
    argv = ["--config", config(tmp_path, f"[gateway]\napi_keys = ['a', 'b']\napi_keys_file = '{file}'\n")]
    assert keys(argv, {}) == ["a", "b", "filed"]
    file.chmod(0o644)
    with pytest.raises(PermissionError):
        keys(argv, {})


def test_serve_makes_a_key_of_its_own_where_only_hashes_are_stored(tmp_path: Path) -> None:
    assert new_keys({}) == []
    file = private(tmp_path / "keys", f"sha256:{'0' * 64} ann\n")
    environ = {"ROUNDHOUSE_API_KEYS_FILE": str(file)}
    [key] = new_keys(environ)
    assert len(key) >= 43
    file.write_text("plain ann\n")
    assert new_keys(environ) == []
