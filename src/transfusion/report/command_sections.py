"""Commands on the page: those that made the run, and those that would fill the missing sections."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from transfusion.report.headline import names
from transfusion.report.page_parts import Command, PageSection
from transfusion.report.report_inputs import METADATA, ReportInputs


def typed_commands(inputs: ReportInputs) -> PageSection | None:
    """Return the section of all recorded commands, and the command that repeats the run."""
    metadata = inputs.metadata or {}
    recorded = [(metadata["verb"], metadata)] if metadata else []
    recorded += [(one.verb, one.info) for one in inputs.results]
    typed = [Command(str(info["command"]), verb) for verb, info in recorded if info.get("command")]
    again = []
    if metadata and metadata.get("repeatable", True) and inputs.run.is_dir():
        command = f"transfusion {metadata['verb']} --from {METADATA} -o ../again"
        again = [Command(command, "the same again, bit for bit, from the folder of this run")]
    if not typed and not again:
        return None
    lead = "As they were typed; absolute paths are shortened." if typed else ""
    return PageSection("commands", "Commands", lead, [*typed, *again])


def missing_commands(inputs: ReportInputs, shown: Collection[str]) -> list[Command]:
    """Return a command for every section that has no data, with the names of this run."""
    finetuned, a, b, method = names(inputs)
    run = shlex.quote(str(inputs.run))
    via = ((inputs.metadata or {}).get("settings") or {}).get("via") or "PI"
    by = f"--via {shlex.quote(str(via))}"
    model_a, model_b = _argument(a, "A"), _argument(b, "B")
    pair = f"--base {model_a} --onto {model_b} {by}"
    tuned = _argument(finetuned[0] if finetuned else "", "FINETUNED")

    def output(name: str) -> str:
        return shlex.quote(f"{inputs.folder}/{name}")

    commands = {
        "evaluation": (
            "scores on a task and on a support, which is what B could do before",
            f"transfusion evaluate {model_b} {run} --against {model_b} --data TASK --support DATA"
            f" -o {output('evaluate.json')}",
        ),
        "alpha": (
            "how task and support depend on α",
            f"transfusion sweep {tuned} {pair} --data TASK --support DATA -o {output('sweep.json')}",
        ),
        "fewshot": (
            "α for every part of the model, from a few examples",
            f"transfusion fewshot {tuned} {pair} --data TRAIN --test TEST -o alpha.json"
            f" --results {output('fewshot.json')}",
        ),
        "barrier": (
            "the loss between π(A) and B",
            f"transfusion barrier {model_a} {model_b} {by} --data FILE -o {output('barrier.json')}",
        ),
        "proof": (
            "whether π(A) computes the same as A, or how much of B it predicts",
            f"transfusion verify {model_a} {by} -o {output('verify.json')}",
        ),
    }
    found = [Command(text, what) for id, (what, text) in commands.items() if id not in shown]
    if inputs.alignment is None and a and b:
        how = f" --method {shlex.quote(method)}" if method and " " not in method else ""
        align = f"transfusion align {model_a} {model_b}{how} -o pi.safetensors"
        found.append(Command(f"{align} && transfusion report {run} --via pi.safetensors", "layers and heads"))
    if inputs.ceiling is None and "tau" in shown:
        what = "the share of the gap, and π(τ) compared with the change that B's own fine-tune made"
        found.append(Command(f"transfusion report {run} --ceiling B_FINETUNED", what))
    return found


def _argument(name: str, placeholder: str) -> str:
    return shlex.quote(name) if name else placeholder
