"""``auto``: the strategy that measures a job, to choose another one."""
