"""wav2vec 2.0 and HuBERT as in transformers: convolutions over samples, then a pre- or post-norm encoder."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table, fixed
from transfusion.families._shared import (
    ATTENTION,
    HARMLESS,
    LABEL,
    PLAIN,
    SPEC_AUGMENT,
    VOCAB,
    usual_sizes,
)

FEATURES = """
feature_extractor.conv_layers.{{}}.conv.*             channel@next <- channel tap
feature_extractor.conv_layers.{normed}.layer_norm.*   scale {channel}
"""

ENCODER = """
feature_projection.layer_norm.*?                        scale features.channel@last
feature_projection.projection.*                         x@first <- features.channel@last
encoder.pos_conv_embed.conv.weight_g                    _ _ moment
encoder.pos_conv_embed.conv.weight_v                    x@first <- mate moment
encoder.pos_conv_embed.conv.bias                        x@first
encoder.layer_norm.*                                    scale {outer_norm}
encoder.layers.{{}}.attention.q_proj.*                  (head qk) <- x
encoder.layers.{{}}.attention.k_proj.*                  (head qk) <- x
encoder.layers.{{}}.attention.v_proj.*                  (head vo) <- x
encoder.layers.{{}}.attention.out_proj.*                y <- (head vo)
encoder.layers.{{}}.layer_norm.*                        scale {norm}
encoder.layers.{{}}.feed_forward.intermediate_dense.*   ffn <- y
encoder.layers.{{}}.feed_forward.output_dense.*         x@next <- ffn
encoder.layers.{{}}.final_layer_norm.*                  scale {last_norm}
"""

POST_NORM = """
encoder.layers.{}.attention.q_proj                  x -> y        encoder.layers.{}.attention.out_proj
encoder.layers.{}.feed_forward.intermediate_dense   y -> x@next   encoder.layers.{}.feed_forward.output_dense
"""

PRE_NORM = """
encoder.layers.{}.layer_norm         x -> y        encoder.layers.{}.attention.out_proj
encoder.layers.{}.final_layer_norm   y -> x@next   encoder.layers.{}.feed_forward.output_dense
"""

HEADS = """
masked_spec_embed         layer.x@first
lm_head.*                 vocab <- layer.x@last
projector.*               sound <- layer.x@last
classifier.*              label <- {pooled}
project_hid.*             joint <- layer.x@last
project_q.*               joint <- (book piece)
quantizer.codevectors     _ (book code) piece
quantizer.weight_proj.*   (book code) <- features.channel@last
"""

GROUPS = (
    "the convolution that tells positions reads the stream in groups of neighbours; only whole groups, and"
    " units inside each, could change places"
)


def table(config: Config, names: frozenset[str]) -> Table:
    every = config["feat_extract_norm"] == "layer"
    before = config["do_stable_layer_norm"]
    features = Stack(
        "features",
        len(config["conv_dim"]),
        FEATURES.format(normed="{}" if every else 0, channel="channel@next" if every else "channel@1"),
        (fixed("tap", "samples come in this order", scope="layer"),),
        points=("channel",),
        residual=False,
    )
    encoder = Stack(
        "layer",
        config["num_hidden_layers"],
        ENCODER.format(
            outer_norm="x@last" if before else "x@first",
            norm="x" if before else "y",
            last_norm="y" if before else "x@next",
        ),
        (
            *ATTENTION,
            fixed("moment", "moments come in this order", scope="stack"),
            fixed("mate", GROUPS, scope="stack"),
        ),
        sizes=usual_sizes(config),
        shortcuts=PRE_NORM if before else POST_NORM,
    )
    return Table(
        stacks=(features, encoder),
        axes=(
            Axis("sound", scope="model"),
            Axis("joint", scope="model"),
            Axis("book", scope="model"),
            Axis("code", scope="model", within="book"),
            Axis("piece", scope="model"),
            VOCAB,
            LABEL,
        ),
        heads=HEADS.format(pooled="sound" if "projector.weight" in names else "layer.x@last"),
        sizes={"book": config.get("num_codevector_groups", 2)},
        pinned={"features.channel@first": "sound has one channel", "layer.x@first": GROUPS},
        outputs={
            "last_hidden_state": "layer.x@last",
            "extract_features": "features.channel@last",
            "projected_states": "joint",
            "projected_quantized_states": "joint",
        },
    )


OLDER = frozenset(
    ["feat_extract_dropout", "freeze_feat_extract_train", "mask_channel_length", "mask_channel_prob"]
    + [
        f"mask_{along}_{what}"
        for along in ("time", "channel")
        for what in ("min_space", "other", "selection")
    ]
    + [f"no_mask_{along}_overlap" for along in ("time", "channel")]
)
"""What the first configurations kept from the training in fairseq."""

FAMILIES = (
    Family(
        name="wav2vec2",
        library="transformers",
        table=table,
        signature=(
            "feature_extractor.conv_layers.0.conv.weight",
            "feature_projection.projection.weight",
            "encoder.pos_conv_embed.conv.weight_v",
            "encoder.layers.0.feed_forward.intermediate_dense.weight",
        ),
        model_types=("wav2vec2", "hubert"),
        inputs=("waveform",),
        prefixes=("wav2vec2.", "hubert."),
        aliases=tuple(
            (f"encoder.pos_conv_embed.conv.{other}", f"encoder.pos_conv_embed.conv.{ours}")
            for other, ours in (
                ("parametrizations.weight.original0", "weight_g"),
                ("parametrizations.weight.original1", "weight_v"),
            )
        ),
        known_keys=HARMLESS
        | SPEC_AUGMENT
        | OLDER
        | {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        | {"conv_dim", "conv_kernel", "conv_stride", "conv_bias", "num_feat_extract_layers"}
        | {"feat_extract_norm", "feat_extract_activation", "feat_proj_layer_norm", "do_stable_layer_norm"}
        | {"num_conv_pos_embeddings", "num_conv_pos_embedding_groups", "classifier_proj_size"}
        | {"activation_dropout", "feat_proj_dropout", "feat_quantizer_dropout"}
        | {"final_dropout", "layerdrop"}
        | {"num_codevector_groups", "num_codevectors_per_group", "codevector_dim", "proj_codevector_dim"}
        | {"contrastive_logits_temperature", "num_negatives", "diversity_loss_weight"}
        | {"ctc_loss_reduction", "ctc_zero_infinity", "tdnn_dim", "tdnn_kernel", "tdnn_dilation"}
        | {"xvector_output_dim", "adapter_kernel_size", "adapter_stride", "num_adapter_layers"}
        | {"output_hidden_size"},
        required={
            **PLAIN,
            "add_adapter": (False,),
            "adapter_attn_dim": (None,),
            "conv_pos_batch_norm": (False,),
            "use_weighted_layer_sum": (False,),
        },
    ),
)
