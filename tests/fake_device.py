"""A device that no machine has: its tensors are held by the CPU, and behave as those of an accelerator do.

Tensors of the device and of the CPU do not mix, NumPy reads none of them, and products that run on the CPU are
noted, so that a test can say that nothing heavy was computed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME, FIRST = "fake", "fake:0"
SMALL = 512
"""Products of fewer numbers are not noted."""
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "convolution", "_grouped_mm"))
_ATTENTION = "_scaled_dot_product"
_COPIES = ("copy_", "_to_copy")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""What takes indices of the CPU into tensors of the device."""


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device; elsewhere than in `fake_device` there is none."""

    exists, exact = False, True

    def is_available(self) -> bool:
        return self.exists

    def device_count(self) -> int:
        return int(self.exists)

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Leave the numbers as they are: all are drawn on the CPU."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _BACKEND.exists


_BACKEND = _Backend()
# torch starts threads for the devices that it knows when it first computes gradients; this one gets none
torch.ones(1, requires_grad=True).sum().backward()
backend_registration._setup_privateuseone_for_python_backend(NAME, _BACKEND, _Hooks())
_AUTOCAST = torch.library.Library("_", "IMPL")  # types stay, so that results are those of the CPU
_AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_KERNELS = torch.library.Library("aten", "IMPL")


class FakeTensor(Tensor):
    """A tensor of the device; its values are in a tensor of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> FakeTensor:
        if held.dtype is torch.float64 and not _BACKEND.exact:
            raise TypeError(f"Cannot convert a {NAME} Tensor to float64 dtype: the device has none")
        how: dict[str, Any] = {"dtype": held.dtype, "device": FIRST, "storage_offset": held.storage_offset()}
        made: FakeTensor = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), **how)
        made.held = held
        return made

    @property
    def data(self) -> FakeTensor:
        return self.detach()

    @data.setter
    def data(self, values: FakeTensor) -> None:
        torch._C.TensorBase.data.__set__(self, values)
        self.held = values.held

    def untyped_storage(self) -> Any:
        """Return the storage of the values: tensors are told apart by their place in memory."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.held.tolist()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.held.__reduce_ex__(proto)

    def __repr__(self, **_: Any) -> str:
        return f"{FIRST} {self.held!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _empty(size: Any, stride: Any, dtype: Any = None, **_: Any) -> FakeTensor:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy(given: Any, into: Any, *_: Any) -> Any:
    _held(into).copy_(_held(given))
    return into


# what `torch.tensor` calls out of sight of Python
_KERNELS.impl("empty_strided", _empty, "PrivateUse1")
_KERNELS.impl("_copy_from", _copy, "PrivateUse1")


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the values. What an operation changes in place is what it returns."""
    name, device = func.overloadpacket.__name__, kwargs.get("device")
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    ours = [one for one in tensors if isinstance(one, FakeTensor)]
    there = bool(ours) if device is None else torch.device(device).type == NAME
    if not (there or ours):
        return func(*args, **kwargs)
    mixed = [args[0], *args[2:3]] if name in _INDEXED else [] if name in _COPIES else tensors
    if ours and any(
        isinstance(one, Tensor) and one.ndim and not isinstance(one, FakeTensor) for one in mixed
    ):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {FIRST} and cpu!"
            f" (in {name})"
        )
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    found = func(*_held(args), **_held(kwargs | ({} if device is None else {"device": "cpu"})))
    known = {id(one.held if isinstance(one, FakeTensor) else one): one for one in tensors}

    def returned(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return known[id(one)] if id(one) in known else FakeTensor(one) if there else one

    return tree_map(returned, found)


def _held(given: Any) -> Any:
    return tree_map(lambda one: one.held if isinstance(one, FakeTensor) else one, given)


@dataclass
class Products:
    """The products that were computed, by where they ran."""

    on_device: int = 0
    on_cpu: dict[str, list[str]] = field(default_factory=dict)
    """By the module of the package that asked for them."""


class _Watch(TorchDispatchMode):
    """Makes what is asked for on the device, and notes products."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or name.startswith(_ATTENTION):
            tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            if any(isinstance(one, FakeTensor) for one in tensors):
                self.products.on_device += 1
            elif sum(one.numel() for one in tensors) >= SMALL:
                shapes = [tuple(one.shape) for one in tensors]
                self.products.on_cpu.setdefault(_asking(), []).append(f"{name} {shapes}")
        return _computed(func, args, kwargs or {})


def _asking() -> str:
    """Return the innermost module of the package that runs."""
    frame = sys._getframe()
    while frame is not None and not frame.f_globals["__name__"].startswith("transfusion."):
        frame = frame.f_back
    return frame.f_globals["__name__"].removeprefix("transfusion.") if frame else ""


def _keeping_ties(
    convert: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """Convert a module; parameters that are one stay one, which torch sees to on the devices that it knows."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            places.setdefault(id(parameter), []).append((part, name))
    convert(module, *args, **kwargs)
    for (first, named), *others in places.values():
        for part, name in others:
            part._parameters[name] = first._parameters[named]
    return module


@contextmanager
def fake_device(*, exact: bool = True) -> Iterator[Products]:
    """Within the block, the device ``fake`` is there, also for threads of pools; products are noted.

    One that is not ``exact`` has no float64, as mps.
    """
    products, submit, convert = Products(), ThreadPoolExecutor.submit, nn.Module._apply

    def converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return _keeping_ties(convert, module, *args, **kwargs)

    def watched(pool: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def run_watched() -> Any:
            with _Watch(products):
                return run(*args, **kwargs)

        return submit(pool, run_watched)

    with (
        patch.object(_BACKEND, "exists", True),
        patch.object(_BACKEND, "exact", exact),
        patch.object(ThreadPoolExecutor, "submit", watched),
        patch.object(nn.Module, "_apply", converted),
        torch.autograd.set_multithreading_enabled(False),  # this device has no thread of its own
        _Watch(products),
    ):
        yield products
