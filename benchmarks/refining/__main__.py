"""What a refinement by answers takes, and how much arrives: python -m refining

    python -m refining memory --sizes 0.1B,0.3B,1.1B    peak memory of both phases, and the time of a step
    python -m refining quality --seeds 0,1,2            share and support, with the same and another tokenizer
    python -m refining                                  both

Memory: pairs of Llamas in bfloat16, drawn at random, with a LoRA of rank 16 on all linear layers; every phase
runs in a process of its own. A step is compared with one of PEFT's fine-tuning of the same LoRA, on as many
tokens. Results are kept in measured.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from functional.models import add_tokenizer
from growth import models
from growth.llamas import SIZES, pair
from own_process import run_alone
from refining import quality, tables

MEASURED = Path(__file__).parent / "measured.json"
RANK = 16


def memory(folder: Path, name: str) -> dict[str, Any]:
    """Return the peaks of both phases, and the seconds of a step beside PEFT's."""
    size = SIZES[name]
    models.RANK = RANK
    models.require_space(folder, size)
    a, b = pair(folder, size, related=False)
    for place in (a, b):
        add_tokenizer(place, size.vocabulary)
    lora = models._adapter(folder / f"{name}-lora", a, size)
    pi, answers = folder / f"{name}-pi.safetensors", folder / f"{name}-answers.safetensors"
    command = [
        sys.executable,
        "-m",
        "transfusion",
        "align",
        a,
        b,
        "-o",
        pi,
        "--method",
        "random",
        "-q",
        "--force",
    ]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    found: dict[str, Any] = {"weights": 2 * size.parameters}
    for phase, given in {
        "ask": (lora, a, answers),
        "learn": (lora, a, b, pi, answers),
        "peft": (lora, b),
    }.items():
        run = run_alone([sys.executable, "-m", "refining.phase", phase, *map(str, given)]).require()
        found[phase] = {**json.loads(run.output.splitlines()[-1]), "peak": run.peak}
    found["answers"] = answers.stat().st_size
    models.remove(folder, size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("memory", "quality"))
    parser.add_argument("--sizes", default="0.1B,0.3B,1.1B")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keep", type=Path, help="a folder for the models")
    asked = parser.parse_args()
    kept: dict[str, Any] = (
        json.loads(MEASURED.read_text()) if MEASURED.exists() else {"memory": {}, "quality": {}}
    )
    with tempfile.TemporaryDirectory() as place:
        folder = asked.keep or Path(place)
        for name in asked.sizes.split(",") if asked.part != "quality" else ():
            kept["memory"][name] = memory(folder, name)
            MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
        for seed in map(int, asked.seeds.split(",") if asked.part != "memory" else ()):
            kept["quality"][str(seed)] = quality.measure(folder / f"seed{seed}", seed, asked.steps)
            MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
    print(tables.memory(kept), tables.paper(kept), tables.quality(kept), sep="\n")


if __name__ == "__main__":
    main()
