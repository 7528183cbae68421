"""ModernBERT as in transformers: pre-norm, fused projections, rotary positions, a gated MLP."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, rotary
from transfusion.families._shared import HARMLESS, LABEL, MATCH, PLAIN, VOCAB, usual_sizes

# The embeddings come normalised, so the first block has no norm of its own.
ROWS = """
embeddings.tok_embeddings.weight   vocab -> x@first
embeddings.norm.*                  scale x@first
layers.{1+}.attn_norm.*            scale x
layers.{}.attn.Wqkv.*              [(head qk)|(head qk)|(head vo)] <- x
layers.{}.attn.Wo.*                y <- (head vo)
layers.{}.mlp_norm.*               scale y
layers.{}.mlp.Wi.*                 [ffn|ffn] <- y
layers.{}.mlp.Wo.*                 x@next <- ffn
final_norm.*                       scale x@last
"""

SHORTCUTS = """
layers.{}.attn_norm   x -> y        layers.{}.attn.Wo
layers.{}.mlp_norm    y -> x@next   layers.{}.mlp.Wo
"""

# All heads read through one transform, which base models bring along from pre-training.
HEADS = """
head.dense.*   {words} <- x@last
head.norm.*    scale {words}
decoder.*      vocab <- {words}
classifier.*   label <- {words}
linear.*       match <- x@last
"""

AXES = (
    Axis("head"),
    rotary("qk", "head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(
            Stack(
                "layer",
                config["num_hidden_layers"],
                ROWS,
                AXES,
                sizes=usual_sizes(config),
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(Axis("mlm", scope="model"), VOCAB, LABEL, MATCH),
        heads=HEADS.format(words="x@first" if tied else "mlm"),
        ties={"decoder.weight": "embeddings.tok_embeddings.weight"} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


FAMILIES = (
    Family(
        name="modernbert",
        library="transformers",
        table=table,
        signature=(
            "embeddings.tok_embeddings.weight",
            "layers.0.attn.Wqkv.weight",
            "layers.0.mlp.Wi.weight",
            "layers.0.mlp.Wo.weight",
        ),
        model_types=("modernbert",),
        inputs=("tokens",),
        prefixes=("model.",),
        known_keys=HARMLESS
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        | {"max_position_embeddings", "position_embedding_type", "layer_types", "rope_parameters"}
        | {"global_attn_every_n_layers", "global_rope_theta", "local_attention", "local_rope_theta"}
        | {"attention_bias", "mlp_bias", "norm_bias", "decoder_bias", "norm_eps", "mlp_dropout"}
        | {"classifier_activation", "classifier_bias", "classifier_pooling", "embedding_dropout"}
        | {"cls_token_id", "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"}
        | {"loss_function_params", "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"},
        required=PLAIN,
    ),
)
