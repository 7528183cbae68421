"""Guards of the redesign: every family's architecture, and outputs by several methods, compared over commits.

    python scripts/guard.py record          writes scripts/guard.json (five minutes)
    python scripts/guard.py compare         lists what differs from it, and exits with 1 if anything does
    python scripts/guard.py compare llama   the same for some cases only

Everything goes through `Model.open`, `align`, `apply` and `transport`, so that the inside may change. Of an
output three numbers are kept: how many tensors it has, the sum of the logarithms of their norms, and the sum
of their products with random numbers, each divided by its norm.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FILE = HERE / "guard.json"
sys.path.insert(0, str(HERE.parent / "tests"))
DIGITS = 1e-5
FUNCTIONAL = ("vit-classifier", "bert-classifier", "llama", "gpt2", "clip", "timm-vit")
Found = dict[str, Any]


def summary(name: str, tensor: Tensor) -> tuple[float, float]:
    """Return the logarithm of a tensor's norm, and its direction's product with random numbers."""
    values = tensor.detach().double().flatten()
    norm = float(torch.linalg.vector_norm(values)) or 1.0
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    random = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return math.log(norm), float(values @ random) / norm


def architecture(folder: Path) -> str:
    """Return a hash of all that a table says about a model."""
    from transfusion.model.model import Model

    found = Model.open(folder).architecture
    said = {
        "tensors": {name: str(layout) for name, layout in found.tensors.items()},
        "spaces": {
            id: [space.size, str(space.group), space.parent, space.stream]
            for id, space in found.spaces.items()
        },
        "shortcuts": sorted(str((cut.entry, cut.source)) for cut in found.shortcuts),
        "outputs": dict(found.outputs),
        "scales": sorted(found.scales),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tensors(made: Callable[[], Any]) -> list[float] | str:
    """Return the summary of an output, or the refusal."""
    from transfusion.errors import TransfusionError

    try:
        found = [summary(name, one) for name, one in sorted(made().state_dict().items())]
    except TransfusionError as error:
        return type(error).__name__
    return [len(found), *(sum(one) for one in zip(*found, strict=True))]


def guarded(name: str, place: Path) -> Iterator[tuple[str, Any]]:
    """Yield what is recorded of one case."""
    from small_models import CASES, finetuned
    from transfusion import align, apply, transport

    case = CASES[name]
    a, stranger = case.save(place / "a", 1), case.save(place / "stranger", 2)
    yield "architecture", architecture(a)
    tuned = finetuned(case, a, place / "tuned")
    move = align(a, a, method="random", residual="tied", seed=3, advice=False)
    b = apply(move, a).save(place / "b")
    common: Found = {"base": a, "force_unrelated": True}
    yield "shuffled", tensors(lambda: transport(tuned, onto=b, **common))
    yield "stranger", tensors(lambda: transport(tuned, onto=stranger, **common))
    yield "paper", tensors(lambda: transport(tuned, onto=stranger, method="transfusion", **common))
    if name in FUNCTIONAL:
        yield "functional", tensors(lambda: transport(tuned, onto=b, method="functional", **common))


def record(names: list[str]) -> Found:
    from small_models import CASES

    found: Found = {}
    for number, name in enumerate(names or sorted(CASES)):
        print(f"{number + 1} {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = dict(guarded(name, Path(folder)))
    return found


def near(one: Any, other: Any) -> bool:
    """Whether two records are the same, up to rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return all(math.isclose(x, y, abs_tol=DIGITS * one[0]) for x, y in zip(one, other, strict=True))
    return bool(one == other)


def main(what: str, *names: str) -> int:
    torch.set_num_threads(1)
    found = record(list(names))
    if what == "record":
        known = json.loads(FILE.read_text()) if names and FILE.exists() else {}
        FILE.write_text(json.dumps({**known, **found}, indent=0, sort_keys=True) + "\n")
        return 0
    known = json.loads(FILE.read_text())
    differing = [
        f"{name}: {part}"
        for name, parts in found.items()
        for part in parts
        if not near(parts[part], known.get(name, {}).get(part))
    ]
    gone = [name for name in known if not names and name not in found]
    print("\n".join([*differing, *(f"{name}: not there any more" for name in gone)]) or "nothing differs")
    return int(bool(differing or gone))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
