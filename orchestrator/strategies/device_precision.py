"""What ``train.precision`` needs from a device."""

from __future__ import annotations

import torch


class PrecisionError(ValueError):
    """The device does not compute in ``train.precision``; the text says what to set."""


def prepare_device(precision: str, device: torch.device) -> None:
    """Let the device compute in ``train.precision``.

    Raises:
        PrecisionError: it cannot.
    """
    if device.type != "cuda":
        return
    name, has_bf16 = torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)
    if error := precision_error(precision, device_name=name, has_bf16=has_bf16):
        raise PrecisionError(error)
    set_tf32(precision == "tf32")


def set_tf32(enabled: bool) -> None:
    """Choose whether GPUs compute float32 matrix products and convolutions in TF32.

    By default torch computes convolutions in TF32, but not matrix products.
    """
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled


def precision_error(precision: str, *, device_name: str, has_bf16: bool) -> str | None:
    """Return why a GPU does not compute in ``precision`` and what to set instead; None if it does."""
    if has_bf16 or not precision.startswith("bf16"):
        return None
    return f"train.precision={precision}: {device_name} has no bfloat16 arithmetic; set it to fp16 or fp32"
