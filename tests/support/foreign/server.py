"""An MCP server made with the `mcp` package: a counter that belongs to one process, and tools that misbehave.

With an argument it listens on that port, otherwise it speaks on its standard streams.
"""

import os
import subprocess
import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("counter", log_level="ERROR", port=int(sys.argv[1]) if sys.argv[1:] else 0)
counted = [0]


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two whole numbers."""
    return str(a + b)


@server.tool()
def count(by: int = 1) -> str:
    """Count on."""
    counted[0] += by
    return f"count {counted[0]}"


@server.tool()
def divide(a: int, b: int) -> str:
    """A quotient."""
    return str(a // b)


@server.tool()
def told() -> str:
    """What this server was started with."""
    return f"{os.environ.get('HEADRACE_SEED')} {os.environ.get('HEADRACE_TASK')}"


@server.tool()
def process() -> str:
    """The number of this process and of a child that outlives it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return f"{os.getpid()} {child.pid}"


@server.tool()
def crash() -> str:
    """End this process."""
    print("out of ink", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool()
def dawdle() -> str:
    """Take forever."""
    time.sleep(600)
    return ""


@server.tool()
def where() -> str:
    """The state, for the world."""
    return str(counted[0])


@server.tool()
def judge(answer: str) -> str:
    """The reward, for the world."""
    return str(float(answer == str(counted[0])))


if __name__ == "__main__":
    server.run("streamable-http" if sys.argv[1:] else "stdio")
