"""The paper's weight matching as one would first write it, for a ViT of transformers.

Algorithms 1 and 2 word by word: whole matrices, every gain computed in full at every visit, SciPy's solver
from scratch, one thread. Nothing here is shared with the package, so it serves twice: as the yardstick of
the benchmark, and as a witness that the package's preset ``transfusion`` is the paper's method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def assign(gain: Tensor) -> Tensor:
    """P of Eq. 2: for each unit of B, the unit of A."""
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


@dataclass
class Textbook:
    """Two vision transformers and the permutations between them."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]
    heads: int
    inter: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, a: Path, b: Path, heads: int) -> Textbook:
        """Read both models whole."""
        of_a, of_b = (load_file(folder / "model.safetensors") for folder in (a, b))
        return cls(of_a, of_b, heads)

    def __post_init__(self) -> None:
        self.layers = 1 + max(int(name.split(".")[2]) for name in self.a if name.startswith("encoder.layer."))
        self.width = self.a["embeddings.cls_token"].shape[-1]
        up = self.a["encoder.layer.0.intermediate.dense.weight"]
        self.x = [torch.arange(self.width) for _ in range(self.layers + 1)]
        self.y = [torch.arange(self.width) for _ in range(self.layers)]
        self.attention = [torch.arange(self.width) for _ in range(self.layers)]
        self.ffn = [torch.arange(len(up)) for _ in range(self.layers)]
        self.trace = [self.objective()]

    def run(self, max_sweeps: int = 100) -> int:
        """Algorithm 1: sweeps until nothing changes; gives their number."""
        for sweep in range(1, max_sweeps + 1):
            changed = False
            for layer in range(self.layers):
                for name in ("x", "attention", "y", "ffn"):
                    changed |= self.visit(name, layer)
            changed |= self.visit("x", self.layers)
            self.trace.append(self.objective())
            if not changed:
                return sweep
        return max_sweeps

    def visit(self, name: str, layer: int) -> bool:
        """Solve for one permutation; says whether it changed."""
        known = getattr(self, name)
        found = (
            self.align_attention(layer)
            if name == "attention"
            else assign(getattr(self, f"gain_{name}")(layer))
        )
        changed = not torch.equal(found, known[layer])
        known[layer] = found
        return changed

    # ── gains ────────────────────────────────────────────────────────────────────────────────

    def weights(self, part: str, layer: int) -> tuple[Tensor, Tensor]:
        """A matrix of a layer, in A and in B."""
        name = f"encoder.layer.{layer}.{part}.weight"
        return self.a[name], self.b[name]

    def gain_x(self, layer: int) -> Tensor:
        """The stream before a layer: what writes into it, and what reads it."""
        gain = torch.zeros(self.width, self.width)
        if layer == 0:
            for name in self.entries():
                of_a, of_b = self.a[name], self.b[name]
                if name.endswith("projection.weight"):
                    of_a, of_b = of_a.flatten(1), of_b.flatten(1)
                else:
                    of_a, of_b = of_a.flatten(0, -2).T, of_b.flatten(0, -2).T
                gain += of_b @ of_a.T
        else:
            of_a, of_b = self.weights("output.dense", layer - 1)
            gain += of_b @ of_a[:, self.ffn[layer - 1]].T
        if layer < self.layers:
            for part in QKV:
                of_a, of_b = self.weights(part, layer)
                gain += of_b.T @ of_a[self.attention[layer]]
        return gain

    def gain_y(self, layer: int) -> Tensor:
        """The stream between attention and MLP."""
        of_a, of_b = self.weights(O, layer)
        gain = of_b @ of_a[:, self.attention[layer]].T
        of_a, of_b = self.weights("intermediate.dense", layer)
        return gain + of_b.T @ of_a[self.ffn[layer]]

    def gain_ffn(self, layer: int) -> Tensor:
        """The units of the MLP."""
        of_a, of_b = self.weights("intermediate.dense", layer)
        gain = of_b @ of_a[:, self.y[layer]].T
        of_a, of_b = self.weights("output.dense", layer)
        return gain + of_b.T @ of_a[self.x[layer + 1]]

    def align_attention(self, layer: int) -> Tensor:
        """Algorithm 2: heads by their singular values, then the units inside each pair."""
        size = self.width // self.heads
        if layer not in self.inter:  # depends on no permutation, so even a textbook computes it once
            distance = torch.zeros(self.heads, self.heads, dtype=torch.float64)
            for part in QKV:
                of_a, of_b = (
                    torch.linalg.svdvals(matrix.view(self.heads, size, -1).double())
                    for matrix in self.weights(part, layer)
                )
                distance += torch.cdist(of_b, of_a)
            self.inter[layer] = assign(-distance)
        units = torch.arange(self.width).view(self.heads, size)
        found = []
        for head, partner in enumerate(self.inter[layer].tolist()):
            gain = torch.zeros(size, size)
            for part in QKV:
                of_a, of_b = self.weights(part, layer)
                gain += of_b[units[head]] @ of_a[units[partner]][:, self.x[layer]].T
            found.append(units[partner][assign(gain)])
        return torch.cat(found)

    # ── the objective ────────────────────────────────────────────────────────────────────────

    def entries(self) -> list[str]:
        return [name for name in self.a if name.startswith("embeddings.") and not name.endswith("bias")]

    def objective(self) -> float:
        """⟨π(A), B⟩ over all matrices."""
        total = 0.0
        for name in self.entries():
            dim = 0 if name.endswith("projection.weight") else -1
            total += _dot(self.a[name].index_select(dim, self.x[0]), self.b[name])
        for layer in range(self.layers):
            for part, rows, columns in (
                *((part, self.attention, self.x) for part in QKV),
                (O, self.y, self.attention),
                ("intermediate.dense", self.ffn, self.y),
            ):
                of_a, of_b = self.weights(part, layer)
                total += _dot(of_a[rows[layer]][:, columns[layer]], of_b)
            of_a, of_b = self.weights("output.dense", layer)
            total += _dot(of_a[self.x[layer + 1]][:, self.ffn[layer]], of_b)
        return total


QKV = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
O = "attention.output.dense"  # noqa: E741


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())
