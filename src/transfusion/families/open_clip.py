"""CLIP as in open_clip: fused projections, the text tower at the top level, projections (in, out)."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.families._shared import (
    ATTENTION,
    PATCH,
    POSITION,
    VOCAB,
    below,
    both_ends_below,
)
from transfusion.families.clip import JOINT

BLOCKS = """
transformer.resblocks.{}.ln_1.*                scale x
transformer.resblocks.{}.attn.in_proj_weight   [(head qk)|(head qk)|(head vo)] <- x
transformer.resblocks.{}.attn.in_proj_bias     [(head qk)|(head qk)|(head vo)]
transformer.resblocks.{}.attn.out_proj.*       y <- (head vo)
transformer.resblocks.{}.ls_1.gamma?           scale y
transformer.resblocks.{}.ln_2.*                scale y
transformer.resblocks.{}.mlp.c_fc.*            ffn <- y
transformer.resblocks.{}.mlp.c_proj.*          x@next <- ffn
transformer.resblocks.{}.ls_2.gamma?           scale x@next
"""

VISION = f"""
class_embedding        x@first
conv1.weight           x@first <- channel row column
positional_embedding   position x@first
ln_pre.*?              scale x@first
{BLOCKS.strip()}
ln_post.*              scale x@last
proj?                  x@last -> joint
"""

TEXT = f"""
token_embedding.weight   vocab -> x@first
positional_embedding     position x@first
cls_emb?                 x@first
{BLOCKS.strip()}
ln_final.*               scale x@last
text_projection?         x@last -> joint
text_projection.*?       joint <- x@last
"""

# With LayerScale the branch ends behind the scale; without it ls_1 and ls_2 are identities that
# are modules all the same.
SHORTCUTS = """
transformer.resblocks.{}.ln_1   x -> y        transformer.resblocks.{}.ls_1
transformer.resblocks.{}.ln_2   y -> x@next   transformer.resblocks.{}.ls_2
"""


def table(config: Config, names: frozenset[str]) -> Table:
    vision, text = config["model_cfg"]["vision_cfg"], config["model_cfg"]["text_cfg"]
    width = vision.get("width", 768)
    heads = shared(width, vision.get("head_width", 64), "the width of the vision tower into heads")
    return Table(
        stacks=(
            Stack(
                "vision",
                vision.get("layers", 12),
                below("visual.", VISION),
                (*ATTENTION, POSITION, *PATCH),
                sizes={"x": width, "head": heads},
                shortcuts=both_ends_below("visual.", SHORTCUTS),
            ),
            Stack(
                "text",
                text.get("layers", 12),
                TEXT,
                (*ATTENTION, POSITION),
                sizes={"x": text.get("width", 512), "head": text.get("heads", 8)},
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(VOCAB, JOINT),
        rows="logit_scale\nlogit_bias?",
    )


FAMILIES = (
    Family(
        name="open_clip",
        library="open_clip",
        table=table,
        signature=(
            "visual.conv1.weight",
            "visual.transformer.resblocks.0.attn.in_proj_weight",
            "transformer.resblocks.0.attn.in_proj_weight",
            "token_embedding.weight",
        ),
        model_types=("open_clip",),
        inputs=("image", "tokens"),
        prefixes=("text.",),
        known_keys=frozenset(
            [
                "model_cfg",
                "preprocess_cfg",
                "vision_cfg",
                "text_cfg",
                "embed_dim",
                "layers",
                "width",
                "head_width",
                "heads",
                "patch_size",
                "image_size",
                "mlp_ratio",
                "context_length",
                "vocab_size",
                "quick_gelu",
                "ls_init_value",
                "patch_dropout",
                "init_logit_scale",
                "init_logit_bias",
                "custom_text",
                "mean",
                "std",
                "interpolation",
                "resize_mode",
                "size",
                "mode",
                "fill_color",
                "pool_type",
                "final_ln_after_pool",
                "no_ln_pre",
                "pos_embed_type",
                "no_causal_mask",
                "embed_cls",
                "proj_bias",
                "output_tokens",
                "pad_id",
                "eos_id",
                "proj_type",
                "act_kwargs",
                "norm_kwargs",
                "hf_tokenizer_name",
                "tokenizer_mode",
                "tokenizer_kwargs",
            ]
        ),
    ),
)
