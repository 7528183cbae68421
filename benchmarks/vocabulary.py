"""How much of a fine-tune arrives on a base that differs by 5 % of its tokens, and where the rest is lost.

python benchmarks/vocabulary.py -o results.json

A is a small language model of film reviews; its fine-tune learns Python code. B is trained on from A with
other reviews: once with A's tokenizer, and once with one in which 5 % of the tokens are others and all rows
are shuffled. Scores are bits per byte of held-out code, which do not depend on the tokenizer. Both tokenizers
cut the code at common boundaries, and what is lost is counted apart: where a token is one that only A has,
where it is one that only B has, just after such a token, and elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sysconfig
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from transfusion import transport
from transfusion_demo.reviews import load

TOKENS, OTHERS = 1000, 50
CONTEXT, BATCH, RATE = 128, 16, 1e-3
PAIRS = ("same tokens", "other tokens")
ALIKE, AFTER, OF_A, OF_B = "elsewhere", "just after", "only in A", "only in B"
PLACES = (ALIKE, AFTER, OF_A, OF_B)


def texts() -> tuple[list[str], list[str]]:
    """Return film reviews, and files of Python's own library."""
    reviews = [text for text, _ in load(6000)]
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    return reviews, [file.read_text(encoding="utf-8", errors="ignore")[:20_000] for file in files]


def tokenizers(sample: list[str], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two tokenizers of equal size, each with tokens that the other lacks; the second one's rows are
    shuffled.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS + OTHERS, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(sample, trainer)
    whole = json.loads(made.to_str())
    merges = [
        tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in whole["model"]["merges"]
    ]
    parts = {part for merge in merges for part in merge}
    ends = sorted({"".join(merge) for merge in merges} - parts)
    generator = torch.Generator().manual_seed(seed)
    drawn = [ends[n] for n in torch.randperm(len(ends), generator=generator)[: 2 * OTHERS].tolist()]
    found = []
    for lacking, shuffle in ((set(drawn[:OTHERS]), False), (set(drawn[OTHERS:]), True)):
        tokens = [token for token in whole["model"]["vocab"] if token not in lacking]
        if shuffle:
            tokens = [tokens[n] for n in torch.randperm(len(tokens), generator=generator).tolist()]
        kept = [list(merge) for merge in merges if "".join(merge) not in lacking]
        vocabulary = {token: row for row, token in enumerate(tokens)}
        found.append({**whole, "model": {**whole["model"], "vocab": vocabulary, "merges": kept}})
    return found[0], found[1]


def encoded(tokenizer: dict[str, Any], given: list[str]) -> Tensor:
    made = Tokenizer.from_str(json.dumps(tokenizer))
    return torch.tensor([id for one in made.encode_batch(given) for id in one.ids])


def train(model: GPT2LMHeadModel, ids: Tensor, steps: int, seed: int) -> GPT2LMHeadModel:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts.tolist()])
        optimiser.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


@dataclass(frozen=True)
class HeldOut:
    """A text in the tokens of both, cut wherever both begin a token."""

    ids: dict[str, Tensor]
    """By the name of the pair, the tokens of its B."""
    ends: dict[str, Tensor]
    """How many of them lie before each cut."""
    places: tuple[str, ...]
    """What lies before each cut."""
    bytes: int

    @classmethod
    def of(cls, old: dict[str, Any], new: dict[str, Any], text: str) -> HeldOut:
        found = [Tokenizer.from_str(json.dumps(one)).encode(text) for one in (old, new)]
        tokens = [one.tokens for one in found]  # the library makes a new list whenever it is asked
        ends = [list(accumulate(map(len, some))) for some in tokens]  # a letter of a token is a byte
        cuts = sorted(set(ends[0]) & set(ends[1]))
        counts = [[bisect_right(some, cut) for cut in cuts] for some in ends]
        mine, theirs = (
            [every[first:last] for first, last in pairwise([0, *some])]
            for every, some in zip(tokens, counts, strict=True)
        )
        places: list[str] = []
        for of_a, of_b in zip(mine, theirs, strict=True):
            if not old["model"]["vocab"].keys() >= set(of_b):
                places.append(OF_B)
            elif not new["model"]["vocab"].keys() >= set(of_a):
                places.append(OF_A)
            else:
                places.append(AFTER if places and places[-1] in (OF_A, OF_B) else ALIKE)
        ids = [torch.tensor(one.ids) for one in found]
        return cls(
            dict(zip(PAIRS, ids, strict=True)),
            dict(zip(PAIRS, map(torch.tensor, counts), strict=True)),
            tuple(places),
            cuts[-1],
        )

    def bits(self, model: GPT2LMHeadModel, pair: str) -> dict[str, float]:
        """Return how many bits a model needs for what lies in each kind of place."""
        until = torch.cat([torch.zeros(1), token_bits(model, self.ids[pair])]).double().cumsum(0)
        spent = until[self.ends[pair]].diff(prepend=torch.zeros(1).double())
        return {
            place: float(spent[torch.tensor([one == place for one in self.places])].sum()) for place in PLACES
        }


@torch.no_grad()
def token_bits(model: GPT2LMHeadModel, ids: Tensor) -> Tensor:
    """Return the bits of every token but the first, each after half a context if there is so much."""
    half = CONTEXT // 2
    starts = [*range(0, len(ids) - CONTEXT, half), len(ids) - CONTEXT]
    found = torch.zeros(len(ids))
    for some in (starts[n : n + 32] for n in range(0, len(starts), 32)):
        batch = torch.stack([ids[start : start + CONTEXT] for start in some])
        spent = torch.log_softmax(model(input_ids=batch).logits[:, :-1], -1).gather(2, batch[:, 1:, None])
        for start, row in zip(some, spent[..., 0], strict=True):
            known = 0 if start == 0 else half - 1
            found[start + 1 + known : start + CONTEXT] = -row[known:] / math.log(2)
    return found


def copied(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    other = GPT2LMHeadModel(model.config)
    other.load_state_dict(model.state_dict())
    return other


def in_tokens_of(model: GPT2LMHeadModel, old: dict[str, Any], new: dict[str, Any]) -> GPT2LMHeadModel:
    """Return the model with another tokenizer's rows; tokens that it lacks start at the mean."""
    other, rows = copied(model), old["model"]["vocab"]
    table = model.transformer.wte.weight.data
    mean = table.mean(0)
    fresh = [table[rows[token]] if token in rows else mean for token in new["model"]["vocab"]]
    other.transformer.wte.weight.data.copy_(torch.stack(fresh))
    return other


def without_rows(
    tuned: GPT2LMHeadModel, b: GPT2LMHeadModel, own: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> GPT2LMHeadModel:
    """Return a fine-tune of B with B's rows for the tokens that only one of the tokenizers has."""
    other = copied(tuned)
    lone = old["model"]["vocab"].keys() ^ new["model"]["vocab"].keys()
    rows = [row for token, row in own["model"]["vocab"].items() if token in lone]
    other.transformer.wte.weight.data[rows] = b.transformer.wte.weight.data[rows]
    return other.eval()


def loaded(folder: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(folder).eval()


def saved(model: GPT2LMHeadModel, folder: Path, tokenizer: dict[str, Any]) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def trained(
    root: Path, seed: int, steps: tuple[int, int, int], old: dict[str, Any], new: dict[str, Any]
) -> None:
    """Train A, its fine-tune, both B and their own fine-tunes; those that are there already are kept."""
    reviews, code = texts()
    half, domain = len(reviews) // 2, [one for n, one in enumerate(code) if n % 5]
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "vocab_size": TOKENS}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}

    def kept(
        folder: Path, start: Callable[[], GPT2LMHeadModel], given: list[str], count: int, own: int
    ) -> GPT2LMHeadModel:
        if not folder.exists():
            torch.manual_seed(own)
            tokenizer = new if PAIRS[1] in folder.parts else old
            saved(train(start(), encoded(tokenizer, given), count, own), folder, tokenizer)
        return loaded(folder)

    a = kept(root / "a", lambda: GPT2LMHeadModel(GPT2Config(**sizes)), reviews[:half], steps[0], seed)
    kept(root / "tuned", partial(copied, a), domain, steps[2], seed)
    for pair, tokenizer in zip(PAIRS, (old, new), strict=True):
        begun = partial(in_tokens_of, a, old, tokenizer)
        b = kept(root / pair / "b", begun, reviews[half:], steps[1], seed + 10)
        kept(root / pair / "best", partial(copied, b), domain, steps[2], seed)


def measure(root: Path, seed: int, steps: tuple[int, int, int]) -> dict[str, Any]:
    reviews, code = texts()
    old, new = tokenizers(reviews[:2000] + [one for n, one in enumerate(code) if n % 5][:40], seed)
    trained(root, seed, steps, old, new)
    held_out = HeldOut.of(old, new, "\n".join(one[4000:8000] for one in code[::10]))
    result: dict[str, Any] = {"seed": seed, "bytes": held_out.bytes}
    for pair, tokenizer in zip(PAIRS, (old, new), strict=True):
        b, best = (loaded(root / pair / name) for name in ("b", "best"))
        moved = transport(root / "tuned", base=root / "a", onto=root / pair / "b")
        blind = shutil.copytree(root / "a", root / pair / "a without tokenizer", dirs_exist_ok=True)
        (blind / "tokenizer.json").unlink()
        by_row = transport(root / "tuned", base=blind, onto=root / pair / "b", method="naive")
        arrived = moved.module().eval()
        models = {
            "B": b,
            "B fine-tuned": best,
            "by row": by_row.module().eval(),
            "by token": arrived,
            "by token, other rows dropped": without_rows(arrived, b, tokenizer, old, new),
            "B fine-tuned, other rows dropped": without_rows(best, b, tokenizer, old, new),
        }
        bits = {way: held_out.bits(model, pair) for way, model in models.items()}
        total = {way: sum(some.values()) for way, some in bits.items()}
        gap = total["B"] - total["B fine-tuned"]
        result[pair] = {
            "common share": moved.metadata()["vocabulary"]["share"],
            "bits per byte": {way: some / held_out.bytes for way, some in total.items()},
            "arrives": {way: (total["B"] - some) / gap for way, some in total.items()},
            "lost": {
                way: {place: (some[place] - bits["B fine-tuned"][place]) / gap for place in PLACES}
                for way, some in bits.items()
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, nargs=3, default=(600, 200, 200), help="of A, of B, of fine-tunes"
    )
    parser.add_argument("--models", type=Path, help="keep the models there, and take them from there again")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    disable_progress_bar()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            place = (given.models or Path(folder)) / f"seed{seed}"
            found.append(measure(place, seed, tuple(given.steps)))
            print(json.dumps(found[-1], indent=2), flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
