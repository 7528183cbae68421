"""Write the tables of all families, measured: python scripts/family_table.py > docs/families.md

For every family: the axes that move, the axes that stay and why, the classes it was certified on, and the
largest change of any output when every free axis of such a model was moved at random, in float64.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from small_models import CASES, Case
from transfusion.architecture.table import Family, Symmetry
from transfusion.families import all_families
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import certify

HEAD = """# Families

Every family is described by one table, and every table is certified on the classes of its library
([below](#certified-on)): all free axes are moved at random in float64, with the residual stream tied and
untied, and no output may change. *Change* is the largest change that was measured. Every axis that stays was
also moved, alone, and did change the outputs; [the reasons](#why-an-axis-stays) are below.

`head/qk` is the axis `qk` within each `head`. *In pairs*: pairs of units are rotated by any angle and not
permuted (rotary positions). Written by `make families`."""

ASKED = {
    "gated delta nets, whose projections one tool keeps together and another apart (`in_proj_q/k/v/z/b/a`)": (
        "thinking-machines-lab/tinker-cookbook#525",
        "sgl-project/sglang#30499",
        "sgl-project/sglang#30168",
        "vllm-project/vllm#39369",
        "vllm-project/vllm#49354",
    ),
    "Gemma 4's linear maps with limits": (
        "unslothai/unsloth#4807",
        "huggingface/transformers#45388",
        "p-e-w/heretic#278",
    ),
    "LoRAs of Flux.1 on Chroma": ("croquelois/forgeChroma#4",),
    "LoRAs of LTX-2.3 on LTX-2.5": ("deepbeepmeep/Wan2GP#2155", "deepbeepmeep/Wan2GP#2139"),
    "adapters trained on a quantised base": (
        "unslothai/unsloth-zoo#810",
        "huggingface/peft#2105",
        "hiyouga/LlamaFactory#1545",
        "hiyouga/LlamaFactory#4664",
    ),
    "Nemotron-H, its state-space layers": ("huggingface/peft#3554",),
    "DeepSeek V4": ("vllm-project/vllm#57166", "vllm-project/vllm#55683", "modelscope/ms-swift#9563"),
    "Jamba": ("axolotl-ai-cloud/axolotl#1449", "vllm-project/vllm#11209"),
    "Mamba, Falcon Mamba": ("state-spaces/mamba#15", "unslothai/unsloth#242", "huggingface/peft#2556"),
    "ESM-C": ("Biohub/esm#195", "Biohub/esm#203"),
    "Moonshine": ("moonshine-ai/moonshine#86",),
    "SAM 3": ("facebookresearch/sam3#330", "Sompote/SAM3_LoRA#1"),
    "Parakeet": ("NVIDIA-NeMo/Speech#13825", "huggingface/audio-transformers-course#230"),
}
"""Threads in which people ask for adapters or fine-tunes of new families, or stumble over them."""
NOT_FOUND = ("vllm-project/vllm#39369",)
"""Threads that were named to us, and that the search for them did not show."""


@dataclass
class Row:
    """What was measured of one family."""

    family: str
    library: str
    moves: list[str]
    stays: dict[str, list[str]]
    """Axes that stay, each with its reasons."""
    change: float
    classes: list[str]


def measure(family: Family, cases: list[Case]) -> Row:
    """Certify all cases of a family."""
    moves: dict[str, Symmetry] = {}
    stays: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, None] = {}
    change = 0.0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = Model.open(case.save(Path(folder) / "model", 1))
            live = LiveModel.of(model)
            certificate = certify(live)
        assert certificate.passed, (case.name, certificate.failures)
        change = max(change, certificate.difference)
        classes[type(live.module).__name__] = None
        for space in model.architecture.spaces.values():
            if space.group is not Symmetry.FIXED:
                parent = model.architecture.spaces[space.parent].axis if space.parent else ""
                name = "stream" if space.stream else space.axis
                moves[f"`{parent}/{name}`" if parent else f"`{name}`"] = space.group
            elif space.why not in stays[space.axis]:
                stays[space.axis].append(space.why)
    moving = [f"{name} in pairs" if group.rotates_pairs else name for name, group in moves.items()]
    return Row(family.name, family.library, moving, dict(stays), change, list(classes))


def page(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of docs/families.md."""
    yield HEAD
    yield "\n| family | moves | stays | change |\n|---|---|---|---|"
    for row in rows:
        stays = ", ".join(f"`{axis}`" for axis in row.stays)
        yield f"| `{row.family}` ({row.library}) | {', '.join(row.moves)} | {stays} | {row.change:.0e} |"
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        for axis, reasons in row.stays.items():
            for why in reasons:
                families[axis, why].append(row.family)
    yield "\n## Why an axis stays\n\n| axis | reason | families |\n|---|---|---|"
    for (axis, why), names in sorted(families.items()):
        shown = ", ".join(f"`{name}`" for name in names) if len(names) <= 4 else f"{len(names)} families"
        yield f"| `{axis}` | {why} | {shown} |"
    yield "\n## Certified on\n\n| family | classes |\n|---|---|"
    for row in rows:
        yield f"| `{row.family}` | {', '.join(row.classes)} |"
    yield "\n## Who asked\n"
    yield "Threads about adapters and fine-tunes of these families in other tools. For families that are not"
    yield "listed, none was found or looked for.\n\n| what | where it was asked |\n|---|---|"
    for what, threads in ASKED.items():
        yield f"| {what} | {', '.join(map(linked, threads))} |"


def linked(thread: str) -> str:
    """Return a thread as a link."""
    repository, _, number = thread.partition("#")
    unseen = " (not found when it was searched)" if thread in NOT_FOUND else ""
    return f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number}){unseen}"


def main() -> None:
    families = sorted(all_families(), key=lambda family: family.name)
    rows = [
        measure(family, [case for case in CASES.values() if case.family == family.name])
        for family in families
    ]
    print("\n".join(page(rows)))


if __name__ == "__main__":
    main()
