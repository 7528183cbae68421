"""Falcon as in transformers: one key head, grouped queries, or ALiBi with a key per head."""

from __future__ import annotations

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import Axis, Config, Stack, Table, fixed, rotary
from transfusion.errors import ArchitectureError
from transfusion.families._decoders import ALIBI, GROUPED, KNOWN, decoder, family
from transfusion.families._shared import PLAIN

ROWS = """
word_embeddings.weight                    vocab -> x@first
{norms}
h.{{}}.self_attention.query_key_value.*   {qkv} <- x
h.{{}}.self_attention.dense.*             {after} <- {heads}
h.{{}}.mlp.dense_h_to_4h.*                ffn <- {mlp}
h.{{}}.mlp.dense_4h_to_h.*                x@next <- ffn
ln_f.*                                    scale x@last
"""

ONE_KEY = (Axis("head"), rotary("qk", None), Axis("vo"), Axis("ffn"))
WITH_ALIBI = (
    fixed("head", ALIBI, scope="layer"),
    Axis("qk", within="head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    width = config["hidden_size"]
    heads = config.get("num_attention_heads") or config["n_head"]
    depth = config.get("num_hidden_layers") or config["n_layer"]
    unit = shared(width, heads, "the width among the heads")
    sizes = {"x": width, "head": heads, "qk": unit, "vo": unit}
    two_norms = "h.0.ln_attn.weight" in names
    entry = "ln_attn" if two_norms else "input_layernorm"
    axes: tuple[Axis, ...]
    if config.get("new_decoder_architecture"):
        groups = config.get("num_kv_heads") or config.get("n_head_kv") or heads
        axes, qkv, out = GROUPED, "(group [(rep qk)|qk|vo])", "(group rep vo)"
        sizes |= {"group": groups, "rep": shared(heads, groups, "query heads among the key heads")}
    elif config.get("multi_query", True):
        axes, qkv, out = ONE_KEY, "[(head qk)|qk|vo]", "(head vo)"
    else:
        axes, qkv, out = WITH_ALIBI, "(head [qk|qk|vo])", "(head vo)"
    if bool(config.get("alibi", False)) != (axes is WITH_ALIBI):
        raise ArchitectureError(
            "falcon: ALiBi is understood where every head has its own key, rotary positions elsewhere",
            hint="this combination of alibi, multi_query and new_decoder_architecture has no table",
        )
    if config.get("parallel_attn", True):
        norms = (
            ["h.{}.ln_attn.* scale x", "h.{}.ln_mlp.* scale x"]
            if two_norms
            else ["h.{}.input_layernorm.* scale x"]
        )
        rows = ROWS.format(norms="\n".join(norms), qkv=qkv, after="x@next", heads=out, mlp="x")
        shortcuts = f"h.{{}}.{entry}   x -> x@next   h.{{}}.self_attention.dense"
        stack = Stack("layer", depth, rows, axes, sizes, shortcuts, points=("x",))
    else:
        norms = ["h.{}.input_layernorm.* scale x", "h.{}.post_attention_layernorm.* scale y"]
        rows = ROWS.format(norms="\n".join(norms), qkv=qkv, after="y", heads=out, mlp="y")
        shortcuts = """
        h.{}.input_layernorm            x -> y        h.{}.self_attention.dense
        h.{}.post_attention_layernorm   y -> x@next   h.{}.mlp.dense_4h_to_h
        """
        stack = Stack("layer", depth, rows, axes, sizes, shortcuts)
    tied = bool(config.get("tie_word_embeddings", True))
    return decoder(stack, tied=tied, embedding="word_embeddings.weight", buffers="")


FAMILIES = (
    family(
        "falcon",
        ("falcon", "RefinedWeb", "RefinedWebModel"),
        table,
        "word_embeddings.weight h.0.self_attention.query_key_value.weight ln_f.weight",
        prefixes=("transformer.",),
        known_keys=KNOWN
        | {"activation", "bias", "ffn_hidden_size", "multi_query", "new_decoder_architecture"}
        | {"num_kv_heads", "n_head_kv", "num_ln_in_parallel_attn", "parallel_attn", "n_head", "n_layer"}
        | {"alibi"},
        required={**PLAIN, "apply_residual_connection_post_layernorm": (False, None)},
    ),
)
