"""How much of a language model's fine-tune arrives on a base that was trained apart, by answers alone.

A and B are small GPT-2s of film reviews, each of one half of them, begun from different seeds. The fine-tune
of A learns Python code. One B has A's tokenizer; the tokenizer of the other was learned from B's own texts
and has twice as many tokens. Scores are bits per byte of held-out texts, which do not depend on the
tokenizer: the share is of the gap between B and B that is fine-tuned itself, the support the change in bits
per byte of reviews, of which B could do before.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from transfusion import ask, transport
from vocabulary import CONTEXT, copied, encoded, loaded, saved, texts, token_bits, train

TOKENS = {"same": 1000, "other": 2000}
STEPS = {"base": 800, "tuned": 250}
SIZES = {
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tokenizer(sample: list[str], tokens: int) -> dict[str, Any]:
    """Return a byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special: dict[str, Any] = {
        "special_tokens": ["<|end|>"],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    made.train_from_iterator(sample, trainers.BpeTrainer(vocab_size=tokens, **special))
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def bits(model: GPT2LMHeadModel, own: dict[str, Any], text: str) -> float:
    """Return the bits that a model needs for each byte of a text."""
    return float(token_bits(model, encoded(own, [text])).sum()) / len(text.encode())


def measure(root: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train what is missing, move the fine-tune onto both bases, and return what arrived."""
    reviews, code = texts()
    half, learned = len(reviews) // 2, [one for n, one in enumerate(code) if n % 5]
    old = tokenizer(reviews[: half // 2] + learned[:40], TOKENS["same"])
    new = tokenizer(reviews[half : half + half // 3] + learned[40:60], TOKENS["other"])
    held_out = {"task": "\n".join(one[4000:8000] for one in code[::10]), "support": "\n".join(reviews[-200:])}
    halves = {"a": reviews[:half], "b": reviews[half:-200]}

    def kept(name: str, own: dict[str, Any], given: list[str], begun: Any, count: int) -> Path:
        folder = root / name
        if not folder.exists():
            torch.manual_seed(seed + len(name))
            saved(train(begun(), encoded(own, given), count, seed), folder, own)
        return folder

    def fresh(own: dict[str, Any], begin: int) -> GPT2LMHeadModel:
        torch.manual_seed(begin)
        return GPT2LMHeadModel(GPT2Config(**SIZES, vocab_size=len(own["model"]["vocab"])))

    a = kept("a", old, halves["a"], partial(fresh, old, seed), STEPS["base"])
    tuned = kept("tuned", old, learned, lambda: copied(loaded(a)), STEPS["tuned"])
    answers = root / "answers.safetensors"
    began = time.process_time()
    ask(tuned, base=a, output=answers, force=True)
    found: dict[str, Any] = {"asking": time.process_time() - began}
    for name, own in (("same", old), ("other", new)):
        b = kept(f"b-{name}", own, halves["b"], partial(fresh, own, seed + 100), STEPS["base"])
        began, took = time.process_time(), root / f"best-{name}.seconds"
        best = kept(f"best-{name}", own, learned, partial(copied, loaded(b)), STEPS["tuned"])
        if not took.exists():  # a model that was kept takes no time again
            took.write_text(str(time.process_time() - began))
        found[f"{name}, fine-tuning B"] = float(took.read_text())
        began, out = time.process_time(), root / f"out-{name}"
        how: dict[str, Any] = {
            "base": a,
            "onto": b,
            "method": "functional",
            "refine": True,
            "refine_steps": steps,
        }
        moved = transport(tuned, **how, answers=answers, output=out, force=True)
        ends = {
            which: {kind: bits(loaded(one), own, text) for kind, text in held_out.items()}
            for which, one in (("B", b), ("best", best), ("moved", out))
        }
        gap = ends["B"]["task"] - ends["best"]["task"]
        found[name] = {
            "bits": ends,
            "share": (ends["B"]["task"] - ends["moved"]["task"]) / gap,
            "support": ends["moved"]["support"] - ends["B"]["support"],
            "support of the ceiling": ends["best"]["support"] - ends["B"]["support"],
            "seconds": time.process_time() - began,
            "refinement": moved.metadata()["refinement"],
        }
    return found


if __name__ == "__main__":
    import sys

    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), indent=1))
