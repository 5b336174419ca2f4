"""The ``parameter_server`` strategy: workers compute gradients, servers own the parameters."""
