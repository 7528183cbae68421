"""Devices: where tensors may be, on this machine."""

from __future__ import annotations

import torch

from transfusion.errors import SettingError


def require_device(device: str) -> str:
    """The same device, if one can compute on it here."""
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(
            f"device {device!r} cannot be used here ({reason})", hint="leave --device out to compute on cpu"
        ) from error
    return device
