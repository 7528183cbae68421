"""Make an environment's torchvision importable where its compiled operators do not fit torch.

The test environment has the CPU build of torch, for which no torchvision is built; open_clip and timm
import torchvision all the same, and so does transformers where it finds one. None of them needs its
operators here: declaring the two that are looked up at import is enough. Does nothing where
torchvision imports, or is not installed.
"""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

HOOK = '''
import sys


class _DeclareOperators:
    """Just before torchvision is imported, declares the operators it expects to find."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(_DeclareOperators)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].library = library
        return None


sys.meta_path.insert(0, _DeclareOperators)
'''


def main() -> None:
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        site = Path(sysconfig.get_paths()["purelib"])
        (site / "_declare_torchvision_operators.py").write_text(HOOK)
        (site / "_declare_torchvision_operators.pth").write_text("import _declare_torchvision_operators\n")
        print("torchvision does not fit this torch; its operators are now declared without it")


if __name__ == "__main__":
    main()
