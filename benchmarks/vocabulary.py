"""How much of a fine-tune arrives on a base that differs by 5 % of its tokens.

python benchmarks/vocabulary.py -o results.json

A is a small language model of film reviews; its fine-tune learns Python code. B is trained on from A with
other reviews: once with A's tokenizer, and once with one in which 5 % of the tokens are others and all rows
are shuffled. Scores are bits per byte of held-out code, which do not depend on the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from transfusion import transport
from transfusion_demo.reviews import load

TOKENS, OTHERS = 1000, 50
CONTEXT, BATCH, RATE = 128, 16, 1e-3


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


def bits_per_byte(folder: Path, tokenizer: dict[str, Any], held_out: list[str]) -> float:
    model, ids = GPT2LMHeadModel.from_pretrained(folder).eval(), encoded(tokenizer, held_out)
    rows = ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    total = 0.0
    with torch.no_grad():
        for batch in torch.split(rows, 32):
            total += float(model(input_ids=batch, labels=batch).loss) * (CONTEXT - 1) * len(batch)
    per_token = total / ((CONTEXT - 1) * len(rows)) / math.log(2)
    return per_token * len(ids) / sum(len(text.encode()) for text in held_out)


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


def without_new_rows(
    tuned: GPT2LMHeadModel, base: GPT2LMHeadModel, old: dict[str, Any], new: dict[str, Any]
) -> GPT2LMHeadModel:
    """Return B's own fine-tune with B's rows for the tokens that A lacks: the most that can arrive."""
    other = copied(tuned)
    rows = [row for token, row in new["model"]["vocab"].items() if token not in old["model"]["vocab"]]
    other.transformer.wte.weight.data[rows] = base.transformer.wte.weight.data[rows]
    return other


def saved(model: GPT2LMHeadModel, folder: Path, tokenizer: dict[str, Any]) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def measure(root: Path, seed: int, steps: tuple[int, int, int]) -> dict[str, Any]:
    torch.manual_seed(seed)
    reviews, code = texts()
    half, held_out, domain = len(reviews) // 2, code[::5], [one for n, one in enumerate(code) if n % 5]
    old, new = tokenizers(reviews[:2000] + domain[:40], seed)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": CONTEXT, "vocab_size": TOKENS}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    of_a = train(GPT2LMHeadModel(GPT2Config(**sizes)), encoded(old, reviews[:half]), steps[0], seed)
    a = saved(of_a, root / "a", old)
    tuned = saved(train(copied(of_a), encoded(old, domain), steps[2], seed), root / "tuned", old)
    result: dict[str, Any] = {"seed": seed, "A": bits_per_byte(a, old, held_out)}
    result["A fine-tuned"] = bits_per_byte(tuned, old, held_out)
    for name, tokenizer in (("same tokens", old), ("other tokens", new)):
        begun = in_tokens_of(of_a, old, tokenizer)
        of_b = train(begun, encoded(tokenizer, reviews[half:]), steps[1], seed + 10)
        b = saved(of_b, root / name / "b", tokenizer)
        best = train(copied(of_b), encoded(tokenizer, domain), steps[2], seed)
        scores: dict[str, Any] = {
            "B": bits_per_byte(b, tokenizer, held_out),
            "B fine-tuned": bits_per_byte(saved(best, root / name / "best", tokenizer), tokenizer, held_out),
        }
        ways: dict[str, dict[str, Any]] = {"unchanged": {"method": "naive"}, "default": {}}
        for way, how in ways.items():
            moved = transport(tuned, base=a, onto=b, output=root / name / way, **how)
            scores[way] = bits_per_byte(root / name / way, tokenizer, held_out)
            scores["tokens"] = moved.metadata()["vocabulary"]["share"]
        blind = shutil.copytree(a, root / name / "a without tokenizer")
        (blind / "tokenizer.json").unlink()
        transport(tuned, base=blind, onto=b, method="naive", output=root / name / "by row")
        scores["by row"] = bits_per_byte(root / name / "by row", tokenizer, held_out)
        saved(without_new_rows(best, of_b, old, tokenizer), root / name / "known", tokenizer)
        scores["known tokens only"] = bits_per_byte(root / name / "known", tokenizer, held_out)
        gap = scores["B"] - scores["B fine-tuned"]
        arrives = ("by row", *ways, "known tokens only")
        scores["arrives"] = {way: (scores["B"] - scores[way]) / gap for way in arrives}
        if name == "other tokens":
            shared = set(old["model"]["vocab"])
            names = {row: token for token, row in new["model"]["vocab"].items()}
            ids = encoded(new, held_out).tolist()
            lacking = [names[id] for id in ids if names[id] not in shared]
            scores["share of new tokens in the text"] = len(lacking) / len(ids)
            scores["share of bytes in them"] = sum(map(len, lacking)) / sum(len(t.encode()) for t in held_out)
        result[name] = scores
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, nargs=3, default=(800, 300, 300), help="of A, of B, of fine-tunes"
    )
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    found = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder), seed, tuple(given.steps)))
        print(json.dumps(found[-1], indent=2), flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
