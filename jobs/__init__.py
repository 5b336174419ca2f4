"""The jobs that come with the orchestrator. Each file is an example to copy."""
