"""DeBERTa v2 and v3 as in transformers: BERT's blocks, with relative positions among queries and keys."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed
from transfusion.families import bert
from transfusion.families._shared import ATTENTION, HARMLESS, LABEL, POSITION, VOCAB, usual_sizes

ROWS = """
embeddings.word_embeddings.weight                   vocab -> {word}
embeddings.position_embeddings.weight?              position -> {word}
embeddings.token_type_embeddings.weight?            type -> {word}
embeddings.embed_proj.weight?                       x@first <- {word}
embeddings.LayerNorm.*                              scale x@first
encoder.rel_embeddings.weight?                      distance -> {distances}
encoder.LayerNorm.*?                                scale {distances}
encoder.layer.{{}}.attention.self.query_proj.*      (head qk) <- x
encoder.layer.{{}}.attention.self.key_proj.*        (head qk) <- x
encoder.layer.{{}}.attention.self.pos_query_proj.*? (head qk) <- {distances}
encoder.layer.{{}}.attention.self.pos_key_proj.*?   (head qk) <- {distances}
encoder.layer.{{}}.attention.self.value_proj.*      (head vo) <- x
encoder.layer.{{}}.attention.output.dense.*         y <- (head vo)
encoder.layer.{{}}.attention.output.LayerNorm.*     scale y
encoder.layer.{{}}.intermediate.dense.*             ffn <- y
encoder.layer.{{}}.output.dense.*                   x@next <- ffn
encoder.layer.{{}}.output.LayerNorm.*               scale x@next
"""

# Some models of v2 add a convolution of the embeddings to what the first block hands on.
CONVOLUTION = """
encoder.conv.conv.*?        x@1 <- x@first offset
encoder.conv.LayerNorm.*?   scale x@1
"""

# The projections of queries and keys may also be called with distances, so the stream enters above.
SHORTCUTS = """
encoder.layer.{}.attention.self       x -> y        encoder.layer.{}.attention.output.dense
encoder.layer.{}.intermediate.dense   y -> x@next   encoder.layer.{}.output.dense
"""

# The second masked-language head always multiplies with the embedding itself.
HEADS = """
pooler.dense.*                          pool <- x@last
classifier.*                            label <- {pooled}
qa_outputs.*                            label <- x@last
cls.predictions.bias                    vocab
cls.predictions.transform.dense.*       {words} <- x@last
cls.predictions.transform.LayerNorm.*   scale {words}
cls.predictions.decoder.*               vocab <- {words}
lm_predictions.lm_head.dense.*          {word} <- x@last
lm_predictions.lm_head.LayerNorm.*      scale {word}
lm_predictions.lm_head.bias             vocab
mask_predictions.LayerNorm.*            scale x@last
mask_predictions.dense.*                replaced <- x@last
mask_predictions.classifier.*           _ <- replaced
"""

AXES = (
    *ATTENTION,
    POSITION,
    bert.TYPE,
    fixed("distance", "distances select its rows", scope="stack"),
    fixed("offset", "neighbours come in this order", scope="stack"),
)


def table(config: Config, names: frozenset[str]) -> Table:
    layers = config["num_hidden_layers"]
    tied = config.get("tie_word_embeddings", True)
    # Where distances go through each block's own query and key, they are in the space of its input,
    # so all blocks read one space.
    shared = config.get("relative_attention", False) and config.get("share_att_key", False)
    narrow = config.get("embedding_size", config["hidden_size"]) != config["hidden_size"]
    word = "word" if narrow else "x@first"
    rows = ROWS.format(word=word, distances="x@first" if shared else "distances")
    return Table(
        stacks=(Stack("layer", layers, rows, AXES, usual_sizes(config), SHORTCUTS),),
        axes=(
            Axis("word", scope="model"),
            Axis("distances", scope="model"),
            Axis("pool", scope="model"),
            Axis("mlm", scope="model"),
            Axis("replaced", scope="model"),
            VOCAB,
            LABEL,
        ),
        rows=CONVOLUTION,
        heads=HEADS.format(pooled=bert.pooled(config, names), word=word, words=word if tied else "mlm"),
        buffers="embeddings.position_ids",
        unified=tuple(("x@first", f"x@{i}") for i in range(1, layers)) if shared else (),
        ties=bert.TIES if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


FAMILIES = (
    Family(
        name="deberta",
        library="transformers",
        table=table,
        signature=(
            "embeddings.word_embeddings.weight",
            "encoder.layer.0.attention.self.query_proj.weight",
            "encoder.layer.0.intermediate.dense.weight",
        ),
        model_types=("deberta-v2",),
        inputs=("tokens",),
        prefixes=("deberta.",),
        known_keys=HARMLESS
        | bert.SIZES
        | {"embedding_size", "max_position_embeddings", "type_vocab_size", "attention_head_size"}
        | {"relative_attention", "max_relative_positions", "position_buckets", "norm_rel_ebd"}
        | {"share_att_key", "pos_att_type", "position_biased_input", "conv_act", "conv_kernel_size"}
        | {"legacy", "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "cls_dropout"}
        | {"padding_idx"},
        required={**bert.REQUIRED, "conv_groups": (1,)},
    ),
)
