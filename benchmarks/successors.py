"""Whether the drift of B that `transport` tells predicts what arrives: python benchmarks/successors.py

A small vision transformer A learns digits, and a LoRA of rank 8 learns digits in noise on it. Successors of A
are trained on from A, with larger and larger learning rates. The LoRA is put onto each of them as it is, with
α = 1 and with the α that keeps its relative strength; the ceiling is a LoRA trained on the successor itself.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from transfusion.matching.align import align
from transfusion.runtime.optional_libraries import require_library
from transfusion.transport.adapters.drift import strength_alpha
from transfusion.transport.transport import transport
from transfusion_demo.digits import Digits, DigitsDemo, DigitsPlan
from transfusion_demo.steps import ONE_THREAD, TrainingSchedule

RATES = (1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""The learning rates of the successors."""
TARGETS = ["q_proj", "v_proj", "o_proj", "fc1", "fc2"]


def with_lora(demo: DigitsDemo, base: Any, number: int) -> Any:
    """Train a LoRA on digits in noise."""
    peft = require_library("peft")
    torch.manual_seed(number)
    model = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)
    )
    return demo.train(model, demo.plan.tuning, number, noise=demo.plan.noise)


def loaded(base: Any, folder: Path) -> Any:
    return require_library("peft").PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def measure(seed: int, place: Path) -> list[dict[str, float]]:
    """Move one LoRA onto every successor."""
    plan = DigitsPlan()
    demo = DigitsDemo(plan, Digits.load(plan.tests, seed), place, seed)
    a = demo.train_base(1)
    base = demo.save(a, "a")
    with_lora(demo, a, 3).save_pretrained(place / "lora")
    found = []

    def score(model: Any) -> float:
        return float(demo.measure(model, plan.draws).task["accuracy"])

    for number, rate in enumerate(RATES):
        b = demo.train(copy.deepcopy(a), TrainingSchedule(300, rate), 5)
        onto = demo.save(b, f"b{number}")
        pi = align(base, onto, method="naive")
        plain = transport(place / "lora", base=base, onto=onto, via=pi, output=place / f"plain{number}")
        drift = plain.metadata()["drift"]
        alpha = strength_alpha(drift)
        transport(place / "lora", base=base, onto=onto, via=pi, alpha=alpha, output=place / f"kept{number}")
        before, ceiling = score(b), score(with_lora(demo, b, 6))
        shares = {
            name: (score(loaded(b, place / f"{name}{number}")) - before) / (ceiling - before)
            for name in ("plain", "kept")
        }
        found.append({"rate": rate, **drift, **shares, "before": before, "ceiling": ceiling})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    table = Table(title="a LoRA on successors of its base, means over seeds")
    for column in (
        "learning rate",
        "B moved",
        "overwritten",
        "contained",
        "α",
        "arrives, α = 1",
        "arrives, α by strength",
    ):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as place, ONE_THREAD.in_process():
        runs = [measure(seed, Path(place) / str(seed)) for seed in range(asked.seeds)]
    for rows in zip(*runs, strict=True):
        mean = {
            key: sum(row[key] for row in rows) / len(rows)
            for key in ("rate", "moved", "overwritten", "contained", "alpha", "plain", "kept")
        }
        percent = [f"{mean[key]:.0%}" for key in ("moved", "overwritten", "contained")]
        table.add_row(
            f"{mean['rate']:g}",
            *percent,
            f"{mean['alpha']:.2f}",
            f"{mean['plain']:.0%}",
            f"{mean['kept']:.0%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
