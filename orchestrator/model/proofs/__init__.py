"""The proofs that divided layers and divided tokens compute what the whole model computes, in one process."""
