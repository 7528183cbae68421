"""Recognition: which family a checkpoint belongs to, by its configuration or by its tensors' names.

The values in a configuration are checked here, once: tables, probes and libraries can then trust that sizes
are integers within limits.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from transfusion.architecture.binding import bind
from transfusion.architecture.naming import Naming, OriginalNames
from transfusion.architecture.table import WRONG_FILE, Config, Family, Shapes
from transfusion.errors import ArchitectureError, CheckpointError, LayoutError, listing
from transfusion.families import all_families, family_of_component, register_file, with_whole_parts
from transfusion.families.functions import NO_CONFIG
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.lora_keys import DENOISER, LoraKey
from transfusion.model.library_code import is_unread
from transfusion.runtime.settings import BEFORE_VERBS
from transfusion.runtime.untrusted_files import require_finite, validate

CLASS_NAME = "_class_name"
"""The setting by which diffusers names a class."""


def _use_table(settings: object) -> None:
    """Use the table that the settings of a verb name; for a draft, the file has none yet."""
    file, drafts = (getattr(settings, name, None) for name in ("architecture", "propose"))
    if file is not None and not drafts:
        register_file(file)


BEFORE_VERBS.append(_use_table)


def recognise(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    """Return the family of a checkpoint, its configuration, and how the family was recognised."""
    if checkpoint.config is None:
        return _by_names(checkpoint)
    family, why = declared_family(checkpoint)
    with _odd_tensors(checkpoint.label, family):
        return family, family.complete(checkpoint.config, _shapes(checkpoint, family)), why


def declared_family(checkpoint: Checkpoint) -> tuple[Family, str]:
    """Return the family that a configuration names, and the setting that names it; no tensor is needed."""
    config = checkpoint.config or {}
    _refuse_quantisation(checkpoint.label, config)
    require_sensible(config, f"{checkpoint.label}: {checkpoint.config_label}")
    kind, name, known = _by_config(config)
    family = next((one for one in known if _signed(one, checkpoint)), known[0]) if known else None
    if family is None and name is None:
        family = _family_by_names(checkpoint, f"{checkpoint.config_label} has no {kind}")
        checkpoint.config = {**config, kind: family.model_types[0]}  # so that libraries, too, recognise it
        unread_by_library(checkpoint, family)
        return family, f"the tensors' names; {checkpoint.config_label} has no {kind}"
    if family is None:
        assert name is not None
        nearest = _nearest_family(checkpoint, name)
        diffusers = sorted(one for f in all_families() if f.library == "diffusers" for one in f.model_types)
        raise ArchitectureError(
            f"{checkpoint.label}: {name!r} is not supported."
            + (f" Nearest: {nearest}." if nearest else "")
            + " See docs/your-own.md",
            hint=f"of diffusers, there are tables for {listing(diffusers, 20)}"
            if kind == CLASS_NAME
            else "'transfusion inspect MODEL --propose' drafts a table for it",
        )
    family = with_whole_parts(family, config)
    unread_by_library(checkpoint, family)
    return family, f'{checkpoint.config_label} says {kind} "{name}"'


def _by_config(config: Config) -> tuple[str, str | None, list[Family]]:
    """Return the key that names the architecture, the name, and its families: those of the user first.

    timm names every size, and diffusers the class.
    """
    key = next((key for key in ("model_type", CLASS_NAME, "architecture") if key in config), "model_type")
    if key == "architecture":
        name = config[key]
        of_timm = (f for f in all_families() if f.library == "timm")
        known = (f for f in of_timm if any(fnmatchcase(name, pattern) for pattern in f.model_types))
    else:
        name = "open_clip" if "model_cfg" in config else config.get(key)
        known = (f for f in all_families() if name in f.model_types)
    return key, name, list(known)


def _signed(family: Family, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has the tensors by which a family is recognised, as far as it has any.

    A table of one's own may name the type of a library's, and is then meant for models with more tensors.
    """
    return not family.signature or set(family.signature) <= _shapes(checkpoint, family).keys()


def _nearest_family(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the family with most of its signature in a checkpoint, or else with the most similar name."""

    def share(family: Family) -> tuple[float, int]:
        size = len(family.signature)
        return len(_shapes(checkpoint, family).keys() & set(family.signature)) / max(1, size), size

    nearest = max(all_families(), key=share)
    if share(nearest)[0] > 0.5:
        return nearest.name
    called = {kind: family.name for family in all_families() for kind in family.model_types}
    return next((called[kind] for kind in get_close_matches(name, called, n=1, cutoff=0.75)), None)


def _shapes(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by canonical name."""
    naming = Naming(family, live=True)
    return {naming.canonical(name): info.shape for name, info in checkpoint.tensors.items()}


def _by_names(checkpoint: Checkpoint) -> tuple[Family, Config, str]:
    family = _family_by_names(checkpoint, "no configuration")
    if family.from_shapes is None:
        raise ArchitectureError(
            f"{checkpoint.label}: a {family.name} by its tensors' names, but there is no configuration, and"
            " the number of attention heads does not follow from the shapes",
            hint=NO_CONFIG,
        )
    with _odd_tensors(checkpoint.label, family):
        shapes = _shapes(checkpoint, family)
        return family, family.from_shapes(shapes), "the tensors' names and shapes; there is no config.json"


def _family_by_names(checkpoint: Checkpoint, why: str) -> Family:
    """Return the only family with these tensors' names; ``why`` no configuration tells it."""
    found: list[tuple[Family, dict[str, tuple[int, ...]]]] = []
    for family in all_families():
        shapes = _shapes(checkpoint, family)
        named = family.signature and all(name in shapes for name in family.signature)
        if named and _fits(family, shapes):
            found.append((family, shapes))
    found = [
        one for one in found if not any(set(one[0].signature) < set(other[0].signature) for other in found)
    ]
    if len(found) > 1:  # a part of this model, or a related family, may have no other names
        found = [(family, shapes) for family, shapes in found if _knows_all(family, shapes)] or found
    if len(found) != 1:
        raise ArchitectureError(
            f"{checkpoint.label}: {why}, and the tensors' names belong to"
            + (f" several families: {listing(f.name for f, _ in found)}" if found else " no known family")
            + f" (for instance {listing(checkpoint.tensors, 3)})",
            hint=NO_CONFIG,
        )
    return found[0][0]


def _fits(family: Family, shapes: Shapes) -> bool:
    try:
        return family.fits(shapes)
    except _ODD:
        return False


def _knows_all(family: Family, shapes: Shapes) -> bool:
    """Whether a family's table, filled in from the shapes, describes every one of these tensors."""
    if family.from_shapes is None:
        return False
    try:
        bind(family.table(family.from_shapes(shapes), frozenset(shapes)), shapes, family.name)
    except (ArchitectureError, LayoutError, *_ODD):
        return False
    return True


_ODD = (KeyError, IndexError, ValueError, ArithmeticError)
"""What tensors that are absent, or have too few dimensions, raise."""


@contextmanager
def _odd_tensors(label: str, family: Family) -> Iterator[None]:
    """Within the block, refuse tensors that are absent or have too few dimensions."""
    try:
        yield
    except _ODD as error:
        raise ArchitectureError(
            f"{label}: the tensors do not have the names and shapes of a {family.name} ({error})",
            hint="is this the right file? the download may be incomplete",
        ) from error


def _refuse_quantisation(label: str, config: Mapping[str, Any]) -> None:
    if quantisation := config.get("quantization_config"):
        named = isinstance(quantisation, dict)
        method = quantisation.get("quant_method", "unknown") if named else quantisation
        raise CheckpointError(
            f"{label}: the checkpoint is quantised ({method})",
            hint="use the original weights; as the base of an adapter that was trained on these, what"
            " transformers saves after `model.dequantize()`",
        )


def _unknown_settings(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the settings that a table does not know, their values, and the name by which the library has the
    model that may read them: None for a known setting with a value that the table does not allow.

    Those of its components are told by their own tables.
    """
    for section, component in family.components.items():
        if isinstance(part := config.get(section), dict):
            whole = family_of_component(component, part, section)
            whole = replace(
                whole,
                known_keys=whole.known_keys | component.known_keys,
                required={**whole.required, **component.required},
            )
            for key, value, name in _unknown_settings(whole, part):
                yield f"{section}.{key}", value, name
    own = {key: value for key, value in config.items() if key not in family.components}
    for key, value in settings_of(own):
        leaf = key if key in family.known_keys else key.rsplit(".", 1)[-1]  # some keys have a dot
        if leaf in family.required and value not in family.required[leaf]:
            yield key, value, None
        elif leaf not in family.required and leaf not in family.known_keys:
            yield key, value, _by_config(config)[1] or family.model_types[0]


def unread_by_library(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Return the settings that neither the table nor the code of the family's library knows, for a note.

    Refuse settings that the library reads, or may read: they may change the symmetries of the model.
    """
    config, unread, refused = checkpoint.config or {}, list[str](), list[str]()
    own_code = "auto_map" in config  # a class of the model's own may read any
    for key, value, name in _unknown_settings(family, config):
        leaf = key.rsplit(".", 1)[-1]
        ignored = name and not own_code and is_unread(leaf, family.library, name)
        (unread if ignored else refused).append(key if ignored else f"{key}={reprlib.repr(value)}")
    if refused:
        hint = "they may change which units can be permuted; remove a key only if you know that it does not"
        if family.library not in ("transformers", "diffusers", "open_clip", "timm"):
            hint = "if they cannot change which units may be permuted, add 'ignores KEY …' to the table"
        elif not find_spec(family.library):
            hint += f"; keys that {family.library} never reads pass once it is installed"
        raise ArchitectureError(
            f"{checkpoint.label}: {checkpoint.config_label} has settings that the {family.name} table"
            f" does not know: {listing(refused)}",
            hint=hint,
        )
    return unread


# ── the values that each key of a configuration may have ─────────────────────────────────────

SECTIONS = (
    *("vision_config", "text_config", "vlm_config", "mask_decoder_config", "prompt_encoder_config"),
    *("backbone_config", "audio_config", "model_cfg", "vision_cfg", "text_cfg", "model_args"),
    *("encoder", "decoder"),
)
"""Parts of a configuration that are configurations themselves."""
MAYBE_INFINITE = ("time_step_limit",)
"""Keys of limits that files may put at infinity."""
DEEPEST = 4
"""The limit of sections that lie within each other."""

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**24)]
Few: TypeAlias = Annotated[int, Field(ge=1, le=64)]
Depth: TypeAlias = Annotated[int, Field(ge=1, le=10_000)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Sizes: TypeAlias = Annotated[list[Size], Field(min_length=1, max_length=64)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=2**14)]
Sides: TypeAlias = Side | Annotated[list[Side], Field(min_length=2, max_length=3)]
Tokens: TypeAlias = int | list[int] | None
Labels: TypeAlias = dict[str | int, str | int | float | None]
Section: TypeAlias = dict[str, Any]

_KINDS: dict[Any, str] = {
    Size: """
        approximator_hidden_dim approximator_num_channels audio_attention_head_dim audio_cross_attention_dim
        audio_in_channels audio_num_attention_heads cap_feat_dim caption_channels caption_projection_dim
        context_in_dim d_ff d_model decoder_attention_heads decoder_ffn_dim dim embed_dim embedding_size
        encoder_attention_heads encoder_ffn_dim face_encoder_hidden_dim face_encoder_num_heads ffn_dim
        freq_dim head_width heads hidden_dim hidden_size image_embed_dim in_channels
        inject_face_latents_blocks intermediate_size intermediate_size_mlp joint_attention_dim motion_dim
        motion_encoder_dim motion_encoder_size motion_style_dim n_embd n_embed n_head n_heads
        num_cross_attention_heads num_text_layers pooled_projection_dim shared_expert_intermediate_size
        text_dim text_embed_2_dim text_embed_dim text_hidden_dim text_intermediate_size
        text_num_attention_heads text_num_key_value_heads timestep_embed_dim timestep_guidance_channels
        vace_in_channels width
    """,
    Size | None: """
        added_kv_proj_dim addition_time_embed_dim attention_head_size audio_out_channels
        classifier_proj_size codevector_dim context_length cross_attention_dim cross_attention_head_dim d_kv
        ffn_hidden_size full_attention_interval global_head_dim head_dim image_dim in_chans
        interleave_moe_layer_step kv_lora_rank latent_channels linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim mamba_d_head mamba_d_state mamba_expand mamba_head_dim
        mamba_n_groups mamba_n_heads mamba_num_heads max_position_embeddings max_source_positions
        max_target_positions moe_intermediate_size moe_latent_size n_ctx n_group n_groups n_head_kv n_inner
        n_kv_heads n_positions n_routed_experts no_rope_layer_interval norm_num_groups num_attention_heads
        num_channels num_codevector_groups num_codevectors_per_group num_conv_pos_embedding_groups
        num_conv_pos_embeddings num_experts num_experts_per_tok num_global_key_value_heads
        num_key_value_heads num_kv_heads num_mel_bins num_patches original_max_position_embeddings
        out_channels pos_embed_max_size pos_embed_seq_len proj_codevector_dim
        projection_class_embeddings_input_dim projection_dim projection_size q_lora_rank qk_nope_head_dim
        qk_rope_head_dim relative_attention_max_distance relative_attention_num_buckets rope_max_seq_len
        rotary_dim siglip_feat_dim ssm_state_size time_cond_proj_dim v_head_dim vocab_size
        vocab_size_per_layer_input word_embed_proj_dim
    """,
    Count | None: """
        first_k_dense_replace hidden_size_per_layer_input mtp_num_hidden_layers num_classes
        num_kv_shared_layers num_labels num_local_experts num_register_tokens reg_tokens sliding_window
        type_vocab_size
    """,
    Depth: """
        approximator_layers decoder_layers encoder_layers layers n_layer n_layers num_hidden_layers
        num_layerwise_text_blocks num_refiner_layers num_refiner_text_blocks
    """,
    Depth | None: "depth n_refiner_layers num_decoder_layers num_single_layers",
    Depth | Sizes: "num_layers",
    Sizes: """
        all_f_patch_size all_patch_size axes_dims axes_dims_rope block_out_channels conv_stride depths
        hidden_sizes
    """,
    Size | Sizes | None: "attention_head_dim conv_dim conv_kernel num_heads",
    Annotated[list[Side], Field(min_length=1, max_length=64)]: "axes_lens",
    Few | Annotated[list[Few], Field(min_length=1, max_length=64)]: "layers_per_block",
    Annotated[list[Few], Field(min_length=1, max_length=64)] | None: """
        blocks_per_stage num_attention_heads_per_stage
    """,
    Size | Sizes: "transformer_layers_per_block",
    Sides | None: "image_size img_size input_size patch_size sample_size",
    Sides | dict[str, Side] | None: "max_image_size size",
    Annotated[list[Count], Field(max_length=10000)] | None: "dual_attention_layers vace_layers",
    Fraction | None: "partial_rotary_factor rotary_emb_fraction rotary_pct",
    Number | None: """
        eps interpolation_scale layer_norm_eps layer_norm_epsilon mlp_ratio norm_eps norm_epsilon
        residual_multiplier rms_norm_eps rope_theta rotary_emb_base t_scale
    """,
    bool | None: """
        alibi attention_bias attention_k_eq_v audio_cross_attn_mod audio_ff_bias audio_gated_attn
        causal_condition class_token cross_attn_mod cross_attn_norm custom_text do_layer_norm_before
        do_stable_layer_norm enable_moe_block feat_proj_layer_norm ff_bias gated_attn guidance_embeds
        is_encoder_decoder mlp_bias multi_query new_decoder_architecture parallel_attn qkv_bias quick_gelu
        relative_attention rope_interleaved rotary_emb_interleaved scale_decoder_outputs share_att_key
        tie_word_embeddings use_additional_conditions use_additional_t_cond use_keyframes_abs_pos_embedding
        use_layer3d_rope use_linear_projection use_meanflow use_parallel_residual use_prompt_adaln_single
        use_prompt_embeddings zero_cond_t
    """,
    Annotated[float, Field(ge=0.05, le=2)] | None: "crop_pct test_crop_pct",
    Literal["shortest", "longest", "squash"] | None: "resize_mode",
    Annotated[int, Field(ge=0, le=255)] | None: "fill_color",
    str: "_class_name architecture feat_extract_norm model_type",
    str | None: """
        _name_or_path activation_function crop_mode dtype feed_forward_proj hidden_act pool_type torch_dtype
    """,
    Annotated[list[str], Field(min_length=1, max_length=64)]: "down_block_types up_block_types",
    list[str] | None: "architectures label_names layer_types layers_block_type mlp_layer_types",
    list[Count] | None: "moe_layers no_rope_layers",
    list[str] | str | None: "pos_att_type",
    list[Number] | Number | None: "mean std",
    Labels | None: "id2label label2id",
    Tokens: """
        bos_token_id cls_token_id decoder_start_token_id eos_id eos_token_id mask_token_id pad_id
        pad_token_id sep_token_id
    """,
    Section: """
        decoder encoder mask_decoder_config model_cfg prompt_encoder_config text_cfg text_config vision_cfg
        vision_config vlm_config
    """,
    Section | None: "model_args per_layer_config preprocess_cfg pretrained_cfg rope_parameters rope_scaling",
}
KINDS: Mapping[str, Any] = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}
"""The type of each key's value; null is allowed where it means 'not given'."""


def require_sensible(config: Mapping[str, Any], label: str) -> None:
    """Refuse a configuration with a value that its key cannot have."""
    for key, value, within in _parts(
        config, (*SECTIONS, "preprocess_cfg", "pretrained_cfg", "rope_parameters")
    ):
        if key in KINDS:
            place, info = ".".join((*within, key)), list(value) if isinstance(value, tuple) else value
            validate(info, KINDS[key], f"{label}: {place}", hint=WRONG_FILE, error=ArchitectureError)
        if len(within) > DEEPEST:
            raise ArchitectureError(f"{label}: sections are nested too deeply", hint=WRONG_FILE)
    finite = {key: value for key, value in config.items() if key not in MAYBE_INFINITE}
    require_finite(finite, label, hint=WRONG_FILE, error=ArchitectureError)


def settings_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return every setting of a configuration; those of its sections have dotted names."""
    for key, value, within in _parts(config, SECTIONS):
        if not (key in SECTIONS and isinstance(value, dict)):
            yield ".".join((*within, key)), value


def _parts(
    config: Mapping[str, Any], sections: tuple[str, ...]
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Every key with its value and the sections that it lies in; a section itself comes before its keys."""
    waiting: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), config)]
    while waiting:
        within, part = waiting.pop()
        for key, value in part.items():
            yield key, value, within
            if key in sections and isinstance(value, dict):
                waiting.append(((*within, key), value))


# ── the models that a LoRA file may be for ──────────────────────────────────────────────────


UNET = "unet"
"""The family of U-Nets, whose names have several numbers."""
_UNETS = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 2048: "Stable Diffusion XL"}
"""U-Nets, by the width of the text that their cross-attention reads."""
_UNET_NAMES = re.compile(
    r"(?:down_blocks|mid_block|up_blocks|input_blocks|middle_block|output_blocks)[._].+|(?:conv|time)_\w+"
)
_UNET_CLAIMS = ("sdxl", "sdv1", "sdv2", "sd1", "sd2", "stablediffusionxl", "stablediffusionv")
_CLAIMS = ("ss_base_model_version", "modelspec.architecture", "base_model_name_or_path", "ss_sd_model_name")
"""Entries of a header that name the base, the most general first."""
_LISTS = {"dual_attention_layers": [0], "vace_layers": [0], "all_patch_size": [2], "all_f_patch_size": [1]}
"""Settings of tables that are no numbers."""
_BLOCK = re.compile(r"\{[^}]*\}")
"""The number of a block in a pattern of names."""
_MOST = 0.5
"""The share of modules from which the names are those of a family."""


class _AnySize(int):
    """A number where a table asks for one, and a list of numbers where it asks for an item."""

    def __getitem__(self, place: int) -> int:
        return self


class _AnySizes(dict[str, Any]):
    """A configuration for tables of which only the names are asked: any number will do."""

    def __missing__(self, key: str) -> _AnySize:
        return _AnySize(24)


def fitting_models(
    keys: Iterable[LoraKey], shapes: Shapes, header: Mapping[str, str] | None = None
) -> list[str]:
    """Return the families whose modules have these names; several, if neither names nor header decide."""
    own = [one for one in keys if one.component == DENOISER]
    modules = {(one.module, one.underscored) for one in own}
    if not modules:
        return []
    known = {
        name: sum(bool((flat if joined else dotted).fullmatch(module)) for module, joined in modules)
        for name, (dotted, flat) in _patterns().items()
    }
    best = max(known.values())
    found = [name for name, count in known.items() if count == best >= _MOST * len(modules)]
    if found == [UNET]:
        return [_unet(own, shapes)]
    named = {_family_of_claim(value) for _, value in _general_claims(header or {})}
    return [one for one in found if one in named] or [one for one in found if one != UNET]


def claims(header: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a header that name the base."""
    return {key: header[key] for key in _CLAIMS if header.get(key) not in (None, "", "None")}


def contradiction(header: Mapping[str, str], family: str) -> str | None:
    """Return an entry of the header that names a model of another family than the base's, if any."""
    kin = {one.name: one.kin or one.name for one in all_families()}
    for key, value in _general_claims(header):
        named = _family_of_claim(value)
        if named is not None and kin[named] != kin[family]:
            return f"{value} ({key})"
    return None


def _general_claims(header: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the entries of a header that name a kind of base, and not a file, which may have any name."""
    return [(key, value) for key, value in claims(header).items() if key in _CLAIMS[:2]]


def _family_of_claim(value: str) -> str | None:
    """Return the family of diffusion models whose name such an entry begins with; the longest one counts."""
    names = {_plain(name): name for name in _patterns()} | dict.fromkeys(_UNET_CLAIMS, UNET)
    return names.get(max((name for name in names if _plain(value).startswith(name)), key=len, default=""))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unet(keys: Iterable[LoraKey], shapes: Shapes) -> str:
    """Return which U-Net it is, by the width of the text that it reads."""
    for key in keys:
        if key.part == "lora_A" and re.search(r"attn2[._]to_k$", key.module):
            return _UNETS.get(shapes[key.key][1] if len(shapes[key.key]) > 1 else 0, UNET)
    return UNET


@cache
def _patterns() -> dict[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return, for every family of diffusion models, its modules' names with points and with underscores."""
    found = {UNET: (_UNET_NAMES, _UNET_NAMES)}
    for family in all_families():
        if family.library == "diffusers" and family.name != UNET:
            names = {*OriginalNames(family).modules, *_modules(family)}
            found[family.name] = _any_of(names), _any_of({name.replace(".", "_") for name in names})
    return found


def _modules(family: Family) -> Iterator[str]:
    """Yield the names of the modules in a family's table, with ``{}`` for the number of a block."""
    table = family.table(_AnySizes(_LISTS), frozenset())
    for rows in (table.rows, *(stack.rows for stack in table.stacks)):
        yield from (re.sub(r"\.(\*|weight|bias)$", "", name) for name in rows)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(r"\d+".join(map(re.escape, _BLOCK.split(name))) for name in sorted(names)))
