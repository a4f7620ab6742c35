"""`forwardscope mcp`: let an assistant examine the model of a running server, over the Model Context Protocol.

It speaks the protocol over standard input and output, or with `--port` over HTTP, and is a client of the server.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from forwardscope import Client, ForwardscopeError
from forwardscope.transport import DEFAULT_URL
from model import __version__
from model.command_line import Parser, number
from service import PREFIX
from service.commands.mcp_tools import Tools

INSTRUCTIONS = """Examine a language model: continue texts, read any number of its forward pass, change stages and see
what follows, and explain its predictions. Begin with the tool `model`, which lists the names of the stages."""


def main() -> None:
    options = make_parser().parse_args()
    try:
        from mcp.server.mcpserver import Image, MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        sys.stderr.write("forwardscope mcp: needs the package mcp: pip install 'forwardscope[mcp]'\n")
        sys.exit(1)
    api_key = options.api_key or os.environ.get(f"{PREFIX}API_KEY") or None
    try:
        client = Client(options.url, api_key=api_key)
        client.health()
    except (ForwardscopeError, ValueError) as error:
        sys.stderr.write(f"forwardscope mcp: {error} `forwardscope serve` starts a server.\n")
        sys.exit(1)
    server = MCPServer("forwardscope", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    with client:
        tools = Tools(client)
        functions = (tools.model, tools.generate, tools.look, tools.picture, tools.edit, tools.attribute, tools.compare)
        for function in functions:
            server.add_tool(as_tool(function, Image, ToolError), structured_output=False)
        if options.port is None:
            server.run("stdio")
        else:
            server.run("streamable-http", host=options.host, port=options.port)


def as_tool(function: Callable[..., Any], image: Any, tool_error: type[Exception]) -> Callable[..., Any]:
    """A function of `Tools` as the protocol needs it: an `image` or compact JSON, and messages of errors are shown."""

    @functools.wraps(function)
    def tool(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
        except (ForwardscopeError, ValueError) as error:
            raise tool_error(str(error)) from error
        return image(data=found, format="png") if isinstance(found, bytes) else json.dumps(found, ensure_ascii=False)

    return tool


def make_parser() -> Parser:
    parser = Parser(prog="forwardscope mcp", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_URL, help="the server to examine (default: %(default)s)")
    parser.add_argument("--api-key", help=f"key of the server; default: {PREFIX}API_KEY of the environment")
    parser.add_argument("--port", type=number(int, 0), help="speak HTTP on this port, at /mcp, in place of stdio")
    parser.add_argument(
        "--host", default="127.0.0.1", help="with --port: the address to listen on (default: %(default)s)"
    )
    return parser
