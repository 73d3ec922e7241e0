"""The tools of a Model Context Protocol server, by the official SDK (`pip install mcp`)."""

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from async_rl.agents.tools import Tool
from async_rl.errors import UserError


class MCPToolError(Exception):
    """The server says that the call failed."""


@asynccontextmanager
async def mcp_tools(server: str) -> AsyncIterator[list[Tool]]:
    """The tools of `server`: the address of one that runs, or the command line of one to be started (it speaks over
    its standard input and output, and ends with this context). UserError where it cannot be reached."""
    try:
        from mcp import Client, StdioServerParameters
    except ImportError:
        raise UserError(f"environment.run.mcp = '{server}': pip install 'mcp>=2'") from None
    where: Any = server
    if not server.startswith(("http://", "https://")):
        command, *arguments = shlex.split(server)
        where = StdioServerParameters(command=command, args=arguments)
    client = Client(where)
    try:
        await client.__aenter__()
    except Exception as error:
        raise UserError(f"environment.run.mcp = '{server}': {error or type(error).__name__}") from None
    try:
        listed = (await client.list_tools()).tools
        yield [_tool(client, one) for one in listed]
    finally:
        await client.__aexit__(None, None, None)


def _tool(client: Any, listed: Any) -> Tool:
    async def call(**arguments: Any) -> str:
        result = await client.call_tool(listed.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise MCPToolError(text)
        return text

    return Tool(listed.name, listed.description or "", dict(listed.input_schema), call)
