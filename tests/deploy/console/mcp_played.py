"""An MCP server for tests, on the standard library alone. `sys.argv[1]`: how it behaves."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOOLS = [
    {"name": "echo", "description": "Repeat.", "inputSchema": {"type": "object", "properties": {"text": {}}}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "long", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "with space!", "inputSchema": None},
]


def say(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(said: dict[str, Any]) -> dict[str, Any]:
    match said["method"]:
        case "initialize":
            return {"protocolVersion": said["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        case "tools/list" if "cursor" not in said["params"]:
            return {"tools": TOOLS[:2], "nextCursor": "more"}
        case "tools/list":
            return {"tools": TOOLS[2:]}
    name, arguments = said["params"]["name"], said["params"]["arguments"]
    match name:
        case "fail":
            return {"isError": True, "content": [{"type": "text", "text": "no such file"}]}
        case "long":
            return {"content": [{"type": "text", "text": "x" * 200_000}]}
        case "hang":
            time.sleep(600)
    return {"content": [{"type": "text", "text": json.dumps(arguments)}, {"type": "image", "data": ""}]}


def main() -> None:
    behaviour = sys.argv[1] if len(sys.argv) > 1 else ""
    if behaviour == "silent":
        time.sleep(600)
    print("this line is no message", flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        if "id" not in said or "method" not in said:
            continue
        if said["method"] == "tools/list":
            say(id="s1", method="ping")
            say(id="s2", method="sampling/createMessage", params={})
            say(method="notifications/message", params={})
            for _ in range(2):
                reply = json.loads(sys.stdin.readline())
                assert ("result" in reply) == (reply["id"] == "s1")
        if said["method"] == "tools/call" and behaviour == "ends":
            return
        if said["method"] == "tools/call" and said["params"]["name"] == "with space!":
            say(id=said["id"], error={"code": 1, "message": "not today"})
        else:
            say(id=said["id"], result=answer(said))


if __name__ == "__main__":
    main()
