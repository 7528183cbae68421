"""The kinds of adapters that can be moved: their formulas, and the layouts of their tensors.

The formulas act on weight matrices (outputs, inputs), however a library stores them. A convolution has all
its inputs in one row.

A layout is written with the outputs ``O`` and the inputs ``I`` of the weight ``O <- I`` that the adapter
changes. π does not move the dimensions ``rank``, ``1`` (of one element) and ``_``. ``row`` is a row of the
weight as it is stored. If the inputs of a weight are several dimensions (a convolution), ``I`` stands for
them one by one or flattened, whichever fits the shape. ``|`` separates alternatives. ``weight`` and ``bias``
are the layouts of the module's own tensors, for differences that are stored as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from transfusion.architecture.layouts import ANONYMOUS, Item, Layout, Name, Product
from transfusion.transport.adapters.settings import ModuleSettings, words

Parts: TypeAlias = Mapping[str, Tensor]
"""The stored tensors of one module, by the names of their parts."""
Factors: TypeAlias = tuple[Tensor, Tensor]
"""A change of low rank as a product: (outputs, rank) and (rank, inputs)."""


def row_norms(matrix: Tensor) -> Tensor:
    """Return the norm of every row, summed in float64."""
    lengths: Tensor = torch.linalg.vector_norm(matrix.double(), dim=1)
    return lengths.to(matrix.dtype)


def _product(parts: Parts, left: str, right: str) -> Tensor:
    return parts[left].flatten(1) @ parts[right].flatten(1)


def _factors(parts: Parts, prefix: str) -> tuple[str, str]:
    """Return the names of the two factors; those of embeddings differ."""
    middle = "_embedding" if f"{prefix}_embedding_A" in parts else ""
    return f"{prefix}{middle}_B", f"{prefix}{middle}_A"


# ── sums: LoRA and relatives ─────────────────────────────────────────────────────────────────


def lora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return settings.lora_scale * _product(parts, *_factors(parts, "lora"))


def lora_factors(parts: Parts, settings: ModuleSettings) -> Factors:
    left, right = _factors(parts, "lora")
    return settings.lora_scale * parts[left].flatten(1), parts[right].flatten(1)


def dora(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return weight + BA with every row rescaled to its trained norm."""
    together = weight + lora_added(parts, settings)
    lengths = parts["lora_magnitude_vector"].flatten() / row_norms(together)
    return together * lengths[:, None]


def lora_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias + settings.lora_scale * parts["lora_B.bias"].flatten()


def adalora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return settings.adalora_scale * (parts["lora_B"] @ (parts["lora_A"] * parts["lora_E"]))


def adalora_factors(parts: Parts, settings: ModuleSettings) -> Factors:
    return settings.adalora_scale * parts["lora_B"], parts["lora_A"] * parts["lora_E"]


def loha_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    return (
        settings.loha_scale
        * _product(parts, "hada_w1_a", "hada_w1_b")
        * _product(parts, "hada_w2_a", "hada_w2_b")
    )


def delora_added(parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return BA with every rank-one term normalised to λ/r, and columns scaled by the base's column norms."""
    left, right = parts["delora_B"], parts["delora_A"]
    lengths = row_norms(right).clamp(min=1e-4) * row_norms(left.T).clamp(min=1e-4)
    strengths = parts["delora_lambda"] / settings.rank / lengths
    return (left * strengths) @ right * parts["delora_w_norm"]


# ── products ─────────────────────────────────────────────────────────────────────────────────


def hira(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return weight * (1 + _product(parts, *_factors(parts, "hira")))


def ia3(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return weight * parts["ia3_l"]


def ia3_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias * parts["ia3_l"].flatten()


def hra(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Apply Householder reflections to the inputs; with ``apply_GS``, of orthonormalised directions."""
    directions = parts["hra_u"]
    if settings.value("apply_GS", False):
        basis: Tensor = torch.linalg.qr(directions).Q
        return weight - 2 * (weight @ basis) @ basis.T
    for direction in (directions / row_norms(directions.T)).T:
        weight = weight - 2 * torch.outer(weight @ direction, direction)
    return weight


def beft_bias(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    return bias + parts["beft_bias"].flatten()


# ── LoRA files, whose modules may have different parts ───────────────────────────────────────


def added_by_file(parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return the change of a weight; 0 if only the bias is changed."""
    change = parts["diff"].flatten(1) if "diff" in parts and parts["diff"].ndim > 1 else parts.get("diff")
    change = torch.zeros(()) if change is None else change
    if "lora_B" in parts:
        change = change + lora_added(parts, settings)
    return change + loha_added(parts, settings) if "hada_w1_a" in parts else change


def factors_by_file(parts: Parts, settings: ModuleSettings) -> Factors | None:
    alone = "lora_B" in parts and not parts.keys() & {"diff", "hada_w1_a"}
    return lora_factors(parts, settings) if alone else None


def changed_by_file(weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    """Return weight + change; where row norms were trained, with every row rescaled to its norm."""
    if "lora_magnitude_vector" in parts:
        return dora(weight, parts, settings)
    return weight + added_by_file(parts, settings)


def bias_by_file(bias: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
    if "lora_B.bias" in parts:
        bias = lora_bias(bias, parts, settings)
    return bias + parts["diff_b"].flatten() if "diff_b" in parts else bias


# ── kinds ───────────────────────────────────────────────────────────────────────────────────────


_Words: TypeAlias = list[tuple[str, Item]]


class WeightReference(Enum):
    """The base's own value that a stored tensor is compared with. α scales the difference."""

    NONE = auto()
    """α does not scale this tensor."""
    ZERO = auto()
    ONE = auto()
    NORMS = auto()
    """The norms of the weight's rows."""
    ROWS = auto()
    """Some rows of the weight."""
    WHOLE = auto()
    """The weight itself."""


@dataclass(frozen=True)
class AdapterPart:
    """One stored tensor of a kind."""

    name: str
    """The end of its key, after the name of the module."""
    form: str
    """Its layout, as described above."""
    reference: WeightReference = WeightReference.NONE
    rigid: bool = False
    """Whether its values belong to single units, so that only permutations can move it."""
    of: str = "weight"
    """The tensor of the module that it changes."""

    def on(self, weight: Layout, shape: Sequence[int]) -> tuple[Layout, int | None] | None:
        """Return the layout on a weight, and the rank if any; None if no alternative fits the shape."""
        if (whole := self._whole(weight)) is not None:
            return (whole, None) if len(whole.items) == len(shape) else None
        for reading in self._readings(weight, len(shape)):
            units = all(size == 1 for (word, _), size in zip(reading, shape, strict=True) if word == "1")
            if units:
                ranks = [size for (word, _), size in zip(reading, shape, strict=True) if word == "rank"]
                return _layout(reading), next(iter(ranks), None)
        return None

    def _whole(self, weight: Layout) -> Layout | None:
        """Return the layout of a tensor of the module itself; None for a factor."""
        if self.form == "bias":
            return weight if weight.arrow is None else weight.part(weight.outputs)
        return weight if self.form == "weight" else None

    def _readings(self, weight: Layout, ndim: int) -> Iterator[_Words]:
        axes = {
            "O": weight.part(weight.outputs).items,
            "I": weight.part(weight.inputs).items,
            "row": weight.items[1:],
        }
        unmoved = Name(ANONYMOUS)
        for form in self.form.split("|"):
            words = [(word, axes.get(word, (unmoved,))) for word in form.split()]
            spread = [(word, item) for word, items in words for item in items]
            merged = [(word, items[0] if len(items) == 1 else Product(items)) for word, items in words]
            padded = [*spread, *[("1", unmoved)] * (ndim - len(spread))]
            yield from (reading for reading in (spread, merged, padded) if len(reading) == ndim)


def _layout(reading: _Words) -> Layout:
    """Return the layout, with an arrow from the inputs if there are any."""
    items = tuple(item for _, item in reading)
    inputs = [place for place, (word, _) in enumerate(reading) if word == "I"]
    if not inputs or len(inputs) == len(items):
        return Layout(items)
    return Layout(items, "->", len(inputs)) if inputs[0] == 0 else Layout(items, "<-", inputs[0])


@dataclass(frozen=True)
class AdapterKind:
    """A kind of adapter: its parts, and its formula on a weight."""

    name: str
    parts: tuple[AdapterPart, ...] = ()
    together: tuple[frozenset[str], ...] = ()
    """Sets of parts that belong together: a module has all parts of one set."""
    settings: frozenset[str] = frozenset()
    """Settings of this kind that do not change the layout of its tensors."""
    added: Callable[[Parts, ModuleSettings], Tensor] | None = None
    """Additive kinds: the change of a weight matrix."""
    factors: Callable[[Parts, ModuleSettings], Factors | None] | None = None
    """The same change as a product of low rank, where it is one."""
    changed: Callable[[Tensor, Parts, ModuleSettings], Tensor] | None = None
    """Other kinds: the new weight matrix."""
    bias: Callable[[Tensor, Parts, ModuleSettings], Tensor] | None = None
    """The new bias of the module."""
    rank: Callable[[ModuleSettings], int] | None = None
    """The rank that the configuration gives."""
    scalable: bool = True
    """Whether α other than 1 is possible."""
    over_all_units: tuple[str, ...] = ()
    """The beginnings of the names of parts whose values for one unit depend on all units of the axis."""
    prompt: bool = False
    """Whether it changes the inputs of the model and no weight, so that it cannot be merged."""

    def part(self, name: str) -> AdapterPart | None:
        return next((part for part in self.parts if part.name == name), None)

    def on_weight(self, weight: Tensor, parts: Parts, settings: ModuleSettings) -> Tensor:
        """Return the new weight matrix."""
        if self.changed is not None:
            return self.changed(weight, parts, settings)
        return weight if self.added is None else weight + self.added(parts, settings)


WHOLE = AdapterPart("", "", WeightReference.WHOLE)
"""A tensor that was trained as a whole, under its own name."""

PROMPT = "prompt_embeddings"
"""The key of a prompt's tensor, also its name among a model's tensors."""

TOKENS = AdapterPart("trainable_tokens_delta", "_ row", WeightReference.ROWS)
"""The trained rows of an embedding."""
_VIRTUAL = AdapterPart(PROMPT, "")
_LORA = words(
    """
    alpha_pattern ensure_weight_tying eva_config init_lora_weights lora_alpha lora_bias lora_dropout
    megatron_core qalora_group_size trainable_token_indices use_rslora
    """
)
_PROMPTS = words("num_attention_heads num_layers num_transformer_submodules num_virtual_tokens token_dim")
_rank: Callable[[ModuleSettings], int] = attrgetter("rank")


def _low_rank(a: str, b: str, *, rigid: bool = False) -> tuple[AdapterPart, AdapterPart]:
    """Return the two factors of a low-rank product; α scales the second."""
    return (
        AdapterPart(a, "rank I", rigid=rigid),
        AdapterPart(b, "O rank", WeightReference.ZERO, rigid=rigid),
    )


def _sets(*names: str) -> tuple[frozenset[str], ...]:
    return tuple(map(words, names))


LORA = AdapterKind(
    "LORA",
    parts=(
        *_low_rank("lora_A", "lora_B"),
        AdapterPart("lora_B.bias", "O", WeightReference.ZERO, of="bias"),
        *_low_rank("lora_embedding_A", "lora_embedding_B"),
        TOKENS,
    ),
    together=_sets("lora_A lora_B", "lora_embedding_A lora_embedding_B"),
    settings=_LORA | {"use_dora"},
    added=lora_added,
    factors=lora_factors,
    bias=lora_bias,
    rank=_rank,
)
_MAGNITUDE = AdapterPart(
    "lora_magnitude_vector", "O | 1 O 1 | 1 O 1 1 | 1 O 1 1 1", WeightReference.NORMS, rigid=True
)
DORA = replace(
    LORA,
    name="DORA",
    parts=(*LORA.parts, _MAGNITUDE),
    together=tuple(pair | {_MAGNITUDE.name} for pair in LORA.together),
    added=None,
    factors=None,
    changed=dora,
    over_all_units=("lora_embedding",),
)
"""LoRA with trained row norms. Its configuration is that of LoRA with ``use_dora``."""

_ALL = (
    LORA,
    AdapterKind(
        "ADALORA",
        parts=(*_low_rank("lora_A", "lora_B"), AdapterPart("lora_E", "rank 1"), TOKENS),
        together=_sets("lora_A lora_B lora_E"),
        settings=_LORA | words("beta1 beta2 deltaT init_r orth_reg_weight target_r tfinal tinit total_step"),
        added=adalora_added,
        factors=adalora_factors,
        rank=attrgetter("adalora_rank"),
    ),
    AdapterKind(
        "LOHA",
        parts=(
            AdapterPart("hada_w1_a", "O rank", WeightReference.ZERO, rigid=True),
            AdapterPart("hada_w1_b", "rank I", rigid=True),
            AdapterPart("hada_w2_a", "O rank", rigid=True),
            AdapterPart("hada_w2_b", "rank I", rigid=True),
        ),
        together=_sets("hada_w1_a hada_w1_b hada_w2_a hada_w2_b"),
        settings=words("alpha alpha_pattern module_dropout rank_dropout"),
        added=loha_added,
        rank=_rank,
    ),
    # Read as a LoRA: see `kronecker`.
    AdapterKind(
        "LOKR",
        settings=words(
            """
            alpha alpha_pattern decompose_both decompose_factor module_dropout rank_dropout
            rank_dropout_scale
            """
        ),
    ),
    AdapterKind(
        "DELORA",
        over_all_units=("delora",),
        parts=(
            AdapterPart("delora_A", "rank I", rigid=True),
            AdapterPart("delora_B", "O rank", rigid=True),
            AdapterPart("delora_lambda", "_", WeightReference.ZERO),
            AdapterPart("delora_w_norm", "I", rigid=True),
        ),
        together=_sets("delora_A delora_B delora_lambda delora_w_norm"),
        settings=words("delora_lambda lambda_pattern module_dropout"),
        added=delora_added,
        rank=_rank,
    ),
    AdapterKind(
        "HIRA",
        parts=(
            *_low_rank("hira_A", "hira_B", rigid=True),
            *_low_rank("hira_embedding_A", "hira_embedding_B", rigid=True),
        ),
        together=_sets("hira_A hira_B", "hira_embedding_A hira_embedding_B"),
        settings=words("hira_dropout"),
        changed=hira,
        rank=_rank,
    ),
    AdapterKind(
        "IA3",
        parts=(AdapterPart("ia3_l", "O 1 | 1 I", WeightReference.ONE, rigid=True),),
        settings=words("feedforward_modules init_ia3_weights"),
        changed=ia3,
        bias=ia3_bias,
    ),
    AdapterKind(
        "HRA",
        over_all_units=("hra",),
        parts=(AdapterPart("hra_u", "I rank", rigid=True),),
        settings=words("apply_GS"),
        changed=hra,
        rank=_rank,
        scalable=False,
    ),
    AdapterKind(
        "BEFT",
        parts=(AdapterPart("beft_bias", "1 O", WeightReference.ZERO, of="bias"),),
        bias=beft_bias,
    ),
    AdapterKind("LN_TUNING"),
    AdapterKind("TRAINABLE_TOKENS", parts=(TOKENS,), settings=words("token_indices")),
    *(
        AdapterKind(name, parts=(_VIRTUAL,), settings=_PROMPTS | words(settings), scalable=False, prompt=True)
        for name, settings in {
            "PROMPT_TUNING": "prompt_tuning_init prompt_tuning_init_text tokenizer_kwargs"
            " tokenizer_name_or_path",
            "P_TUNING": "encoder_dropout encoder_hidden_size encoder_num_layers"
            " encoder_reparameterization_type",
            "PREFIX_TUNING": "encoder_hidden_size prefix_projection",
        }.items()
    ),
)
KINDS = {kind.name: kind for kind in _ALL}

_LOHA = KINDS["LOHA"]
_ALPHA = AdapterPart("alpha", "")
_DIFFERENCES = (
    AdapterPart("diff", "weight", WeightReference.ZERO),
    AdapterPart("diff_b", "bias", WeightReference.ZERO, of="bias"),
)
_IN_FILES = replace(
    LORA,
    parts=(*LORA.parts[:3], *_LOHA.parts, _ALPHA, *_DIFFERENCES),
    together=(*LORA.together[:1], *_LOHA.together),
    added=added_by_file,
    factors=factors_by_file,
    bias=bias_by_file,
    rank=None,
)
"""What a LoRA file for image and video models may hold. The scale of a module is its alpha / rank."""


def kind_in_file(parts: Set[str]) -> AdapterKind:
    """Return the kind of a LoRA file that holds these parts."""
    if _MAGNITUDE.name in parts:
        magnitude = replace(_MAGNITUDE, form=f"{_MAGNITUDE.form} | O 1")
        return replace(
            _IN_FILES,
            name="DORA",
            parts=(*_IN_FILES.parts, magnitude),
            added=None,
            factors=None,
            changed=changed_by_file,
        )
    return replace(_IN_FILES, name="LOHA") if _LOHA.parts[0].name in parts else _IN_FILES


def kind_of(config: Mapping[str, Any]) -> AdapterKind | None:
    """Return the kind that a configuration names, or None if it cannot be moved."""
    kind = KINDS.get(str(config.get("peft_type")).upper())
    return DORA if kind is LORA and config.get("use_dora") else kind
