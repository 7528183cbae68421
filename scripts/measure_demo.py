"""The tables of docs/demo.md: the demo with several seeds, a row per model, as Markdown.

    python scripts/demo_table.py --seeds 4 --text --results folder

A seed whose result is in the folder already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from transfusion_demo import run


def result(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    place = folder / f"{kind}{seed}.json"
    if not place.exists():
        print(f"{kind}, seed {seed} …", file=sys.stderr)
        found = run(seed=seed, on_text=kind == "text", report=None, say=lambda text: None)
        folder.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found, indent=2, ensure_ascii=False))
    loaded: dict[str, Any] = json.loads(place.read_text())
    return loaded


def table(records: dict[int, dict[str, Any]]) -> str:
    """Accuracy and gain, on the task and on the support, by seed; and the mean share of the gap."""
    lines = [
        "| | " + " | ".join(f"seed {seed}" for seed in records) + " | of the gap, mean |",
        "|---" * (len(records) + 2) + "|",
    ]
    for rows in zip(*(metadata["models"] for metadata in records.values()), strict=True):
        cells = [f"{one(row, 'task')}; {one(row, 'support')}" for row in rows]
        shares = [100 * row["share"] for row in rows if row["share"] is not None]
        info = f"{mean(shares):.0f} % ({', '.join(f'{share:.0f}' for share in shares)})" if shares else ""
        name = rows[0]["name"]
        lines.append(f"| {name} | {' | '.join([*cells, info]).replace('-', '−')} |")
    return "\n".join(lines)


def one(row: dict[str, Any], what: str) -> str:
    gain = f" ({row['gain'][what]:+.1f})" if row["gain"] else ""
    return f"{100 * row[what]['value']:.1f}{gain}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--results", type=Path, required=True)
    asked = parser.parse_args()
    kind = "text" if asked.text else "digits"
    found = {seed: result(kind, seed, asked.results) for seed in range(asked.seeds)}
    for key in ("onto_b", "onto_successor"):
        if key in found[0]:
            print(table({seed: one[key] for seed, one in found.items()}), end="\n\n")


if __name__ == "__main__":
    main()
