"""GPT-2 as in transformers: pre-norm, fused projections stored (in, out), tied embeddings."""

from __future__ import annotations

from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.families._shared import ATTENTION, HARMLESS, LABEL, PLAIN, POSITION, VOCAB

ROWS = """
wte.weight           vocab -> x@first
wpe.weight           position -> x@first
h.{}.ln_1.*          scale x
h.{}.attn.c_attn.*   x -> [(head qk)|(head qk)|(head vo)]
h.{}.attn.c_proj.*   (head vo) -> y
h.{}.ln_2.*          scale y
h.{}.mlp.c_fc.*      y -> ffn
h.{}.mlp.c_proj.*    ffn -> x@next
ln_f.*               scale x@last
"""

SHORTCUTS = """
h.{}.ln_1   x -> y        h.{}.attn.c_proj
h.{}.ln_2   y -> x@next   h.{}.mlp.c_proj
"""

HEADS = """
lm_head.weight                   vocab <- x@last
score.*                          label <- x@last
classifier.*                     label <- x@last
qa_outputs.*                     label <- x@last
multiple_choice_head.summary.*   label <- x@last
"""


def table(config: Config, names: frozenset[str]) -> Table:
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(
            Stack(
                "layer",
                config["n_layer"],
                ROWS,
                (*ATTENTION, POSITION),
                sizes={"x": config["n_embd"], "head": config["n_head"]},
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(VOCAB, LABEL),
        heads=HEADS,
        buffers="h.{}.attn.bias h.{}.attn.masked_bias",
        unified=(("x@first", "x@last"),) if tied else (),
        ties={"lm_head.weight": "wte.weight"} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


FAMILIES = (
    Family(
        name="gpt2",
        library="transformers",
        table=table,
        signature=("wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight"),
        model_types=("gpt2",),
        inputs=("tokens",),
        prefixes=("transformer.",),
        known_keys=HARMLESS
        | {"n_layer", "n_embd", "n_head", "n_inner", "n_positions", "n_ctx", "activation_function"}
        | {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"}
        | {"summary_activation", "summary_first_dropout", "summary_proj_to_labels"}
        | {"summary_type", "summary_use_proj"},
        required=PLAIN,
    ),
)
