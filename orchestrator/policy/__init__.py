"""The decisions of a run, as pure functions: no Ray, no torch."""
