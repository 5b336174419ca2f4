"""The driver's side of a run: it places workers with Ray, watches them, and decides what to do about failures."""
