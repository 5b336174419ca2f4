"""Which strategy for a job: proposals, their predicted step time and memory, and the choice. Neither Ray nor torch."""
