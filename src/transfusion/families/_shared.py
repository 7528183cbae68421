"""Axes, settings and helpers that several families share."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, fixed
from transfusion.errors import ArchitectureError

BOOKKEEPING = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "language",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "xla_device",
    ]
)
"""Configuration keys of transformers that cannot change what a model computes: dropout, initialisation,
generation, tokens, labels."""

HARMLESS = BOOKKEEPING | frozenset(
    [
        "cross_attention_hidden_size",
        "encoder_stride",
        "hidden_act",
        "hidden_activation",
        "is_encoder_decoder",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "model_type",
        "projection_dim",
        "rms_norm_eps",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "vocab_size",
    ]
)
"""Keys that cannot change a symmetry: the same, and numerics that treat all units alike."""

BACKBONE = frozenset(
    [
        "_out_features",
        "_out_indices",
        "apply_layernorm",
        "drop_path_rate",
        "layerscale_value",
        "out_features",
        "out_indices",
        "reshape_hidden_states",
        "return_class_token",
        "stage_names",
    ]
)
"""Keys of vision models that serve as backbones: which outputs are given, how training starts."""

SPEC_AUGMENT = frozenset(
    ["apply_spec_augment"]
    + [f"mask_{along}_{what}" for along in ("time", "feature") for what in ("prob", "length", "min_masks")]
)
"""Keys of audio models: masking during training."""

PLAIN = {
    "pruned_heads": ({}, None),
    "add_cross_attention": (False, None),
}
"""Values of common keys that the tables assume."""

ATTENTION = (
    Axis("head"),
    Axis("qk", within="head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
)
"""Multi-head attention without positions in it, and a plain MLP."""

CROSS = (
    Axis("cross_head"),
    Axis("cross_qk", within="cross_head"),
    Axis("cross_vo", within="cross_head", tied_with="cross_qk"),
)
"""A decoder's attention to the output of an encoder."""

LABEL = fixed("label", "the order of the labels is the meaning of the output")
MATCH = fixed("match", "texts are compared in it token by token, and embeddings are kept outside the model")
"""What ColBERT's linear map on top of an encoder ends in."""
VOCAB = fixed("vocab", "token ids select its rows")
POSITION = fixed("position", "positions select its rows", scope="stack")
PATCH = (
    fixed("channel", "colour channels come in this order", scope="stack"),
    fixed("row", "rows of pixels come in this order", scope="stack"),
    fixed("column", "columns of pixels come in this order", scope="stack"),
)

PIXEL = fixed("pixel", "the pixels of a patch come in this order", scope="stack")


def below(prefix: str, rows: str) -> str:
    """The same rows, of modules that stand below ``prefix``."""
    return "\n".join(prefix + line.strip() for line in rows.strip().splitlines())


def both_ends_below(prefix: str, shortcuts: str) -> str:
    """The same shortcuts, of modules that stand below ``prefix``."""
    lines = (line.split() for line in shortcuts.strip().splitlines())
    return "\n".join(" ".join([prefix + entry, *way, prefix + branch]) for entry, *way, branch in lines)


NO_CONFIG = (
    "put the model's config.json (open_clip_config.json of an open_clip model) beside the weights, or give it"
    " with `config`"
)


def needs_config(family: str, what: str) -> ArchitectureError:
    """Return the error for a model whose shapes leave something open."""
    return ArchitectureError(
        f"{family}: {what} does not follow from the shapes",
        hint=NO_CONFIG,
    )


def usual_sizes(config: Config) -> dict[str, int]:
    """The sizes that most configurations of transformers give under these names."""
    return {
        "x": config["hidden_size"],
        "head": config["num_attention_heads"],
        "ffn": config["intermediate_size"],
    }
