"""The kinds of adapters: the layouts of their tensors, their formulas, and why others cannot be moved.

A layout is written with the outputs ``O`` and the inputs ``I`` of the weight ``O <- I`` that the adapter
changes. π does not move the dimensions ``rank``, ``1`` (of one element) and ``_``. ``row`` is a row of the
weight as it is stored. If the inputs of a weight are several dimensions (a convolution), ``I`` stands for
them one by one or flattened, whichever fits the shape. ``|`` separates alternatives. ``weight`` and ``bias``
are the layouts of the module's own tensors, for differences that are stored as a whole.

The formulas act on weight matrices (outputs, inputs), however a library stores them. They go by the parts
that a module has, so that a kind is a list of parts.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.architecture.layouts import ANONYMOUS, Item, Layout, Name, Product
from transfusion.errors import AdapterError, listing
from transfusion.transport.adapters.settings import ModuleSettings

MERGE = "merge the adapter into its base, and move the merged model"

# ── parts ────────────────────────────────────────────────────────────────────────────────────


class WeightReference(Enum):
    """The base's own value that a stored tensor is compared with. α scales the difference."""

    NONE = auto()  # α does not scale this tensor
    ZERO = auto()
    ONE = auto()
    NORMS = auto()  # of the weight's rows
    ROWS = auto()  # some rows of the weight
    WHOLE = auto()  # the weight itself


@dataclass(frozen=True)
class AdapterPart:
    """One stored tensor of a module."""

    name: str  # the end of its key, after the name of the module
    form: str  # its layout, as described above
    reference: WeightReference = WeightReference.NONE
    rigid: bool = False  # whether its values belong to single units, so that only permutations can move it
    of: str = "weight"  # the tensor of the module that it changes

    def on(self, weight: Layout, shape: Sequence[int]) -> tuple[Layout, int | None] | None:
        """Return the layout on a weight, and the rank if any; None if no alternative fits the shape."""
        if self.form in ("weight", "bias"):
            of_outputs = self.form == "bias" and weight.arrow is not None
            whole = weight.part(weight.outputs) if of_outputs else weight
            return (whole, None) if len(whole.items) == len(shape) else None
        for reading in self._readings(weight, len(shape)):
            sizes = [(word, size) for (word, _), size in zip(reading, shape, strict=True)]
            if all(size == 1 for word, size in sizes if word == "1"):
                return _layout(reading), next((size for word, size in sizes if word == "rank"), None)
        return None

    def _readings(self, weight: Layout, ndim: int) -> Iterator[list[tuple[str, Item]]]:
        outputs, inputs = weight.part(weight.outputs).items, weight.part(weight.inputs).items
        axes = {"O": outputs, "I": inputs, "row": weight.items[1:]}
        unmoved = Name(ANONYMOUS)
        for form in self.form.split("|"):
            words = [(word, axes.get(word, (unmoved,))) for word in form.split()]
            spread = [(word, item) for word, items in words for item in items]
            merged = [(word, items[0] if len(items) == 1 else Product(items)) for word, items in words]
            padded = [*spread, *[("1", unmoved)] * (ndim - len(spread))]
            yield from (reading for reading in (spread, merged, padded) if len(reading) == ndim)


def _layout(reading: Sequence[tuple[str, Item]]) -> Layout:
    """Return the layout, with an arrow from the inputs if there are any."""
    items = tuple(item for _, item in reading)
    inputs = [place for place, (word, _) in enumerate(reading) if word == "I"]
    if not inputs or len(inputs) == len(items):
        return Layout(items)
    return Layout(items, "->", len(inputs)) if inputs[0] == 0 else Layout(items, "<-", inputs[0])


_ZERO, _ONE = WeightReference.ZERO, WeightReference.ONE
MAGNITUDE = "lora_magnitude_vector"
TOKENS = AdapterPart("trainable_tokens_delta", "_ row", WeightReference.ROWS)
"""The trained rows of an embedding."""
WHOLE = AdapterPart("", "", WeightReference.WHOLE)  # a tensor that was trained as a whole, under its own name
PROMPT = "prompt_embeddings"  # the key of a prompt's tensor, also its name among a model's tensors
PARTS = {
    part.name: part
    for part in (
        AdapterPart("lora_A", "rank I"),
        AdapterPart("lora_B", "O rank", _ZERO),
        AdapterPart("lora_B.bias", "O", _ZERO, of="bias"),
        AdapterPart("lora_E", "rank 1"),
        AdapterPart("lora_embedding_A", "rank I"),
        AdapterPart("lora_embedding_B", "O rank", _ZERO),
        AdapterPart(MAGNITUDE, "O | 1 O 1 | 1 O 1 1 | 1 O 1 1 1", WeightReference.NORMS, rigid=True),
        AdapterPart("hada_w1_a", "O rank", _ZERO, rigid=True),
        AdapterPart("hada_w1_b", "rank I", rigid=True),
        AdapterPart("hada_w2_a", "O rank", rigid=True),
        AdapterPart("hada_w2_b", "rank I", rigid=True),
        AdapterPart("ia3_l", "O 1 | 1 I", _ONE, rigid=True),
        AdapterPart("vera_lambda_b", "O"),
        AdapterPart("vera_lambda_d", "rank"),
        AdapterPart("oft_R", "_ _"),
        AdapterPart("diff", "weight", _ZERO),
        AdapterPart("diff_b", "bias", _ZERO, of="bias"),
        AdapterPart("alpha", ""),
        AdapterPart(PROMPT, ""),
        TOKENS,
    )
}

# ── formulas ─────────────────────────────────────────────────────────────────────────────────

Parts: TypeAlias = Mapping[str, Tensor]  # the stored tensors of one module, by the names of their parts
Factors: TypeAlias = tuple[Tensor, Tensor]
"""A change of low rank as a product: (outputs, rank) and (rank, inputs)."""
_NOT_ADDED = {MAGNITUDE, "ia3_l", TOKENS.name}  # parts whose change depends on the weight


def is_added(parts: Set[str]) -> bool:
    """Whether a module with these parts adds a change that does not depend on the weight."""
    return not parts & _NOT_ADDED


def _lora(parts: Parts) -> Factors | None:
    """Return the factors of a LoRA without their scale, if a module has them; those of embeddings differ."""
    for name in ("lora", "lora_embedding"):
        if (left := parts.get(f"{name}_B")) is not None:
            return left.flatten(1), parts[f"{name}_A"].flatten(1) * parts.get("lora_E", 1)
    return None


def lora_factors(parts: Parts, settings: ModuleSettings) -> Factors | None:
    """Return s·B and A of a LoRA, whose product is all that the module changes; None for other modules."""
    alone = is_added(parts.keys()) and not parts.keys() & {"diff", "hada_w1_a"}
    if not alone or (product := _lora(parts)) is None:
        return None
    return settings.scale * product[0], product[1]


def changed_weight(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return the new weight matrix of a module."""
    if "ia3_l" in parts:
        return weight * parts["ia3_l"]
    if "diff" in parts:
        weight = weight + parts["diff"]
    if (lora := _lora(parts)) is not None:
        weight = weight + settings.scale * (lora[0] @ lora[1])  # (outputs, rank) @ (rank, inputs)
    if "hada_w1_a" in parts:  # LoHa: an elementwise product of two products
        one, two = (parts[f"hada_{w}_a"].flatten(1) @ parts[f"hada_{w}_b"].flatten(1) for w in ("w1", "w2"))
        weight = weight + settings.scale * one * two
    if MAGNITUDE in parts:  # DoRA: every row has its trained norm
        weight = weight * (parts[MAGNITUDE].flatten() / row_norms(weight))[:, None]
    return weight


def changed_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return the new bias of a module."""
    if "ia3_l" in parts:
        return bias * parts["ia3_l"].flatten()
    if "lora_B.bias" in parts:
        bias = bias + settings.scale * parts["lora_B.bias"].flatten()
    return bias + parts["diff_b"].flatten() if "diff_b" in parts else bias


def singular_directions(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular vectors of a product, as columns and as rows, and between them its values."""
    (outputs, tall), (inputs, wide) = torch.linalg.qr(left), torch.linalg.qr(right.T)  # Q and R of each
    u, s, v = torch.linalg.svd(tall @ wide.T, full_matrices=False)  # (rank, rank)
    return outputs @ u, s, v @ inputs.T  # (outputs, rank), (rank,), (rank, inputs)


def row_norms(matrix: Tensor) -> Tensor:
    """Return the norm of every row, summed in float64."""
    lengths: Tensor = torch.linalg.vector_norm(matrix.double(), dim=1)  # (rows,)
    return lengths.to(matrix.dtype)


# ── kinds ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AdapterKind:
    """A kind of adapter."""

    name: str
    needs: str = ""  # the parts of a module: all of one of the alternatives between ``|``
    may: str = ""  # further parts that a module may have
    settings: str = ""  # settings of this kind that do not change the layout of its tensors
    prompt: bool = False
    """Whether it changes the inputs of the model and no weight, so that it cannot be merged."""

    @property
    def scalable(self) -> bool:
        """Whether α other than 1 is possible."""
        return not self.prompt

    @cached_property
    def parts(self) -> dict[str, AdapterPart]:
        names = f"{self.needs} {self.may}".replace("|", " ").split()
        return {name: PARTS[name] for name in names}

    @property
    def has_rank(self) -> bool:
        return any("rank" in part.form for part in self.parts.values())

    def absent(self, there: Set[str]) -> set[str]:
        """Return the parts that a module with these parts lacks."""
        alternatives = [set(names.split()) for names in self.needs.split("|")]
        wanted = max(alternatives, key=lambda names: len(names & there))
        return wanted - there if wanted & there else set()


_LORA = (
    "alpha_pattern ensure_weight_tying eva_config init_lora_weights lora_alpha lora_bias lora_dropout"
    " megatron_core qalora_group_size trainable_token_indices use_rslora"
)
_PROMPTS = (
    "encoder_dropout encoder_hidden_size encoder_num_layers encoder_reparameterization_type"
    " num_attention_heads num_layers num_transformer_submodules num_virtual_tokens prompt_tuning_init"
    " prompt_tuning_init_text token_dim tokenizer_kwargs tokenizer_name_or_path"
)
_HADAMARD = "hada_w1_a hada_w1_b hada_w2_a hada_w2_b"
LORA = AdapterKind(
    "LORA",
    "lora_A lora_B | lora_embedding_A lora_embedding_B",
    f"lora_B.bias {TOKENS.name}",
    f"{_LORA} use_dora",
)
DORA = replace(
    LORA,
    name="DORA",
    needs=f"lora_A lora_B {MAGNITUDE} | lora_embedding_A lora_embedding_B {MAGNITUDE}",
)
"""LoRA with trained row norms. Its configuration is that of LoRA with ``use_dora``."""
_KINDS = (
    LORA,
    AdapterKind(
        "ADALORA",
        "lora_A lora_B lora_E",
        TOKENS.name,
        f"{_LORA} beta1 beta2 deltaT init_r orth_reg_weight target_r tfinal tinit total_step",
    ),
    AdapterKind("LOHA", _HADAMARD, settings="alpha alpha_pattern module_dropout rank_dropout"),
    AdapterKind(  # read as a LoRA: see `conversions`
        "LOKR",
        settings="alpha alpha_pattern decompose_both decompose_factor module_dropout rank_dropout"
        " rank_dropout_scale",
    ),
    AdapterKind(  # these two are read as LoRAs once their base is known: see `multiplied`
        "VERA",
        "vera_lambda_b vera_lambda_d",
        settings="d_initial projection_prng_key save_projection vera_dropout",
    ),
    AdapterKind(
        "OFT",
        "oft_R",
        settings="block_share eps module_dropout num_cayley_neumann_terms oft_block_size use_cayley_neumann",
    ),
    AdapterKind("IA3", "ia3_l", settings="feedforward_modules init_ia3_weights"),
    AdapterKind("LN_TUNING"),
    AdapterKind("TRAINABLE_TOKENS", TOKENS.name, settings="token_indices"),
    AdapterKind("PROMPT_TUNING", PROMPT, settings=_PROMPTS, prompt=True),
    AdapterKind("P_TUNING", PROMPT, settings=_PROMPTS, prompt=True),
)
KINDS = {kind.name: kind for kind in _KINDS}
_IN_FILES = AdapterKind(
    "LORA", f"lora_A lora_B | {_HADAMARD}", f"lora_B.bias {MAGNITUDE} alpha diff diff_b", LORA.settings
)
"""What a LoRA file for image and video models may hold, module by module."""


def kind_in_file(parts: Set[str]) -> AdapterKind:
    """Return the kind of a LoRA file that holds these parts."""
    name = "DORA" if MAGNITUDE in parts else "LOHA" if "hada_w1_a" in parts else "LORA"
    return replace(_IN_FILES, name=name)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────

_REASONS = {
    "it acts on blocks of neighbouring units, and π separates neighbours": "BOFT BONE GRALORA MISS ROAD",
    "it scales random projections that all modules share, and π moves each module differently": "PVERA"
    " RANDLORA UNILORA",
    "it stores coefficients of a transform over the order of the units, which π changes": "C3A FOURIERFT"
    " WAVEFT",
    "it is built from singular vectors of A's weights, and B has other ones": "ADAMSS FROD OSF PSOFT"
    " TINYLORA",
    "it changes single entries that A's weights or a seed selected": "SHIRA SUPERTUNING",
    "it mixes several adapters, and only single adapters are supported": "POLY XLORA",
    "it is a network beside the base, not a change of the base's weights": "SHADOW",
    "its change is a network applied to A's weights": "PEANUT",
    "modules share factors, and π moves each module differently": "LILY",
    "modules share a bank of vectors, and π moves each module differently": "VBLORA",
    "it stores keys and values of every block, which no weight has: train it again on B": "PREFIX_TUNING",
    "TransFusion does not know the layout of its tensors": "ADAPTION_PROMPT BEFT CARTRIDGE CPT DEFT DELORA"
    " GLORA HIRA HRA MULTITASK_PROMPT_TUNING",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
COMMON = (
    "auto_mapping base_model_name_or_path bias exclude_modules fan_in_fan_out inference_mode init_weights"
    " layers_pattern layers_to_transform modules_to_save peft_type peft_version r rank_pattern revision"
    " runtime_config target_modules task_type"
)
"""Settings of all kinds that do not affect the layout of the stored tensors: any value is accepted."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations of a LoRA that leave the base's weights unchanged."""


def movable_kind(label: str, config: Mapping[str, Any]) -> AdapterKind:
    """Return the kind that a configuration names; refuse a kind that cannot be moved, with the reason."""
    name = str(config.get("peft_type", "unknown")).upper()
    if (kind := KINDS.get(name)) is not None:
        return DORA if kind is LORA and config.get("use_dora") else kind
    if isinstance(config.get("config"), Mapping) and "peft_type" not in config:
        of_kind = str(config["config"].get("architecture") or "bottleneck")
        lora = of_kind == "lora"
        raise AdapterError(
            f"{label}: an adapter of the library `adapters` ({of_kind!r:.40}), whose layout is not known",
            hint="load it there, call merge_adapter and save the model: that moves as a fine-tune"
            if lora
            else "it is no change of the base's weights: train it again on B",
        )
    if name in REFUSED:
        raise AdapterError(f"{label}: adapters of kind {name} cannot be moved: {REFUSED[name]}", hint=MERGE)
    raise AdapterError(
        f"{label}: adapters of kind {name} are not known",
        hint=f"known kinds: {listing(KINDS, len(KINDS))}; or {MERGE}",
    )


def refuse_odd_settings(label: str, kind: AdapterKind, config: Mapping[str, Any]) -> None:
    """Refuse settings that may change the meaning of the stored tensors."""
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{label}: the adapter was initialised by {start!r}, which changes the base's weights when the"
            " adapter is loaded",
            hint="convert it to a plain LoRA (PEFT: path_initial_model_for_weight_conversion), or merge it",
        )
    known = f"{COMMON} {kind.settings}".split()
    odd = [
        f"{key}={reprlib.repr(value)}"
        for key, value in config.items()
        if key not in known and value not in (None, False, {}, [], "")
    ]
    if odd:
        raise AdapterError(
            f"{label}: a {kind.name} adapter with unknown settings: {listing(odd)}", hint=MERGE
        )
