"""An MCP server on standard input and output with one tool: `python mcp_server.py`. It needs nothing but the standard library."""

import json
import sys
from typing import Any

TOOL = {
    "name": "look_up",
    "description": "Looks up the number.",
    "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}


def look_up(what: str) -> str:
    """The tool's result, with characters that JSON or a template could change."""
    return f'The desk says of {what}:\n  6174 "as is" <é> & \\n'


def _answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "desk", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": look_up(**params["arguments"])}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = _answer(message["method"], message.get("params") or {})
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
            sys.stdout.flush()
