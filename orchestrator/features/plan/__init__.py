"""``orchestrator plan``: the layouts of a job on a cluster, timed and compared without running it.

:mod:`.prediction` computes what a step takes on devices that are not here, and :mod:`.traced_job` what the model of a
job does in it. :mod:`.layouts` finds the layouts, :mod:`.forecasts` answers, and :mod:`.shown` prints. ``plan=true`` of
a launch shows what is predicted of its one layout (:mod:`.plan_notes`).
"""
