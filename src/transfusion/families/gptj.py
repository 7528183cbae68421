"""GPT-J as in transformers: interleaved partial rotary positions, parallel branches after one norm."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Config, Stack, Table, rotary
from transfusion.families._decoders import HEADS, KNOWN, PARTLY_ROTARY, decoder, family

ROWS = """
wte.weight                vocab -> x@first
h.{}.ln_1.*               scale x
h.{}.attn.q_proj.weight   (head [rot|qk]) <- x
h.{}.attn.k_proj.weight   (head [rot|qk]) <- x
h.{}.attn.v_proj.weight   (head vo) <- x
h.{}.attn.out_proj.weight x@next <- (head vo)
h.{}.mlp.fc_in.*          ffn <- x
h.{}.mlp.fc_out.*         x@next <- ffn
ln_f.*                    scale x@last
"""

AXES = tuple(
    rotary("rot", "head", interleaved=True) if axis.name == "rot" else axis for axis in PARTLY_ROTARY
)

SHORTCUTS = "h.{}.ln_1   x -> x@next   h.{}.attn.out_proj"


def table(config: Config, names: frozenset[str]) -> Table:
    width, heads = config["n_embd"], config["n_head"]
    unit = shared(width, heads, "the width among the heads")
    sizes = {"x": width, "head": heads, "rot": config.get("rotary_dim") or unit}
    stack = Stack("layer", config["n_layer"], ROWS, AXES, sizes, SHORTCUTS, points=("x",))
    return decoder(
        stack,
        tied=bool(config.get("tie_word_embeddings", False)),
        embedding="wte.weight",
        heads=HEADS,
        buffers="h.{}.attn.bias h.{}.attn.masked_bias",
    )


FAMILIES = (
    family(
        "gptj",
        ("gptj",),
        table,
        "wte.weight h.0.attn.q_proj.weight h.0.mlp.fc_in.weight ln_f.weight",
        prefixes=("transformer.",),
        known_keys=KNOWN
        | {"n_embd", "n_layer", "n_head", "n_inner", "n_positions", "n_ctx", "rotary_dim", "rotary"}
        | {"activation_function", "scale_attn_weights", "gradient_checkpointing"}
        | {"summary_activation", "summary_first_dropout", "summary_proj_to_labels"}
        | {"summary_type", "summary_use_proj"},
    ),
)
