"""ALBERT as in transformers: one block, applied repeatedly; embeddings of another width than the stream."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed
from transfusion.families import bert
from transfusion.families._shared import ATTENTION, HARMLESS, LABEL, POSITION, VOCAB, usual_sizes

BLOCK = "encoder.albert_layer_groups.0.albert_layers.0"

ROWS = f"""
{bert.EMBEDDINGS.strip().replace("x@first", "word")}
encoder.embedding_hidden_mapping_in.*   x@first <- word
{BLOCK}.attention.query.*               (head qk) <- x
{BLOCK}.attention.key.*                 (head qk) <- x
{BLOCK}.attention.value.*               (head vo) <- x
{BLOCK}.attention.dense.*               y <- (head vo)
{BLOCK}.attention.LayerNorm.*           scale y
{BLOCK}.ffn.*                           ffn <- y
{BLOCK}.ffn_output.*                    x@next <- ffn
{BLOCK}.full_layer_layer_norm.*         scale x@next
"""

SHORTCUTS = f"""
{BLOCK}.attention.query   x -> y        {BLOCK}.attention.dense
{BLOCK}.ffn               y -> x@next   {BLOCK}.ffn_output
"""

HEADS = """
pooler.*                      pool <- x@last
classifier.*                  label <- {pooled}
qa_outputs.*                  label <- x@last
sop_classifier.classifier.*   order <- pool
predictions.bias              vocab
predictions.dense.*           {words} <- x@last
predictions.LayerNorm.*       scale {words}
predictions.decoder.*         vocab <- {words}
"""

TIES = {
    "predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}


def table(config: Config, names: frozenset[str]) -> Table:
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(Stack("layer", 1, ROWS, (*ATTENTION, POSITION, bert.TYPE), usual_sizes(config), SHORTCUTS),),
        axes=(
            Axis("word", scope="model"),
            Axis("pool", scope="model"),
            Axis("mlm", scope="model"),
            VOCAB,
            LABEL,
            fixed("order", "in order, or exchanged: in this order"),
        ),
        heads=HEADS.format(
            pooled=bert.pooled(config, names, "pooler.weight"), words="word" if tied else "mlm"
        ),
        buffers="embeddings.position_ids",
        unified=(("x@first", "x@last"),),  # the block reads what it wrote
        ties=TIES if tied else {},
        outputs={"last_hidden_state": "x@last", "pooler_output": "pool"},
    )


FAMILIES = (
    Family(
        name="albert",
        library="transformers",
        table=table,
        signature=(
            "embeddings.word_embeddings.weight",
            "encoder.embedding_hidden_mapping_in.weight",
            f"{BLOCK}.attention.query.weight",
        ),
        model_types=("albert",),
        inputs=("tokens",),
        prefixes=("albert.",),
        known_keys=HARMLESS
        | bert.SIZES
        | {"embedding_size", "max_position_embeddings", "type_vocab_size", "classifier_dropout_prob"}
        | {"down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks"},
        required={**bert.REQUIRED, "num_hidden_groups": (1,), "inner_group_num": (1,)},
    ),
)
