"""Adapters in another vocabulary: the rows of their tokens, dropped or filled up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from transfusion.errors import AdapterError
from transfusion.files.selected_rows import CheckpointView, RowSelection
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY, VocabularyMap
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.adapter_kinds import WeightReference
from transfusion.transport.adapters.adapter_tensor import AdapterTensor


def adapter_in_vocabulary(adapter: Adapter, base: Model) -> Adapter:
    """Return the adapter in the vocabulary that its base is read in; the digest stays.

    Rows of tokens that the other vocabulary lacks are dropped, and new rows change nothing.
    """
    if (vocabulary := base.vocabulary) is None or base.original is None:
        return adapter
    selections = dict[str, RowSelection]()
    for factor in adapter.factors(base.original):
        if factor.part.reference is WeightReference.ROWS:
            selections[factor.key] = _kept_tokens(adapter, factor, vocabulary)
        for dim in factor.layout.dims_with(VOCABULARY):
            _require_rows_apart(adapter, factor)
            fill = 1.0 if factor.part.reference is WeightReference.ONE else 0.0
            size = adapter.checkpoint.tensors[factor.key].shape[dim]
            selections[factor.key] = vocabulary.selection(size, dim, fill)
    config = {key: _in_rows_of(vocabulary, key, value) for key, value in adapter.config.items()}
    checkpoint = CheckpointView.over(adapter.checkpoint, selections)
    return replace(adapter, checkpoint=checkpoint, config=config, original=adapter)


def _kept_tokens(adapter: Adapter, factor: AdapterTensor, vocabulary: VocabularyMap) -> RowSelection:
    """Return the trained tokens that the other vocabulary has; refuse an adapter without any."""
    tokens = adapter.settings(factor.module).tokens
    kept = [place for place, token in enumerate(tokens) if vocabulary.row_of(token) is not None]
    if not kept:
        raise AdapterError(
            f"{adapter.label}: {factor.key} has {len(tokens)} trained token(s), and B's vocabulary has none"
            " of them",
            hint="train these tokens anew on B",
        )
    return RowSelection(torch.tensor(kept))


def _require_rows_apart(adapter: Adapter, factor: AdapterTensor) -> None:
    """Refuse a factor whose value for one token depends on all tokens."""
    if factor.part.name.startswith(adapter.kind.over_all_units):
        raise AdapterError(
            f"{adapter.label}: {factor.key} of a {adapter.kind.name} adapter depends on all tokens together,"
            " and A and B have different ones",
            hint="merge the adapter into its base, and move the merged model",
        )


def _in_rows_of(vocabulary: VocabularyMap, key: str, value: Any) -> Any:
    """Return a setting with the ids of trained tokens in another vocabulary; other settings as they are."""
    if key not in ("token_indices", "trainable_token_indices") or not value:
        return value
    if isinstance(value, Mapping):
        return {name: _in_rows_of(vocabulary, key, tokens) for name, tokens in value.items()}
    return [row for token in value if (row := vocabulary.row_of(int(token))) is not None]
