"""Measure the demo with several seeds, for the tables in the pages: python scripts/measure_demo.py [--text]

The result goes to benchmarks/results/demo-digits.json or demo-text.json, from which scripts/pages.py makes
the tables. A seed takes about a minute of one core, with ``--text`` two and a half.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transfusion_demo import run

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def shortened(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the tables show of a result of the demo; folders by their names."""
    kept: dict[str, Any] = {key: found[key] for key in ("demo", "seed", "proof", "run") if key in found}
    for key in ("onto_b", "onto_successor"):
        if key in found:
            info = found[key]
            models = [
                {
                    "model": Path(one["model"]).name,
                    "name": one["name"],
                    **{part: {"value": round(one[part]["value"], 4)} for part in ("task", "support")},
                    "gain": one["gain"] and {part: round(gain, 2) for part, gain in one["gain"].items()},
                    "share": one["share"] and round(one["share"], 4),
                }
                for one in info["models"]
            ]
            data = {
                part: {what: info[part][what] for what in ("data", "question")}
                for part in ("task", "support")
            }
            kept[key] = {**data, "ceiling": Path(info["ceiling"]).name, "models": models}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--text", action="store_true")
    asked = parser.parse_args()
    kind, results = "text" if asked.text else "digits", []
    for seed in range(asked.seeds):
        print(f"{kind}, seed {seed} …", file=sys.stderr, flush=True)
        results.append(shortened(run(seed=seed, on_text=asked.text, report=None)))
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (RESULTS / f"demo-{kind}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
