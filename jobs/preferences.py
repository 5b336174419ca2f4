"""Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290): of two answers, the model learns one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from jobs.hugging_face import Logits
from jobs.tokens import IGNORED


class LogRatios(Logits):
    """How much more probable each answer is to a causal model than to its reference, which is the model at the start.

    The reference is the model without its adapters, or a frozen copy. Both are in eval mode: the probabilities are
    compared, so neither draws dropout.
    """

    def __init__(self, model: Any, *, has_adapters: bool):
        super().__init__(model.eval(), "causal")
        self.reference = None if has_adapters else Logits(copy.deepcopy(model), "causal").eval().requires_grad_(False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logarithms of the ratios, of shape (pairs, 2), from tensors of shape (pairs, 2, tokens)."""
        answers = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        before = self._before(answers).detach()
        ratios = log_probabilities(super().forward(answers), answers["labels"]) - before
        return ratios.view(-1, 2)

    def _before(self, answers: Mapping[str, Tensor]) -> Tensor:
        if self.reference is not None:
            return log_probabilities(self.reference(answers), answers["labels"])
        with self.model.disable_adapter():
            return log_probabilities(super().forward(answers), answers["labels"])


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels of each text, from tensors of shape (texts, tokens, ...)."""
    labels = labels[:, 1:]
    each = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -each.view_as(labels).sum(dim=1)


def preference_loss(ratios: Tensor, beta: float) -> Tensor:
    """Return the mean loss of pairs from the ratios of shape (pairs, 2), the chosen answer first."""
    return -F.logsigmoid(beta * (ratios[:, 0] - ratios[:, 1])).mean()


def reward_sums(ratios: Tensor, beta: float) -> Mapping[str, Tensor]:
    """Return the metrics of ``trl``'s ``DPOTrainer`` with its names, as sums over pairs."""
    chosen, rejected = (beta * ratios).unbind(dim=1)
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/accuracies": (chosen > rejected).sum(),
        "rewards/margins": (chosen - rejected).sum(),
    }
