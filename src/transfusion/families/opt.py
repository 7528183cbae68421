"""OPT as in transformers: learned positions; the 350M model is post-norm, with narrower embeddings."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Stack, Table
from transfusion.families._decoders import KNOWN, decoder, family
from transfusion.families._shared import ATTENTION, PLAIN, POSITION

BLOCKS = """
layers.{}.self_attn.q_proj.*           (head qk) <- x
layers.{}.self_attn.k_proj.*           (head qk) <- x
layers.{}.self_attn.v_proj.*           (head vo) <- x
layers.{}.self_attn.out_proj.*         y <- (head vo)
layers.{}.fc1.*                        ffn <- y
layers.{}.fc2.*                        x@next <- ffn
"""

NORMS_BEFORE = """
layers.{}.self_attn_layer_norm.*   scale x
layers.{}.final_layer_norm.*       scale y
"""
NORMS_BEHIND = """
layers.{}.self_attn_layer_norm.*   scale y
layers.{}.final_layer_norm.*       scale x@next
"""

BEFORE = """
layers.{}.self_attn_layer_norm   x -> y        layers.{}.self_attn.out_proj
layers.{}.final_layer_norm       y -> x@next   layers.{}.fc2
"""
BEHIND = """
layers.{}.self_attn.q_proj   x -> y        layers.{}.self_attn.out_proj
layers.{}.fc1                y -> x@next   layers.{}.fc2
"""

HEADS = """
lm_head.weight   vocab <- {words}
score.*          label <- {words}
qa_outputs.*     label <- {words}
"""


def table(config: Config, names: frozenset[str]) -> Table:
    before = config.get("do_layer_norm_before", True)
    projected = "project_in.weight" in names
    tied = bool(config.get("tie_word_embeddings", True))
    ends = "embed_positions.weight   position -> x@first\nfinal_layer_norm.*?   scale x@last\n"
    if projected:
        ends += "embed_tokens.weight   vocab -> word\nproject_in.weight   x@first <- word\n"
        ends += f"project_out.weight   {'word' if tied else 'last_word'} <- x@last"
        words = "word" if tied else "last_word"
    else:
        ends += "embed_tokens.weight   vocab -> x@first"
        words = "x@last"
    stack = Stack(
        "layer",
        config["num_hidden_layers"],
        "\n".join([ends, BLOCKS.strip(), (NORMS_BEFORE if before else NORMS_BEHIND).strip()]),
        (*ATTENTION, POSITION, Axis("word", scope="stack"), Axis("last_word", scope="stack")),
        {
            "x": config["hidden_size"],
            "head": config["num_attention_heads"],
            "ffn": config["ffn_dim"],
        },
        BEFORE if before else BEHIND,
    )
    heads = HEADS.format(words=words)
    made = decoder(stack, tied=tied and not projected, heads=heads, buffers="")
    outputs = {"last_hidden_state": words}
    ties = {"lm_head.weight": "embed_tokens.weight"} if tied else {}
    return Table(made.stacks, made.axes, heads=heads, unified=made.unified, ties=ties, outputs=outputs)


FAMILIES = (
    family(
        "opt",
        ("opt",),
        table,
        "embed_tokens.weight embed_positions.weight layers.0.fc1.weight layers.0.self_attn_layer_norm.weight",
        prefixes=("model.decoder.", "decoder."),
        known_keys=KNOWN
        | {"activation_function", "do_layer_norm_before", "enable_bias", "ffn_dim", "init_std"}
        | {"layer_norm_elementwise_affine", "layerdrop", "word_embed_proj_dim", "_remove_final_layer_norm"}
        | {"activation_dropout"},
        required=PLAIN,
    ),
)
