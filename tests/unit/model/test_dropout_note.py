"""The note on dropout that is off in training."""

import pytest
from torch import nn

from helpers.files.golden import Golden
from orchestrator.model.modes import note_on_dropout


def pretrained() -> nn.Module:
    """As ``from_pretrained`` returns a model."""
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)).eval()


def wrapped(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"body": model, "head": nn.Linear(4, 2)})


def test_a_pretrained_model_in_a_new_module_has_no_dropout(golden: Golden) -> None:
    note = note_on_dropout(wrapped(pretrained()))
    golden.says(note)


@pytest.mark.parametrize(
    "model",
    [
        wrapped(pretrained().train()),
        wrapped(pretrained().requires_grad_(False)),  # such as a teacher
        wrapped(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).eval()),
    ],
    ids=["in train mode", "frozen", "no dropout"],
)
def test_there_is_no_note_without_a_loss_of_dropout(model: nn.Module) -> None:
    assert note_on_dropout(model) is None
