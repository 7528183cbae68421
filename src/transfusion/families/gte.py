"""GTE and Jina Embeddings 3 as in transformers: post-norm encoders with rotary positions, RoBERTa's heads.

Files of GTE's first releases call it ``new``, and want code of their own to run; it is the same model.
"""

from __future__ import annotations

from transfusion.architecture.table import Config, Family, Stack, Table
from transfusion.families import bert, roberta
from transfusion.families._shared import HARMLESS, PLAIN, usual_sizes
from transfusion.families.modernbert import AXES

GTE = """
embeddings.word_embeddings.weight          vocab -> x@first
embeddings.token_type_embeddings.weight?   type -> x@first
embeddings.LayerNorm.*                     scale x@first
encoder.layer.{}.attention.qkv_proj.*      [(head qk)|(head qk)|(head vo)] <- x
encoder.layer.{}.attention.o_proj.*        y <- (head vo)
encoder.layer.{}.attn_ln.*                 scale y
encoder.layer.{}.mlp.up_gate_proj.*        [ffn|ffn] <- y
encoder.layer.{}.mlp.down_proj.*           x@next <- ffn
encoder.layer.{}.mlp_ln.*                  scale x@next
"""
GTE_SHORTCUTS = """
encoder.layer.{}.attention   x -> y        encoder.layer.{}.attention.o_proj
encoder.layer.{}.mlp         y -> x@next   encoder.layer.{}.mlp.down_proj
"""

JINA = """
embeddings.word_embeddings.weight         vocab -> x@first
embeddings.token_type_embeddings.weight   type -> x@first
emb_ln.*                                  scale x@first
encoder.layers.{}.mixer.Wqkv.*            [(head qk)|(head qk)|(head vo)] <- x
encoder.layers.{}.mixer.out_proj.*        y <- (head vo)
encoder.layers.{}.norm1.*                 scale y
encoder.layers.{}.mlp.fc1.*               ffn <- y
encoder.layers.{}.mlp.fc2.*               x@next <- ffn
encoder.layers.{}.norm2.*                 scale x@next
"""
JINA_SHORTCUTS = """
encoder.layers.{}.mixer   x -> y        encoder.layers.{}.mixer.out_proj
encoder.layers.{}.mlp     y -> x@next   encoder.layers.{}.mlp.fc2
"""


def _table(config: Config, names: frozenset[str], rows: str, shortcuts: str) -> Table:
    axes = (*AXES, bert.TYPE)
    stack = Stack("layer", config["num_hidden_layers"], rows, axes, usual_sizes(config), shortcuts)
    return roberta.with_heads(stack, config, names)


def gte(config: Config, names: frozenset[str]) -> Table:
    return _table(config, names, GTE, GTE_SHORTCUTS)


def jina(config: Config, names: frozenset[str]) -> Table:
    return _table(config, names, JINA, JINA_SHORTCUTS)


KEYS = HARMLESS | bert.SIZES | {"max_position_embeddings", "type_vocab_size", "auto_map"}
KEYS |= {"rope_parameters", "rope_theta", "rope_scaling", "head_dim"}

FAMILIES = (
    Family(
        name="gte",
        library="transformers",
        table=gte,
        signature=(
            "embeddings.word_embeddings.weight",
            "encoder.layer.0.attention.qkv_proj.weight",
            "encoder.layer.0.mlp.up_gate_proj.weight",
            "encoder.layer.0.attn_ln.weight",
        ),
        model_types=("gte", "new"),
        inputs=("tokens",),
        prefixes=("gte.", "new."),
        aliases=(
            ("layers.{}.self_attn.q_proj", "encoder.layer.{}.attention.qkv_proj[0]"),
            ("layers.{}.self_attn.k_proj", "encoder.layer.{}.attention.qkv_proj[1]"),
            ("layers.{}.self_attn.v_proj", "encoder.layer.{}.attention.qkv_proj[2]"),
            ("layers.{}.self_attn", "encoder.layer.{}.attention"),
            ("layers.{}.mlp.up_proj", "encoder.layer.{}.mlp.up_gate_proj[0]"),
            ("layers.{}.mlp.gate_proj", "encoder.layer.{}.mlp.up_gate_proj[1]"),
            ("layers.{}.post_attention_layernorm", "encoder.layer.{}.attn_ln"),
            ("layers.{}.post_mlp_layernorm", "encoder.layer.{}.mlp_ln"),
            ("layers.{}", "encoder.layer.{}"),
            ("lm_head.norm", "lm_head.layer_norm"),
        ),
        known_keys=KEYS | {"unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"},
        required={
            **PLAIN,
            "is_decoder": (False, None),
            "layer_norm_type": ("layer_norm",),
            "logn_attention_scale": (False,),
            "pack_qkv": (True,),
            "position_embedding_type": ("rope",),
        },
    ),
    Family(
        name="jina_embeddings_v3",
        library="transformers",
        table=jina,
        signature=(
            "embeddings.word_embeddings.weight",
            "emb_ln.weight",
            "encoder.layers.0.mixer.Wqkv.weight",
            "encoder.layers.0.mlp.fc1.weight",
        ),
        model_types=("jina_embeddings_v3",),
        inputs=("tokens",),
        prefixes=("roberta.",),
        aliases=(
            ("embeddings.LayerNorm", "emb_ln"),
            ("layers.{}.self_attn.q_proj", "encoder.layers.{}.mixer.Wqkv[0]"),
            ("layers.{}.self_attn.k_proj", "encoder.layers.{}.mixer.Wqkv[1]"),
            ("layers.{}.self_attn.v_proj", "encoder.layers.{}.mixer.Wqkv[2]"),
            ("layers.{}.self_attn.o_proj", "encoder.layers.{}.mixer.out_proj"),
            ("layers.{}.self_attn", "encoder.layers.{}.mixer"),
            ("layers.{}.post_attention_layernorm", "encoder.layers.{}.norm1"),
            ("layers.{}.post_mlp_layernorm", "encoder.layers.{}.norm2"),
            ("layers.{}", "encoder.layers.{}"),
        ),
        known_keys=KEYS,
        required={**PLAIN, "is_decoder": (False, None), "position_embedding_type": ("rotary",)},
    ),
)
