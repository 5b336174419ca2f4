"""Digits with a model that has buffers."""

from torch import nn

from jobs.digits import Digits


class Normed(Digits):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
