"""Check for a free port."""

from __future__ import annotations

import os
import re
import socket

import pytest
from msgspec.structs import replace

from deploy.machine.hub import HubError
from deploy.serving.preflight import PortError, check_models, check_port
from deploy.supervisor.child import ServedModel
from tests.ports import free_port

HERE = "127.0.0.1"


def test_model_that_the_hub_does_not_have_is_refused_before_a_start() -> None:
    def refuse(model: str) -> None:
        raise HubError(f"{model}: no such model")

    model = ServedModel(name="m", model="org/misspelt")
    with pytest.raises(HubError, match="org/misspelt: no such model"):
        check_models([model, model], refuse)  # two replicas
    check_models([model, ServedModel(name="other")], refuse)
    check_models([replace(model, fallback="org/other")], refuse)
    check_models([replace(model, model="pocket")], refuse)


def test_a_taken_one_is_said_with_one_that_is_free() -> None:
    port = free_port()  # not an ephemeral port: its neighbours may be in use
    with socket.create_server((HERE, port)):
        with pytest.raises(PortError, match=f"port {port} is in use by another program") as caught:
            check_port(HERE, port, {})
        found = re.search(r"--port (\d+), which is free", str(caught.value))
        assert found
        check_port(HERE, int(found[1]), {})
    for elsewhere in ("no such host", "203.0.113.1"):  # the gateway complains of these
        check_port(elsewhere, port, {})


def test_a_port_that_a_service_manager_keeps_for_us_is_ours() -> None:
    with socket.socket() as kept:
        kept.bind((HERE, 0))
        kept.listen()
        check_port(HERE, kept.getsockname()[1], {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})
