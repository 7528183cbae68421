"""Models that compute the same in other bases: the stream turned, heads turned, some of it larger.

Everything is done by hand on live modules, in float64, without any of the program's own maps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from small_models import CASES, Case


@dataclass(frozen=True)
class Head:
    """One head, or one group of heads: the rows of v and the columns of o that are its own."""

    q: slice | None
    """Rows of q and of k; none where they cannot be turned."""
    v: slice
    o: tuple[slice, ...]


@dataclass
class Anatomy:
    """Which modules read the stream, and which write to it."""

    embeddings: list[nn.Parameter] = field(default_factory=list)
    """With the stream as their last dimension."""
    read_through: list[tuple[Any, list[nn.Linear]]] = field(default_factory=list)
    """Norms with those that read the stream through them."""
    norms: list[nn.LayerNorm] = field(default_factory=list)
    """Norms that put out the stream itself."""
    read: list[nn.Linear] = field(default_factory=list)
    """Those that read the stream as it is."""
    write: list[Any] = field(default_factory=list)
    """Linear maps and convolutions that write to the stream."""
    attentions: list[tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)


def _even(count: int, size: int) -> list[Head]:
    parts = [slice(size * i, size * (i + 1)) for i in range(count)]
    return [Head(part, part, (part,)) for part in parts]


def _vit(module: Any) -> Anatomy:
    given, vit = module.vit.embeddings, module.vit
    found = Anatomy([given.cls_token, given.position_embeddings], heads=_even(4, 6))
    found.write.append(given.patch_embeddings.projection)
    for layer in vit.layers:
        parts = layer.attention
        found.attentions.append((parts.q_proj, parts.k_proj, parts.v_proj, parts.o_proj))
        found.read_through += [
            (layer.layernorm_before, [parts.q_proj, parts.k_proj, parts.v_proj]),
            (layer.layernorm_after, [layer.mlp.fc1]),
        ]
        found.write += [parts.o_proj, layer.mlp.fc2]
    found.read_through.append((vit.layernorm, [module.classifier]))
    return found


def _bert(module: Any) -> Anatomy:
    given = module.bert.embeddings
    tables = (given.word_embeddings, given.position_embeddings, given.token_type_embeddings)
    found = Anatomy([one.weight for one in tables], norms=[given.LayerNorm], heads=_even(4, 6))
    for layer in module.bert.encoder.layer:
        parts, out = layer.attention.self, layer.attention.output
        found.attentions.append((parts.query, parts.key, parts.value, out.dense))
        found.read += [parts.query, parts.key, parts.value, layer.intermediate.dense]
        found.write += [out.dense, layer.output.dense]
        found.norms += [out.LayerNorm, layer.output.LayerNorm]
    found.read_through.append((found.norms.pop(), [module.bert.pooler.dense]))  # no stream goes by
    return found


def _llama(module: Any) -> Anatomy:
    found = Anatomy([module.model.embed_tokens.weight])
    for layer in module.model.layers:
        parts, mlp = layer.self_attn, layer.mlp
        found.attentions.append((parts.q_proj, parts.k_proj, parts.v_proj, parts.o_proj))
        found.read_through += [
            (layer.input_layernorm, [parts.q_proj, parts.k_proj, parts.v_proj]),
            (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
        ]
        found.write += [parts.o_proj, mlp.down_proj]
    found.read_through.append((module.model.norm, [module.lm_head]))
    for group in range(2):
        queries = (slice(8 * i, 8 * (i + 1)) for i in range(3 * group, 3 * group + 3))
        found.heads.append(Head(None, slice(8 * group, 8 * (group + 1)), tuple(queries)))
    return found


ANATOMIES = {"vit-classifier": _vit, "bert-classifier": _bert, "llama": _llama}
"""Before branches, after them, and without a shift or a mean."""


@dataclass(frozen=True)
class Plant:
    """A model, and the same in another basis."""

    case: Case
    root: Path
    stream: Tensor
    """B's directions of the stream, in those of A."""
    larger: float = 1.0
    """How much larger the stream is."""
    sizes: tuple[float, ...] = (1.0,)
    """How much larger the values of heads are, over and over."""
    seed: int = 5

    @cached_property
    def a(self) -> Path:
        return self.case.store(self._first().float(), self.root / "a")

    @cached_property
    def b(self) -> Path:
        module = self._first()
        with torch.no_grad():
            self._turn(ANATOMIES[self.case.name](module))
        return self.case.store(module.float(), self.root / "b")

    @cached_property
    def tuned(self) -> Path:
        """A fine-tune of A; scales that can only be one remain so."""
        module = self._first()
        generator = torch.Generator().manual_seed(7)
        still = {id(norm.weight) for norm in ANATOMIES[self.case.name](module).norms}
        with torch.no_grad():
            for parameter in module.parameters():
                if id(parameter) not in still:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return self.case.store(module.float(), self.root / "tuned")

    def _first(self) -> Any:
        """A, live. Where norms put out the stream itself, they can be turned if all their scales are one."""
        module = self.case.build(1).double()
        with torch.no_grad():
            for norm in ANATOMIES[self.case.name](module).norms:
                norm.weight.fill_(1)
        return module

    @property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _turn(self, parts: Anatomy) -> None:
        q, generator = self.stream, self._generator
        for table in parts.embeddings:
            table.copy_(self.larger * table @ q.T)
        for norm, readers in parts.read_through:
            mine, shift = norm.weight.clone(), getattr(norm, "bias", None)
            norm.weight.copy_(0.5 + torch.rand(mine.shape, generator=generator, dtype=mine.dtype))
            for reader in readers:
                reader.weight.copy_(reader.weight * mine @ q.T / norm.weight)
            if shift is not None:
                shift.copy_(norm.weight * (q @ (shift / mine)))
        for norm in parts.norms:
            norm.bias.copy_(q @ norm.bias)
        for reader in parts.read:
            reader.weight.copy_(reader.weight @ q.T)
        for writer in parts.write:
            writer.weight.copy_(self.larger * torch.einsum("ij,j...->i...", q, writer.weight))
            if writer.bias is not None:
                writer.bias.copy_(self.larger * q @ writer.bias)
        for attention in parts.attentions:
            for number, head in enumerate(parts.heads):
                self._turn_head(attention, head, self.sizes[number % len(self.sizes)], generator)

    def _turn_head(
        self, attention: Iterable[nn.Linear], head: Head, larger: float, generator: torch.Generator
    ) -> None:
        q, k, v, o = attention
        turn = orthogonal(head.v.stop - head.v.start, generator)
        _rows(v, head.v, larger * turn)
        for columns in head.o:
            o.weight[:, columns] = o.weight[:, columns] @ turn.T / larger
        if head.q is not None:
            turn = orthogonal(head.q.stop - head.q.start, generator)
            _rows(q, head.q, turn)
            _rows(k, head.q, turn)


def _rows(module: nn.Linear, rows: slice, turn: Tensor) -> None:
    module.weight[rows] = turn @ module.weight[rows]
    if module.bias is not None:
        module.bias[rows] = turn @ module.bias[rows]


def orthogonal(size: int, generator: torch.Generator, *, keeps_mean: bool = False) -> Tensor:
    """A random rotation; one that leaves a vector of ones where it is, for norms that take the mean away."""
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    if not keeps_mean:
        return torch.linalg.qr(drawn)[0]
    drawn[:, 0] = 1
    base = torch.linalg.qr(drawn)[0]  # the first column is the mean
    turn = torch.eye(size, dtype=torch.float64)
    turn[1:, 1:] = orthogonal(size - 1, generator)
    rotated: Tensor = base @ turn @ base.T
    return rotated


def plant(case: str, root: Path, **settings: Any) -> Plant:
    """A tiny model, turned at random."""
    generator = torch.Generator().manual_seed(3)
    size, keeps_mean = (36, False) if case == "llama" else (24, True)
    return Plant(CASES[case], root, orthogonal(size, generator, keeps_mean=keeps_mean), **settings)
