"""An MCP server with two tools, on stdin and stdout."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")


@server.tool()
def weather(city: str) -> str:
    """Tell the weather in a city."""
    return "18 degrees and sunny"


@server.tool()
def clock(city: str) -> str:
    """Tell the time in a city."""
    return "12:30"


server.run()
