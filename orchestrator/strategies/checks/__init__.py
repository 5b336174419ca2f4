"""What the driver alone asks of a job before a run: whether it can be trained as planned, and what it takes. No rank
imports it."""
