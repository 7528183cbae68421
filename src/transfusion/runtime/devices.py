"""Devices of this machine, and the types to compute in."""

from __future__ import annotations

import os

import torch

from transfusion.errors import SettingError, reason_of


def require_device(device: str) -> str:
    """Return the device; refuse one that cannot compute here."""
    try:
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        raise SettingError(
            f"device {device!r} cannot be used here ({reason_of(error)})",
            hint="leave out `device` to compute on cpu",
        ) from error
    return device


def as_precision(dtype: torch.dtype | str) -> torch.dtype:
    """Return the type to compute in; refuse types in which sums lose digits."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.float64):
        raise SettingError(f"dtype = {dtype}: too coarse to compute in", hint="choose float32 or float64")
    return chosen


def device_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
