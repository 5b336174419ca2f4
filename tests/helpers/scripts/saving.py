"""Counts its attempts in its directory for checkpoints."""

import orchestrator

saved = orchestrator.checkpoint_dir() / "attempts"
attempts = int(saved.read_text()) if saved.exists() else 0
saved.write_text(str(attempts + 1))
print(f"after {attempts} attempts")
