"""Models whose vocabularies differ: tokenizers made on the spot, and tables with other rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from transfusion.model.model import Model


def with_tokenizer(folder: Path, tokens: Sequence[str]) -> Path:
    """Put a tokenizer of whole words into a folder: row i has the i-th token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({token: row for row, token in enumerate(tokens)}, unk_token=tokens[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder


def copied(model: Path, folder: Path, tokens: Sequence[str] | None = None) -> Path:
    """A copy of a model's folder, with a tokenizer."""
    shutil.copytree(model, folder)
    return folder if tokens is None else with_tokenizer(folder, tokens)


def with_rows(
    model: Path, folder: Path, rows: Sequence[int | None], tokens: Sequence[str] | None = None
) -> Path:
    """The model with these rows of its vocabulary; a row of random values where there is None."""
    opened = Model.open(model)
    tensors = {}
    generator = torch.Generator().manual_seed(5)
    for name in opened.names:
        value = opened.read(name)
        layout = opened.architecture.tensors.get(name)
        for dim in layout.dims_with("vocab") if layout else ():
            shape = value.select(dim, 0).shape
            fresh = [torch.randn(shape, generator=generator, dtype=value.dtype) for _ in rows]
            parts = [
                one if row is None else value.select(dim, row) for one, row in zip(fresh, rows, strict=True)
            ]
            value = torch.stack(parts, dim)
        tensors[opened.names[name].names[0]] = value.contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(rows)}))
    return folder if tokens is None else with_tokenizer(folder, tokens)


def trained_tokenizer(size: int) -> object:
    """A byte-level tokenizer of the bundled corpus, with so many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from transfusion.running.probes.texts import corpus

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    texts = [passage for passages in corpus().values() for passage in passages]
    made.train_from_iterator(texts, trainer)
    return made


def save_tokenizer(folder: Path, whole: dict) -> Path:
    """Write a tokenizer.json, and the file that says how transformers loads it."""
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def rearranged(whole: dict, gone: Sequence[int], seed: int = 0) -> tuple[dict, list[int | None]]:
    """A byte-level tokenizer without some merged tokens, with as many new ones, and with other rows.

    Also returns, for every row, the row of the same token before.
    """
    vocabulary = whole["model"]["vocab"]
    names = {row: token for token, row in vocabulary.items()}
    lost = {names[row] for row in gone}
    merges = [one for one in whole["model"]["merges"] if not lost & {*_pair(one), "".join(_pair(one))}]
    made = {"".join(_pair(one)) for one in merges}
    kept = [t for t in vocabulary if t not in lost and (len(t) == 1 or t in made or t.startswith("<|"))]
    new = [f"ĠĠĠnew{n}" for n in range(len(vocabulary) - len(kept))]
    order = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = [(kept + new)[place] for place in order]
    rows = {token: row for row, token in enumerate(tokens)}
    added = [{**one, "id": rows[one["content"]]} for one in whole["added_tokens"]]
    other = {**whole, "added_tokens": added, "model": {**whole["model"], "vocab": rows, "merges": merges}}
    return other, [vocabulary.get(token) for token in tokens]


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def perturbed(model: Path, folder: Path, size: float = 0.1) -> Path:
    """A fine-tune: every tensor of a model a little changed."""
    shutil.copytree(model, folder)
    opened, generator = Model.open(model), torch.Generator().manual_seed(9)
    tensors = {}
    for name in opened.names:
        value = opened.read(name)
        noise = size * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        tensors[opened.names[name].names[0]] = (value + noise).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
