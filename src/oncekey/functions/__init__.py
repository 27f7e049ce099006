"""Operations that are not HTTP requests: functions and tasks (``once.function``), gRPC methods, tools of MCP.

``attempt.py`` is the core: one attempt at one key, for every way in. Optional dependencies are imported only by the
module that needs them (``grpc.py``, ``mcp.py``).
"""
