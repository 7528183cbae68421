"""The kinds of adapters that move: what each stores, in terms of the weight that it changes.

The layout of a stored tensor is written with the outputs ``O`` and the inputs ``I`` of the weight ``O <- I``.
Dimensions that nobody moves are ``rank``, ``1`` (of one element) and ``_``; ``row`` is a row of the weight as
it is stored. A weight whose inputs are several dimensions (a convolution) has them in turn, or as one,
whichever fits. ``|`` stands between alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeAlias

from torch import Tensor

from transfusion.adapter import changes
from transfusion.adapter.changes import Parts
from transfusion.adapter.settings import Settings, words
from transfusion.layouts import ANONYMOUS, Item, Layout, Name, Product

_Words: TypeAlias = list[tuple[str, Item]]


class Reference(Enum):
    """What a base has in the place of a stored tensor. α scales the difference from it."""

    NONE = auto()
    """α does not belong here."""
    ZERO = auto()
    ONE = auto()
    NORMS = auto()
    """The length of each of the weight's rows."""
    ROWS = auto()
    """Some rows of the weight."""
    WHOLE = auto()
    """The weight itself."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a kind."""

    name: str
    """How its key ends, after the name of the module."""
    form: str
    """Its layout, in the words above."""
    reference: Reference = Reference.NONE
    rigid: bool = False
    """Whether it has a meaning in a basis of units only, so that nothing but permutations moves it."""
    of: str = "weight"
    """Which tensor of its module it changes."""

    def on(self, weight: Layout, shape: Sequence[int]) -> tuple[Layout, int | None] | None:
        """Its layout on a weight, and its rank if it has one; None if no alternative fits the shape."""
        for reading in self._readings(weight, len(shape)):
            units = all(size == 1 for (word, _), size in zip(reading, shape, strict=True) if word == "1")
            if units:
                ranks = [size for (word, _), size in zip(reading, shape, strict=True) if word == "rank"]
                return _layout(reading), next(iter(ranks), None)
        return None

    def _readings(self, weight: Layout, ndim: int) -> Iterator[_Words]:
        axes = {
            "O": weight.part(weight.outputs).items,
            "I": weight.part(weight.inputs).items,
            "row": weight.items[1:],
        }
        nobody = Name(ANONYMOUS)
        for form in self.form.split("|"):
            words = [(word, axes.get(word, (nobody,))) for word in form.split()]
            spread = [(word, item) for word, items in words for item in items]
            merged = [(word, items[0] if len(items) == 1 else Product(items)) for word, items in words]
            padded = [*spread, *[("1", nobody)] * (ndim - len(spread))]
            yield from (reading for reading in (spread, merged, padded) if len(reading) == ndim)


def _layout(reading: _Words) -> Layout:
    """A layout whose arrow comes from the inputs, if there are any."""
    items = tuple(item for _, item in reading)
    inputs = [place for place, (word, _) in enumerate(reading) if word == "I"]
    if not inputs or len(inputs) == len(items):
        return Layout(items)
    return Layout(items, "->", len(inputs)) if inputs[0] == 0 else Layout(items, "<-", inputs[0])


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: its parts, and what they do to a weight."""

    name: str
    parts: tuple[Part, ...] = ()
    together: tuple[frozenset[str], ...] = ()
    """Parts that belong together: of one of these sets a module has all, or it has nothing of any."""
    settings: frozenset[str] = frozenset()
    """Settings of its own that leave no doubt about where the numbers belong."""
    added: Callable[[Parts, Settings], Tensor] | None = None
    """What is added to the matrix of a weight."""
    changed: Callable[[Tensor, Parts, Settings], Tensor] | None = None
    """What the matrix of a weight becomes; where something is only added, this need not be said."""
    bias: Callable[[Tensor, Parts, Settings], Tensor] | None = None
    """What the bias beside the weight becomes."""
    rank: Callable[[Settings], int] | None = None
    """The rank that the configuration promises."""
    scalable: bool = True
    """Whether a part of the change can be had: α other than 1."""
    prompt: bool = False
    """Whether it changes what a model reads, and no weight: it cannot be merged."""

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)

    def on_weight(self, weight: Tensor, parts: Parts, settings: Settings) -> Tensor:
        """The matrix of a weight, changed."""
        if self.changed is not None:
            return self.changed(weight, parts, settings)
        return weight if self.added is None else weight + self.added(parts, settings)


WHOLE = Part("", "", Reference.WHOLE)
"""A tensor that was trained as a whole, under its own name."""

PROMPT = "prompt_embeddings"
"""The key of what prompts store, and the name that this has beside a model's tensors."""

_TOKENS = Part("trainable_tokens_delta", "_ row", Reference.ROWS)
_VIRTUAL = Part(PROMPT, "")
_LORA = words(
    """
    alpha_pattern ensure_weight_tying eva_config init_lora_weights lora_alpha lora_bias lora_dropout
    megatron_core qalora_group_size trainable_token_indices use_rslora
    """
)
_OF_PROMPTS = words("num_attention_heads num_layers num_transformer_submodules num_virtual_tokens token_dim")


def _rank(settings: Settings) -> int:
    return settings.rank


def _rank_of_adalora(settings: Settings) -> int:
    return settings.adalora_rank


def _pairs(*names: str) -> tuple[frozenset[str], ...]:
    return tuple(map(words, names))


LORA = Kind(
    "LORA",
    parts=(
        Part("lora_A", "rank I"),
        Part("lora_B", "O rank", Reference.ZERO),
        Part("lora_B.bias", "O", Reference.ZERO, of="bias"),
        Part("lora_embedding_A", "rank I"),
        Part("lora_embedding_B", "O rank", Reference.ZERO),
        _TOKENS,
    ),
    together=_pairs("lora_A lora_B", "lora_embedding_A lora_embedding_B"),
    settings=_LORA | {"use_dora"},
    added=changes.lora_added,
    bias=changes.lora_bias,
    rank=_rank,
)
_MAGNITUDE = Part("lora_magnitude_vector", "O | 1 O 1 | 1 O 1 1 | 1 O 1 1 1", Reference.NORMS, rigid=True)
DORA = replace(
    LORA,
    name="DORA",
    parts=(*LORA.parts, _MAGNITUDE),
    together=tuple(pair | {_MAGNITUDE.name} for pair in LORA.together),
    added=None,
    changed=changes.dora,
)
"""LoRA whose rows have trained lengths; in configurations it is LoRA with a setting."""

_ALL = (
    LORA,
    Kind(
        "ADALORA",
        parts=(
            Part("lora_A", "rank I"),
            Part("lora_B", "O rank", Reference.ZERO),
            Part("lora_E", "rank 1"),
            _TOKENS,
        ),
        together=_pairs("lora_A lora_B lora_E"),
        settings=_LORA | words("beta1 beta2 deltaT init_r orth_reg_weight target_r tfinal tinit total_step"),
        added=changes.adalora_added,
        rank=_rank_of_adalora,
    ),
    Kind(
        "LOHA",
        parts=(
            Part("hada_w1_a", "O rank", Reference.ZERO, rigid=True),
            Part("hada_w1_b", "rank I", rigid=True),
            Part("hada_w2_a", "O rank", rigid=True),
            Part("hada_w2_b", "rank I", rigid=True),
        ),
        together=_pairs("hada_w1_a hada_w1_b hada_w2_a hada_w2_b"),
        settings=words("alpha alpha_pattern module_dropout rank_dropout"),
        added=changes.loha_added,
        rank=_rank,
    ),
    Kind(
        "DELORA",
        parts=(
            Part("delora_A", "rank I", rigid=True),
            Part("delora_B", "O rank", rigid=True),
            Part("delora_lambda", "_", Reference.ZERO),
            Part("delora_w_norm", "I", rigid=True),
        ),
        together=_pairs("delora_A delora_B delora_lambda delora_w_norm"),
        settings=words("delora_lambda lambda_pattern module_dropout"),
        added=changes.delora_added,
        rank=_rank,
    ),
    Kind(
        "HIRA",
        parts=(
            Part("hira_A", "rank I", rigid=True),
            Part("hira_B", "O rank", Reference.ZERO, rigid=True),
            Part("hira_embedding_A", "rank I", rigid=True),
            Part("hira_embedding_B", "O rank", Reference.ZERO, rigid=True),
        ),
        together=_pairs("hira_A hira_B", "hira_embedding_A hira_embedding_B"),
        settings=words("hira_dropout"),
        changed=changes.hira,
        rank=_rank,
    ),
    Kind(
        "IA3",
        parts=(Part("ia3_l", "O 1 | 1 I", Reference.ONE, rigid=True),),
        settings=words("feedforward_modules init_ia3_weights"),
        changed=changes.ia3,
        bias=changes.ia3_bias,
    ),
    Kind(
        "HRA",
        parts=(Part("hra_u", "I rank", rigid=True),),
        settings=words("apply_GS"),
        changed=changes.hra,
        rank=_rank,
        scalable=False,
    ),
    Kind("BEFT", parts=(Part("beft_bias", "1 O", Reference.ZERO, of="bias"),), bias=changes.beft_bias),
    Kind("LN_TUNING"),
    Kind("TRAINABLE_TOKENS", parts=(_TOKENS,), settings=words("token_indices")),
    Kind(
        "PROMPT_TUNING",
        parts=(_VIRTUAL,),
        settings=_OF_PROMPTS
        | words("prompt_tuning_init prompt_tuning_init_text tokenizer_kwargs tokenizer_name_or_path"),
        scalable=False,
        prompt=True,
    ),
    Kind(
        "P_TUNING",
        parts=(_VIRTUAL,),
        settings=_OF_PROMPTS
        | words("encoder_dropout encoder_hidden_size encoder_num_layers encoder_reparameterization_type"),
        scalable=False,
        prompt=True,
    ),
    Kind(
        "PREFIX_TUNING",
        parts=(_VIRTUAL,),
        settings=_OF_PROMPTS | words("encoder_hidden_size prefix_projection"),
        scalable=False,
        prompt=True,
    ),
)
KINDS = {kind.name: kind for kind in _ALL}


def kind_of(config: Mapping[str, Any]) -> Kind | None:
    """The kind that a configuration names, if it is one that moves."""
    kind = KINDS.get(str(config.get("peft_type")).upper())
    return DORA if kind is LORA and config.get("use_dora") else kind
