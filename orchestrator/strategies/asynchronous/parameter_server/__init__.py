"""Parameters on servers: the strategy ``parameter_server``."""

from orchestrator.strategies.asynchronous.parameter_server.strategy import ParameterServer, ParameterServerConfig

__all__ = ["ParameterServer", "ParameterServerConfig"]
