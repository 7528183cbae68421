"""Task vectors: τ = A_ft − A, tensor by tensor, read on demand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from transfusion.architecture.layouts import Name
from transfusion.errors import MismatchError, listing
from transfusion.files.tensor_files import Rows, row_blocks
from transfusion.files.tokenizer_files import tokens_in
from transfusion.model.model import Model
from transfusion.model.pair import require_rows_of
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.runtime.engines import Threads

RELATED = 0.5
"""A model whose weights have a smaller cosine with the base's is not a fine-tune of that base."""


class NewTokens(StrEnum):
    """What to do with tokens that the fine-tune added to the vocabulary."""

    REFUSE = "refuse"
    KEEP = "keep"
    """Append their rows to B's, with the other axes moved. The tokenizer is the fine-tune's."""
    DROP = "drop"
    """Keep B's vocabulary and tokenizer."""


@dataclass(frozen=True)
class TaskVector:
    """τ = A_ft − A, for the tensors and the rows of the vocabulary that both have."""

    finetuned: Model
    base: Model
    new_tokens: NewTokens = NewTokens.REFUSE

    @classmethod
    def between(
        cls,
        finetuned: Model,
        base: Model,
        *,
        trust_base: bool = False,
        new_tokens: NewTokens = NewTokens.REFUSE,
    ) -> TaskVector:
        """Return the task vector; refuse a fine-tune of another base unless ``trust_base``."""
        vector = cls(finetuned.with_ties_of(base), base, new_tokens)
        vector._require_one_architecture()
        if not trust_base:
            vector._require_descent()
        return vector

    def covers(self, name: str) -> bool:
        """Whether base and fine-tune both have this tensor, in the same shape apart from new tokens."""
        return (
            name in self.base.architecture.tensors
            and name in self.finetuned.architecture.tensors
            and (self.base.info(name).shape == self.finetuned.info(name).shape or self.added(name) > 0)
        )

    def added(self, name: str) -> int:
        """Return the number of rows that the fine-tune added to a tensor for new tokens."""
        now, was = self.finetuned.info(name).shape, self.base.info(name).shape
        first = self.finetuned.architecture.tensors[name].items[:1]
        tokens = {Name(id) for id in self.base.architecture.token_axes}
        return max(0, now[0] - was[0]) if tokens.intersection(first) and now[1:] == was[1:] else 0

    @property
    def token_counts(self) -> set[tuple[int, int]]:
        """The numbers of tokens of the fine-tune and of its base, where they differ."""
        now, was = self.finetuned.architecture.sizes, self.base.architecture.sizes
        both = ((now.get(id, 0), was[id]) for id in self.base.architecture.token_axes)
        return {pair for pair in both if pair[0] != pair[1]}

    def difference(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return τ of one tensor, or of some rows, in a dtype wider than the stored one; NaN and infinite
        values pass.
        """
        if rows is None and self.added(name):
            rows = slice(0, self.base.info(name).shape[0])
        tuned, base = self.finetuned.raw(name, rows), self.base.raw(name, rows)
        return wide(tuned) - wide(base) if tuned.dtype != base.dtype else added(tuned, base, -1)

    def _require_one_architecture(self) -> None:
        tuned, base = self.finetuned, self.base
        if tuned.family.name != base.family.name:
            raise MismatchError(
                f"{tuned.label} is a {tuned.family.name} and its base {base.label} a {base.family.name}",
                hint="give the base that was fine-tuned as `base`",
            )
        for name in tuned.architecture.backbone:
            if name not in base.architecture.tensors:
                raise MismatchError(
                    f"{tuned.label} has {name}, which its base {base.label} does not have",
                    hint="give the base that was fine-tuned as `base`",
                )
            if (now := tuned.info(name).shape) != (was := base.info(name).shape):
                self._require_choice(name, now, was)
        self._require_one_structure()
        require_rows_of(base, tuned.label, (tuned.original or tuned).tokenizer_folder)

    def _require_one_structure(self) -> None:
        """Refuse a configuration that divides the blocks otherwise than the base's, as into more heads."""
        ours, theirs = _blocks(self.finetuned), _blocks(self.base)
        differing = [
            f"{key} ({value} and {theirs[key]})"
            for key, value in ours.items()
            if key in theirs and value != theirs[key]
        ]
        if differing:
            raise MismatchError(
                f"{self.finetuned.label} and its base {self.base.label} have the same tensors and other"
                f" settings: {listing(differing)}",
                hint="give the base that was fine-tuned as `base`, or the config.json of the fine-tune",
            )

    def _require_choice(self, name: str, now: tuple[int, ...], was: tuple[int, ...]) -> None:
        """Refuse another shape, except that of new tokens which the user keeps or drops."""
        label, added = self.finetuned.label, self.added(name)
        if added and self.new_tokens is not NewTokens.REFUSE:
            return
        if added:
            raise MismatchError(
                f"{label} has {added} token(s) more than its base {self.base.label}: {name} has shape"
                f" {now}, and {was} in the base",
                hint='`new_tokens="keep"` appends their rows to those of B, `new_tokens="drop"` drops them',
            )
        shorter = self.base.architecture.token_axes & {*self.finetuned.architecture.tensors[name].names()}
        raise MismatchError(
            f"{name} has shape {now} in {label} and {was} in its base {self.base.label}",
            hint="the fine-tune cut or rearranged its vocabulary: its token ids mean other tokens"
            if shorter
            else "give the base that was fine-tuned as `base`",
        )

    def _require_descent(self) -> None:
        """Refuse a model that is not close to the base, judged by parts of about eight matrices."""
        matrices = [
            name
            for name, layout in self.base.architecture.backbone.items()
            if len(layout.items) > 1 and self.covers(name)
        ]
        sample = matrices[:: max(1, len(matrices) // 8)]
        with Threads.opened(1):  # for such small pieces, threads of torch mostly wait for each other
            cosines = {name: self._cosine(name) for name in sample}
        far = [f"{name} ({cosine:.2f})" for name, cosine in cosines.items() if cosine < RELATED]
        if len(far) > len(sample) / 2:
            raise MismatchError(
                f"{self.finetuned.label} does not look like a fine-tune of {self.base.label}: the cosine"
                f" of their weights is below {RELATED} in {listing(far, 3)}",
                hint="are `base` and `onto` swapped? Give the base that was fine-tuned as `base`, or"
                " `trust_base=True` if you are sure",
            )

    def _cosine(self, name: str) -> float:
        rows = next(row_blocks(self.base.info(name).shape))
        one, other = (working(model.read(name, rows)).flatten() for model in (self.finetuned, self.base))
        return float(torch.cosine_similarity(one, other, dim=0))


def added_tokens(tuned: Model, base: Model) -> dict[int, str]:
    """Return the tokens that a fine-tune has in rows in which its base has none, as far as both are known."""
    tables = []
    for model in (tuned.original or tuned, base.original or base):
        table, _ = tokens_in(model.tokenizer_folder)
        if table is None:
            return {}
        tables.append(table.resized(model.architecture.sizes[VOCABULARY]).tokens)
    ours, known = tables
    return {
        row: token
        for row, token in enumerate(ours)
        if token is not None and (row >= len(known) or known[row] is None)
    }


def _blocks(model: Model) -> dict[str, object]:
    """Return what the configuration says about the blocks of every stack: their number, sizes, and axes."""
    table = model.family.table(model.config, frozenset(model.architecture.backbone))
    found: dict[str, object] = {}
    for stack in table.stacks:
        found |= {f"{stack.name}.{axis}": size for axis, size in stack.sizes.items()}
        free = {axis.name: str(axis.group) for axis in stack.axes}
        kinds = {kind: sorted(numbers) for kind, numbers in stack.kinds.items()}
        for key, value in (("depth", stack.depth), ("axes", free), ("kinds", kinds)):
            found[f"{stack.name}.{key}"] = value
    return found


def added(values: Tensor, change: Tensor, sign: int = 1) -> Tensor:
    """Return the values, in a wider dtype, plus or minus a change; the values themselves stay."""
    ours = wide(values)
    if ours is values or torch.result_type(ours, change) is not ours.dtype:
        return ours + sign * change
    return ours.add_(change, alpha=sign)


def working(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if that is its dtype."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in a wider dtype. A sum of differences is then rounded only when it is stored, and
    B + π(τ) equals π(A_ft) bit for bit if B equals π(A).
    """
    return tensor.double() if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
