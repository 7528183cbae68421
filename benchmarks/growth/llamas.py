"""Pairs of Llama-shaped models in bfloat16, drawn at random.

A planted B is A with its units in other places and noise of the same size on every weight, so that half of
what B is comes from A: there is a truth to be found, and it is found in one sweep. An unrelated B has nothing
in common with A, and a search has something to do in every sweep: the worst case, and the same at every size.
Between the two there is little: with a correlation of 0.15 the 0.1 B pair is found in two sweeps, with 0.12
not at all, and at other sizes the edge is elsewhere. Tensors are made one at a time: a model need not fit
into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from transfusion.alignment.alignment import random_maps
from transfusion.alignment.maps import Map, move_tensor
from transfusion.files.publishing import write_json
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.model.model import Model

SHARD = 2**30
"""Bytes of a file, about."""


@dataclass(frozen=True)
class Size:
    """A Llama."""

    name: str
    layers: int
    width: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int = 32000

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        width, kv = self.width, self.width // self.heads * self.groups
        of_a_layer = {
            "self_attn.q_proj.weight": (width, width),
            "self_attn.k_proj.weight": (kv, width),
            "self_attn.v_proj.weight": (kv, width),
            "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (self.ffn, width),
            "mlp.up_proj.weight": (self.ffn, width),
            "mlp.down_proj.weight": (width, self.ffn),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        layers = {
            f"model.layers.{i}.{name}": shape
            for i in range(self.layers)
            for name, shape in of_a_layer.items()
        }
        ends = {"model.norm.weight": (width,), "lm_head.weight": (self.vocabulary, width)}
        return {"model.embed_tokens.weight": (self.vocabulary, width), **layers, **ends}

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes().values())


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 2, 128, 320, 8, 4, 500),
        Size("20M", 8, 384, 1024, 6, 2, 10000),
        Size("60M", 9, 512, 1408, 8, 4),
        Size("0.1B", 12, 768, 2048, 12, 4),
        Size("0.3B", 24, 1024, 2816, 16, 4),
        Size("1.1B", 22, 2048, 5632, 32, 4),
        Size("1.4B", 18, 2048, 8192, 32, 8, 64000),
    )
}


def pair(folder: Path, size: Size, *, related: bool) -> tuple[Path, Path]:
    """A and a B in a folder; those that are there already are used again."""
    a, b = folder / f"{size.name}-a", folder / f"{size.name}-{'b' if related else 'unrelated'}"
    if not (a / "config.json").exists():
        write_model(a, size, partial(drawn, "a"))
    if not related and not (b / "config.json").exists():
        write_model(b, size, partial(drawn, "unrelated"))
    elif not (b / "config.json").exists():
        model = Model.open(a)
        maps = random_maps(model.architecture, 0)
        write_model(b, size, lambda name, shape: _relative(model, maps, name, shape))
    return a, b


def write_model(folder: Path, size: Size, draw: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Write a model whose tensors are drawn by name and shape, one at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_files(size))
    placed: dict[str, str] = {}
    for number, shapes in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        lazy_tensors = {
            name: LazyTensor(shape, torch.bfloat16, partial(_one_block, draw, name, shape))
            for name, shape in shapes.items()
        }
        write_shard(folder / file, lazy_tensors)
        placed |= dict.fromkeys(shapes, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    write_json(folder / "config.json", size.config())  # last: now it is whole


def _one_block(
    draw: Callable[[str, tuple[int, ...]], Tensor], name: str, shape: tuple[int, ...]
) -> list[Callable[[], Tensor]]:
    return [partial(draw, name, shape)]


def _files(size: Size) -> Iterator[dict[str, tuple[int, ...]]]:
    file: dict[str, tuple[int, ...]] = {}
    for name, shape in size.shapes().items():
        file[name] = shape
        if 2 * sum(torch.Size(one).numel() for one in file.values()) > SHARD:
            yield file
            file = {}
    if file:
        yield file


def drawn(who: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor of a model: normal numbers, and ones for norms."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn: Tensor = torch.randn(shape, generator=_generator(f"{who} {name}")) / shape[-1] ** 0.5
    return drawn.to(torch.bfloat16)


def _relative(model: Model, maps: Mapping[str, Map], name: str, shape: tuple[int, ...]) -> Tensor:
    ours = next(one for one, stored in model.names.items() if name in stored.names)
    architecture = model.architecture
    layout = architecture.tensors[ours]
    moved = move_tensor(model.read(ours).float(), layout, maps, architecture.sizes, architecture.parents)
    if len(shape) > 1:
        noise = torch.randn(shape, generator=_generator(f"b {name}")) / shape[-1] ** 0.5
        moved = (moved + noise) / 2**0.5
    return moved.to(torch.bfloat16)


def _generator(words: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(words.encode()))
