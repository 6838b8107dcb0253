"""Hub that is silent: a prompt failure with a transport error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from protocol.common import huggingface

WAIT_S = 1


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """Server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", WAIT_S)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
    huggingface_hub.close_session()


def info(server: socket.socket) -> None:
    port = server.getsockname()[1]
    huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{port}").model_info("org/model")


@pytest.mark.timeout(30)
def test_silent_hub_times_out(silent: socket.socket) -> None:
    huggingface.bound()
    huggingface.bound()
    with pytest.raises(huggingface.transport_errors(), match="timed out"):
        info(silent)
