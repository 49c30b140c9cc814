"""An MCP server without any package: a counter. With an argument it dies, or hangs, when it is first called."""

import json
import sys
import time

NUMBER = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}}
TOOLS = [
    {"name": "count", "description": "Count on.", "inputSchema": NUMBER},
    {"name": "where", "description": "The state.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "judge", "description": "The reward.", "inputSchema": ANSWER},
]


def called(name: str, arguments: dict, counted: list[int]) -> str:
    if sys.argv[1:] == ["die"]:
        print("no fuel", file=sys.stderr)
        sys.exit(9)
    if sys.argv[1:] == ["hang"]:
        time.sleep(600)
    if name == "count":
        counted[0] += arguments["by"]
    if name == "judge":
        return str(float(arguments["answer"] == str(counted[0])))
    return str(counted[0])


def main() -> None:
    counted = [0]
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result: dict = {}
        if request["method"] == "initialize":
            result = {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "serverInfo": {"name": "plain", "version": "1"},
            }
        elif request["method"] == "tools/list":
            result = {"tools": TOOLS}
        elif request["method"] == "tools/call":
            text = called(request["params"]["name"], request["params"]["arguments"], counted)
            result = {"content": [{"type": "text", "text": text}]}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)


main()
