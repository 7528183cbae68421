"""DeiT as in transformers: a ViT with a distillation token."""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Config, Family, Table
from transfusion.families import vit

ROWS = f"""
embeddings.distillation_token   _ _ x@first
{vit.ROWS.strip()}
"""

HEADS = f"""
{vit.HEADS.strip()}
cls_classifier.*            label <- x@last
distillation_classifier.*   label <- x@last
"""


def table(config: Config, names: frozenset[str]) -> Table:
    plain = vit.table(config, names)
    return replace(plain, stacks=(replace(plain.stacks[0], rows=ROWS),), heads=HEADS)


(VIT,) = vit.FAMILIES

FAMILIES: tuple[Family, ...] = (
    replace(
        VIT,
        name="deit",
        table=table,
        signature=("embeddings.distillation_token", *VIT.signature),
        model_types=("deit",),
        prefixes=("deit.",),
    ),
)
