"""GPT-NeoX (Pythia) as in transformers: q, k and v interleaved by head, partial rotary positions."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Config, Stack, Table
from transfusion.families._decoders import KNOWN, PARTLY_ROTARY, decoder, family, rotated

# {after} is the point that the attention's output is added at, {mlp} the one that the MLP reads:
# with parallel branches both branches start at x and end at x@next.
ROWS = """
embed_in.weight                            vocab -> x@first
layers.{{}}.input_layernorm.*              scale x
layers.{{}}.attention.query_key_value.*    (head [{qk}|{qk}|vo]) <- x
layers.{{}}.attention.dense.*              {after} <- (head vo)
layers.{{}}.post_attention_layernorm.*     scale {mlp}
layers.{{}}.mlp.dense_h_to_4h.*            ffn <- {mlp}
layers.{{}}.mlp.dense_4h_to_h.*            x@next <- ffn
final_layer_norm.*                         scale x@last
"""

PARALLEL = "layers.{}.input_layernorm   x -> x@next   layers.{}.attention.dense"

IN_TURN = """
layers.{}.input_layernorm            x -> y        layers.{}.attention.dense
layers.{}.post_attention_layernorm   y -> x@next   layers.{}.mlp.dense_4h_to_h
"""

HEADS = """
embed_out.weight   vocab <- x@last
score.*            label <- x@last
classifier.*       label <- x@last
qa_outputs.*       label <- x@last
"""


def table(config: Config, names: frozenset[str]) -> Table:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    parallel = config.get("use_parallel_residual", True)
    unit = shared(width, heads, "the width among the heads")
    rotary_units = rotated(config, unit, 0.25)
    rows = ROWS.format(
        qk="rot|qk" if rotary_units < unit else "rot",
        after="x@next" if parallel else "y",
        mlp="x" if parallel else "y",
    )
    sizes = {"x": width, "head": heads, "rot": rotary_units, "vo": unit}
    stack = Stack(
        "layer",
        config["num_hidden_layers"],
        rows,
        PARTLY_ROTARY,
        sizes,
        PARALLEL if parallel else IN_TURN,
        points=("x",) if parallel else ("x", "y"),
    )
    return decoder(
        stack,
        tied=bool(config.get("tie_word_embeddings", False)),
        embedding="embed_in.weight",
        output="embed_out.weight",
        heads=HEADS,
        buffers="layers.{}.attention.bias layers.{}.attention.masked_bias"
        " layers.{}.attention.rotary_emb.inv_freq",
    )


FAMILIES = (
    family(
        "gpt_neox",
        ("gpt_neox",),
        table,
        "embed_in.weight layers.0.attention.query_key_value.weight final_layer_norm.weight",
        prefixes=("gpt_neox.",),
        aliases=(("lm_head", "embed_out"),),
        known_keys=KNOWN | {"rotary_pct", "rotary_emb_base", "use_parallel_residual", "is_decoder"},
    ),
)
