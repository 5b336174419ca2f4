"""The profile of a job, with times that are easy to add."""

from orchestrator.tuning.profile import NO_COST, Affine, GroupCost, LayerProfile, PassCost, Profile, StageDivision

LAYER = LayerProfile(
    name="layer",
    num_parameters=1,
    trainable=True,
    parameter_bytes=1000,
    forward_ms=1.0,
    backward_ms=2.0,
    activation_bytes=10.0,
    output_bytes=0.0,
)
PASSES = tuple(
    PassCost(threads=1, busy=busy, rows=rows, pass_ms=rows * (1.0 if busy == 1 else 1.5), update_ms=3.0)
    for busy in (1, 2)
    for rows in (8, 64)
)
"""A millisecond for each sample, and half as much again if two workers compute at once."""
PROFILE = Profile(
    device="cpu",
    divisions=(StageDivision(num_stages=2, layers=(LAYER, LAYER), refused=""),),
    layer_rows=8,
    passes=PASSES,
    parameter_bytes=2000,
    gradient_bytes=2**20,
    optimizer_bytes=1.0,
    activation_bytes=20.0,
    data=Affine(overhead_ms=0.0, ms_per_unit=0.1),
    loop_ms=0.5,
    bytes_by_group=(600, 600, 600, 200),
    gathered_share=1.0,
    groups=(
        GroupCost(
            workers=2,
            all_reduce=Affine(overhead_ms=2.0, ms_per_unit=7.0),
            all_gather=Affine(overhead_ms=0.25, ms_per_unit=0.0),
            reduce_scatter=Affine(overhead_ms=0.5, ms_per_unit=0.0),
        ),
    ),
    message=NO_COST,
    server=Affine(overhead_ms=4.0, ms_per_unit=5.0),
    base_ms=0.0,
    ddp_ms=1.0,
    devices_ms=None,
    parts_ms=0.5,
    pipeline=Affine(overhead_ms=0.25, ms_per_unit=0.0),
    interleaved=Affine(overhead_ms=0.5, ms_per_unit=2.0),
    free_bytes=10_000,
)
