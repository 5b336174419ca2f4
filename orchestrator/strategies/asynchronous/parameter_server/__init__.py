"""The ``parameter_server`` strategy: workers compute gradients, servers own the parameters."""

from orchestrator.strategies.asynchronous.parameter_server.strategy import ParameterServer, ParameterServerConfig

__all__ = ["ParameterServer", "ParameterServerConfig"]
