"""``make zoo``: fetch the packages, open every model, run every trial, print and keep the tables.

``make zoo ZOO="sentiment stories"`` runs some trials or models alone; the other rows stay as they are.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock

from zoo.door import passed
from zoo.models import MODELS
from zoo.packages import ZOO
from zoo.trials import Skipped, Trial

MEASURED = Path(__file__).parent / "measured.json"
ROOMS = ("encoders", "decoders", "chat", "speech", "own", "verdicts")
"""The modules with trials."""


def trials() -> dict[str, Trial]:
    """Return all trials, by name."""
    rooms = (import_module(f"zoo.{room}") for room in ROOMS)
    return {one.name: one for room in rooms for one in room.TRIALS}


def main(asked: list[str]) -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    every = trials()
    if odd := [name for name in asked if name not in {**MODELS, **every}]:
        print(f"there is no {odd[0]}; models: {', '.join(MODELS)}; trials: {', '.join(every)}")
        return 2
    disappointing = 0
    for name, model in MODELS.items():
        if not asked or name in asked:
            found = passed(model)
            _keep("door", name, {**asdict(found), **_about(model)})
            print(f"{name}: {'closed: ' + found.refused if found.refused else 'open'}, {found}", flush=True)
    for name, trial in every.items():
        if not asked or name in asked:
            print(f"{name}: {trial.finetune}, {trial.a} → {trial.b}", flush=True)
            try:
                ways = trial.run()
            except Skipped as lack:
                print(f"  skipped: {lack}", flush=True)
                continue
            short = [way for way, least in trial.expects.items() if (ways[way].share or 0.0) < least]
            disappointing += len(short)
            row = {key: getattr(trial, key) for key in ("a", "b", "finetune", "relation", "measured")}
            row |= {"expects": dict(trial.expects), "ways": {way: asdict(one) for way, one in ways.items()}}
            _keep("trials", name, row)
            if short:
                print(f"  below what was expected: {', '.join(short)}", flush=True)
    return 1 if disappointing else 0


def _about(model: Any) -> dict[str, str]:
    package = model.package
    return {
        "kind": model.kind,
        "package": package.name,
        "made_by": package.made_by,
        "licence": package.licence,
    }


def _keep(part: str, name: str, row: dict[str, Any]) -> None:
    """Put a row into the file, in the order of the lists; another process may do the same."""
    order = {"door": list(MODELS), "trials": list(trials())}
    with FileLock(ZOO / "measured.lock"):
        known: dict[str, Any] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
        rows = {**known.get(part, {}), name: row}
        known[part] = {one: rows[one] for one in order[part] if one in rows}
        MEASURED.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
