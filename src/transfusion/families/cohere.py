"""Cohere's Command models as in transformers: parallel branches after one norm, neighbouring units rotated.

In Command R7B (Cohere 2) the blocks with full attention have no rotary positions. The norms have no bias.
"""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    EMBEDDING,
    GATED_MLP,
    GROUPED_ATTENTION,
    GROUPED_INTERLEAVED,
    GROUPED_NORMED,
    KNOWN,
    SOME_ROTARY,
    family,
    grouped_decoder,
    grouped_partly,
    lines,
    rotary_kinds,
    rotary_sizes,
    sliding_blocks,
)
from transfusion.families._shared import PLAIN


def parallel(attention: str) -> str:
    """Rows of a block with one point: both branches read x and write x@next."""
    rows = lines(attention.replace("y <-", "x@next <-"), GATED_MLP.replace("<- y", "<- x"))
    norm = "layers.{}.input_layernorm.weight   scale x"
    return lines(EMBEDDING, norm, rows, "norm.weight   scale x@last")


ROWS = parallel(GROUPED_ATTENTION)
WITH_NORM = lines(
    ROWS,
    """
    layers.{}.self_attn.q_norm.weight   (group rep) qk
    layers.{}.self_attn.k_norm.weight   group qk
    """,
)
ROWS_2 = parallel(SOME_ROTARY)

SHORTCUTS = "layers.{}.input_layernorm   x -> x@next   layers.{}.self_attn.o_proj"


def table(config: Config, names: frozenset[str]) -> Table:
    normed = config.get("use_qk_norm")
    return grouped_decoder(
        config,
        WITH_NORM if normed else ROWS,
        SHORTCUTS,
        tied=True,
        axes=GROUPED_NORMED if normed else GROUPED_INTERLEAVED,
        points=("x",),
    )


def second(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(
        config,
        ROWS_2,
        SHORTCUTS,
        tied=True,
        axes=grouped_partly(interleaved=True),
        points=("x",),
        kinds=rotary_kinds(config, sliding_blocks(config)),
        sizes=rotary_sizes(config),
    )


KEYS = KNOWN | {"logit_scale", "model_max_length", "pretraining_tp", "cache_implementation", "layer_switch"}
"""Every model of these classes has what the next keys say."""
REQUIRED = {
    **PLAIN,
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0, 1),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "use_parallel_embedding": (True, False),
}

FAMILIES = (
    family("cohere", ("cohere",), table, "", known_keys=KEYS | {"use_qk_norm"}, required=REQUIRED),
    family(
        "cohere2",
        ("cohere2",),
        second,
        "",
        known_keys=KEYS,
        required={**REQUIRED, "use_qk_norm": (False, None)},
    ),
)
