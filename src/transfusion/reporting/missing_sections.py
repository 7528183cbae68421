"""What is not on the page, and which command would put it there."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from transfusion.reporting.headline import names
from transfusion.reporting.page_parts import Command
from transfusion.reporting.report_inputs import ReportInputs


def missing(material: ReportInputs, shown: Collection[str]) -> list[Command]:
    """A command for every section that has no data, with the names of this run in it."""
    tuned, a, b, method = names(material)
    run = shlex.quote(str(material.run))
    there = material.run if material.run.is_dir() else material.run.parent
    via = ((material.metadata or {}).get("settings") or {}).get("via") or "PI"
    by = f"--via {shlex.quote(str(via))}"
    pair = f"--base {_word(a, 'A')} --onto {_word(b, 'B')} {by}"
    one = _word(tuned[0] if tuned else "", "FINETUNED")
    ways = {
        "evaluation": (
            "scores on a task, and on what B could do before",
            f"transfusion evaluate {_word(b, 'B')} {run} --against {_word(b, 'B')} --data TASK --support DATA"
            f" -o {_file(there, 'evaluate.json')}",
        ),
        "alpha": (
            "how task and support depend on α",
            f"transfusion sweep {one} {pair} --data TASK --support DATA -o {_file(there, 'sweep.json')}",
        ),
        "fewshot": (
            "α for every part of the model, from a few examples",
            f"transfusion fewshot {one} {pair} --data TRAIN --test TEST -o alpha.json"
            f" --results {_file(there, 'fewshot.json')}",
        ),
        "barrier": (
            "the loss between π(A) and B",
            f"transfusion barrier {_word(a, 'A')} {_word(b, 'B')} {by} --data FILE"
            f" -o {_file(there, 'barrier.json')}",
        ),
        "proof": (
            "whether π(A) computes what A computes, or how much of B it predicts",
            f"transfusion verify {_word(a, 'A')} {by} -o {_file(there, 'verify.json')}",
        ),
    }
    found = [Command(text, what) for id, (what, text) in ways.items() if id not in shown]
    if material.alignment is None and a and b:
        how = f" --method {shlex.quote(method)}" if method and " " not in method else ""
        align = f"transfusion align {_word(a, 'A')} {_word(b, 'B')}{how} -o pi.safetensors"
        found.append(Command(f"{align} && transfusion report {run} --via pi.safetensors", "layers and heads"))
    if material.ceiling is None and "tau" in shown:
        what = "the share of the gap, and π(τ) beside the change that B's own fine-tune made"
        found.append(Command(f"transfusion report {run} --ceiling B_FINETUNED", what))
    return found


def _word(name: str, else_: str) -> str:
    return shlex.quote(name) if name else else_


def _file(folder: object, name: str) -> str:
    return shlex.quote(f"{folder}/{name}")
