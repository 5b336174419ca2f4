"""How a worker joins, follows and leaves a generation: rendezvous, orders, spool, teardown."""
