"""Members of uvicorn, which documents none of them, that the gateway's server and connections rely on."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from broker.server import connection, fast_path, server
from tests.broker.server.echo_server import Echo

PROTOCOL = """
    _start_asgi_task _unset_keepalive_if_required app connection_lost connection_made connections cycle
    data_received eof_received flow headers loop on_header on_headers_complete on_message_begin
    on_message_complete on_response_complete on_url parser pause_writing pipeline resume_writing shutdown
    timeout_keep_alive_handler transport url
"""
CYCLE = """
    chunked_encoding disconnected expected_content_length flow keep_alive message_event response_complete
    response_started scope transport waiting_for_100_continue
"""
FLOW = "read_paused resume_reading write_paused"
SERVER = "config handle_exit shutdown startup"
CONFIG = "http_protocol_class"


def used(module: Any) -> set[str]:
    """Return the names that a module overrides, or reads or sets of `self`, `cycle` and what they hold."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    owned = {node.attr for node in attributes if re.match(r"(self|cycle)\b", ast.unparse(node))}
    return owned | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


async def test_members_that_are_relied_on_exist_and_are_all_named_here() -> None:
    config = uvicorn.Config(Echo(), ws="none", lifespan="off", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {})
    protocol.on_message_begin()
    flow = FlowControl(cast(Any, None))
    cycle = RequestResponseCycle(
        cast(Any, {}), cast(Any, None), flow, protocol.logger, protocol.logger, False, [], asyncio.Event(),
        False, True, lambda: None,
    )  # fmt: skip
    named = {
        protocol: PROTOCOL, cycle: CYCLE, flow: FLOW, uvicorn.Server(config): SERVER, config: CONFIG,
    }  # fmt: skip
    for owner, names in named.items():
        assert set(names.split()) <= set(dir(owner))
    members = {name for owner in named for name in dir(owner) if not name.startswith("__")}
    relied_on = set().union(*map(used, (connection, fast_path, server)))
    assert relied_on & members == set(" ".join(named.values()).split())
