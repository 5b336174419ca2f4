"""The plan of a run: layout, mesh, schedules, shares of the batch and faults to inject. No Ray, no torch."""
