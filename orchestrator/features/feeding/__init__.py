"""Training data that one process reads for many ranks.

A feeder reads the samples of a run in one order, numbers them, and hands each rank its share of every global batch.
:mod:`.rows` reads a ``ray.data.Dataset``, whose tasks run on the CPUs of the cluster, and :mod:`.streams` a stream of
the user; :mod:`.window` cuts what they give; :mod:`.feed` reads ahead, and begins again at any position;
:mod:`.feeder` is the Ray actor; and :mod:`.client` is what a rank sees: a stream with a position.
"""
