"""DistilBERT as in transformers: BERT's blocks under other names, without token types and pooler."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table
from transfusion.families import bert
from transfusion.families._shared import ATTENTION, HARMLESS, LABEL, PLAIN, POSITION, VOCAB

ROWS = """
embeddings.word_embeddings.weight          vocab -> x@first
embeddings.position_embeddings.weight      position -> x@first
embeddings.LayerNorm.*                     scale x@first
transformer.layer.{}.attention.q_lin.*     (head qk) <- x
transformer.layer.{}.attention.k_lin.*     (head qk) <- x
transformer.layer.{}.attention.v_lin.*     (head vo) <- x
transformer.layer.{}.attention.out_lin.*   y <- (head vo)
transformer.layer.{}.sa_layer_norm.*       scale y
transformer.layer.{}.ffn.lin1.*            ffn <- y
transformer.layer.{}.ffn.lin2.*            x@next <- ffn
transformer.layer.{}.output_layer_norm.*   scale x@next
"""

SHORTCUTS = """
transformer.layer.{}.attention.q_lin   x -> y        transformer.layer.{}.attention.out_lin
transformer.layer.{}.ffn.lin1          y -> x@next   transformer.layer.{}.ffn.lin2
"""

HEADS = """
pre_classifier.*     sentence <- x@last
classifier.*         label <- {sentence}
qa_outputs.*         label <- x@last
vocab_transform.*    {words} <- x@last
vocab_layer_norm.*   scale {words}
vocab_projector.*    vocab <- {words}
"""


def table(config: Config, names: frozenset[str]) -> Table:
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(
            Stack(
                "layer",
                config["n_layers"],
                ROWS,
                (*ATTENTION, POSITION),
                sizes={"x": config["dim"], "head": config["n_heads"], "ffn": config["hidden_dim"]},
                shortcuts=SHORTCUTS,
            ),
        ),
        axes=(Axis("sentence", scope="model"), Axis("mlm", scope="model"), VOCAB, LABEL),
        heads=HEADS.format(
            sentence=bert.pooled(config, names, "pre_classifier.weight", "sentence"),
            words="x@first" if tied else "mlm",
        ),
        buffers="embeddings.position_ids",
        ties={"vocab_projector.weight": "embeddings.word_embeddings.weight"} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


FAMILIES = (
    Family(
        name="distilbert",
        library="transformers",
        table=table,
        signature=(
            "embeddings.word_embeddings.weight",
            "transformer.layer.0.attention.q_lin.weight",
            "transformer.layer.0.ffn.lin1.weight",
        ),
        model_types=("distilbert",),
        inputs=("tokens",),
        prefixes=("distilbert.",),
        known_keys=HARMLESS
        | {"n_layers", "n_heads", "dim", "hidden_dim", "max_position_embeddings", "activation"}
        | {"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"},
        required=PLAIN,
    ),
)
