"""Models: a checkpoint of which every tensor has been understood."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import exists, expanduser
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3
from torch import Tensor

from transfusion.architecture.architecture import Architecture, Policy
from transfusion.architecture.binding import bind
from transfusion.architecture.naming import Naming
from transfusion.architecture.table import WRONG_FILE, Config, Family, Table
from transfusion.errors import ArchitectureError, CheckpointError, MismatchError, listing
from transfusion.files.checkpoint import Checkpoint, CheckpointView, HeadersOnly
from transfusion.files.quantised import DequantisedCheckpoint, dequantised
from transfusion.files.tensor_files import FLOATS, Rows, TensorInfo
from transfusion.model.in_memory import InMemory, hold_in_memory
from transfusion.model.recognition import recognise, unread_by_library
from transfusion.model.tensor_pieces import TensorPieces, gather_pieces, in_library_names
from transfusion.model.vocabulary_map import VOCABULARY, VocabularyMap

Reference: TypeAlias = str | Path | InMemory
"""A reference to a model: a path, a hub id, or the model itself in memory."""


_TOKEN_ID = re.compile(r".*_token_ids?")
_BARE = re.compile(r".*(?<!LMHead)(?<!MT)Model")
"""Names of classes without a task head."""
_TEXT, _TIED = "text_config", "tie_word_embeddings"


@dataclass(frozen=True)
class Model:
    """A checkpoint, the family it belongs to, and its architecture; tensors by canonical name.

    >>> model = transfusion.Model.open("models/a")
    >>> model.family.name, model.why
    ('vit', 'config.json says model_type "vit"')
    >>> name = "encoder.layer.0.intermediate.dense.weight"
    >>> print(model.info(name).shape, model.architecture.tensors[name])
    (20, 24) layer.0.ffn <- layer.0.y
    """

    checkpoint: Checkpoint
    family: Family
    config: Config
    architecture: Architecture
    names: Mapping[str, TensorPieces]
    """Canonical name → the name in the checkpoint, or the names of its pieces."""
    why: str
    """How the family was recognised."""
    vocabulary: VocabularyMap | None = field(default=None, repr=False, compare=False)
    """Where the rows of the vocabulary come from, if the model is read in another one than its own."""
    original: Model | None = field(default=None, repr=False, compare=False)
    """The model as it is stored, if this one has another vocabulary or other tied tensors."""
    ties: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Task heads that the configuration ties → the tensors that they share, such as the embedding."""

    @classmethod
    def open(cls, reference: Reference, *, config: str | Path | Mapping[str, Any] | None = None) -> Model:
        """Read the headers of a model, recognise its family and give every tensor its layout.

        ``reference`` is a folder, a file or a hub id; or a model in memory: a module of transformers,
        diffusers, open_clip or timm, or a state dict. Tensors in memory are shared, not copied. ``config`` is
        a JSON file, or its content, for weights that have no configuration.

        >>> module = transformers.ViTForImageClassification.from_pretrained("models/a")
        >>> transfusion.Model.open(module).label
        'ViTForImageClassification in memory'
        >>> transfusion.Model.open(module.state_dict(), config="models/a/config.json").family.name
        'vit'
        """
        if isinstance(reference, str | Path):
            return cls.of(Checkpoint.open(reference, config=config))
        return cls.of(hold_in_memory(reference, config))

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        """Recognise the family of a checkpoint and give every tensor its layout."""
        checkpoint = in_library_names(dequantised(checkpoint))
        stored = checkpoint.tensors.values()
        _refuse_quantised(checkpoint.label, [one for one in stored if one.name.endswith(".weight")])
        family, config, why = recognise(checkpoint)
        naming = Naming(family, live=True)
        names = gather_pieces(naming.table(checkpoint.tensors), checkpoint.tensors, checkpoint.label)
        table = _table(checkpoint, family, config, frozenset(names))
        _drop_second_names(checkpoint, names, table.ties)
        ties = {head: first for head, first in table.ties.items() if first in names and table.has_head(head)}
        bound = _bound(checkpoint, family, table, names)
        model = cls(checkpoint, family, config, bound, names, why, ties=ties)
        _refuse_quantised(checkpoint.label, map(model.info, bound.tensors))
        return model

    @property
    def label(self) -> str:
        return self.checkpoint.label

    def info(self, name: str) -> TensorInfo:
        """Return the shape, type and file of a tensor from the headers; its pieces are counted as one."""
        return self.names[name].info(self.checkpoint.tensors)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read one tensor by canonical name, or some of its rows; refuse NaN and infinite values."""
        return self.names[name].join(self.checkpoint.read_finite, rows)

    def raw(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read without the check for NaN, for callers that check their results."""
        return self.names[name].join(self.checkpoint.read, rows)

    def under(self, policy: Policy) -> Model:
        """Return the same model with the axes of a policy."""
        return replace(self, architecture=self.architecture.under(policy))

    @property
    def is_quantised(self) -> bool:
        """Whether its files hold fewer bits than the numbers that it computes with."""
        return isinstance((self.original or self).checkpoint, DequantisedCheckpoint)

    @property
    def unread_settings(self) -> list[str]:
        """Settings in its configuration that its library does not read, such as those of a trainer."""
        return unread_by_library(self.checkpoint, self.family)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the model's tokenizer, if there is one."""
        root = self.checkpoint.root
        if self.checkpoint.in_memory or root.is_dir():
            return self.checkpoint.auxiliary_folder if self.checkpoint.in_memory else root
        return root.parent if self.checkpoint.config_name else None

    def in_vocabulary(self, vocabulary: VocabularyMap, config: Config | None = None) -> Model:
        """Return the same model with the rows of another vocabulary; its fingerprint stays.

        ``config`` is the configuration of a model with that vocabulary, for the ids of special tokens.
        Rows that this model has beyond those of the map follow at the end. A model without tokens, such as
        a classifier of sounds on the encoder of Whisper, is returned as it is.
        """
        size = self.architecture.sizes.get(VOCABULARY)
        if size is None:
            return self
        if size < vocabulary.source_size:
            raise MismatchError(
                f"{self.label} has {size} rows for tokens, and its base {vocabulary.source_size}",
                hint="the fine-tune cut or rearranged its vocabulary: its token ids mean other tokens",
            )
        layouts = self.architecture.tensors.items()
        dims = {name: dim for name, layout in layouts for dim in layout.dims_with(VOCABULARY)}
        rows = {piece: dim for name, dim in dims.items() for piece in self.names[name].names}
        selections = {piece: vocabulary.selection(size, dim) for piece, dim in rows.items()}
        total = vocabulary.size + size - vocabulary.source_size
        stored = self.checkpoint.config
        sizes = size, vocabulary.size, total
        used = {piece for one in self.names.values() for piece in one.names}  # tied tensors once
        return replace(
            self,
            checkpoint=CheckpointView.over(
                self.checkpoint,
                selections,
                [name for name in self.checkpoint.tensors if name in used],
                config=stored and dict(_with_tokens_of(stored, config or {}, sizes)),
            ),
            config=_with_tokens_of(self.config, config or {}, sizes),
            architecture=self.architecture.resized(VOCABULARY, total),
            vocabulary=vocabulary,
            original=self,
        )

    @property
    def is_tied(self) -> bool:
        """Whether its output head is its embedding, and no tensor of its own."""
        return any(head not in self.names for head in self.ties)

    @property
    def writes_tokens(self) -> bool:
        """Whether its class has a head with one unit per token, be it tied or not."""
        heads = [self.architecture.tensors[name] for name in self.architecture.task_heads]
        if heads or not self.ties:
            return any(VOCABULARY in layout.names() for layout in heads)
        return not _BARE.fullmatch((self.config.get("architectures") or [""])[0])

    def untied(self) -> Model:
        """Return the model with its tied heads as tensors of their own."""
        if not self.is_tied:
            return self
        heads = {head: self.names[first] for head, first in self.ties.items()}
        return self._bound_by(self.config, {**self.names, **heads})

    def with_ties_of(self, base: Model) -> Model:
        """Return a fine-tune with its base's axes: tied embeddings make both ends of the stream one space."""
        own = self.untied() if self.writes_tokens and not base.is_tied else self
        if bool(own.ties) is bool(base.ties):
            return own
        return replace(own, ties=base.ties)._bound_by(_with_ties_of(self.config, base.config), own.names)

    def _bound_by(self, config: Config, names: Mapping[str, TensorPieces]) -> Model:
        """Return the model with the layouts that its family's table has for another configuration."""
        table = _table(self.checkpoint, self.family, config, frozenset(names) - self.ties.keys())
        bound = _bound(self.checkpoint, self.family, table, names).under(self.architecture.policy)
        return replace(self, architecture=bound, names=names, original=self.original or self)

    @property
    def to_run(self) -> Model:
        """The model as it runs beside one of another shape: in its own vocabulary if B's is quite another."""
        other = self.vocabulary is not None and not self.vocabulary.nearly_same
        return self.original if other and self.original is not None else self

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the name, type, shape and a fixed sample of every tensor.

        It is the same for one file, shards and a model in memory, and the names of authors and libraries.
        """
        if self.original is not None:
            return self.original.fingerprint
        if isinstance(self.checkpoint, HeadersOnly):
            return self.checkpoint.fingerprint
        total = blake3()
        for name in sorted(self.architecture.tensors):
            info = self.info(name)
            total.update(f"{name} {info.dtype} {info.shape} ".encode())
            total.update(self.checkpoint.sample(self.names[name].names))
        return total.hexdigest()


def _refuse_quantised(label: str, tensors: Iterable[TensorInfo]) -> None:
    """Refuse weights of other types; scales that lie beside them would be called unknown tensors."""
    odd = [
        f"{info.name} ({str(info.dtype).removeprefix('torch.')})"
        for info in tensors
        if info.dtype not in FLOATS
    ]
    if odd:
        raise CheckpointError(
            f"{label}: weights in types that cannot be moved: {listing(odd)}",
            hint="quantised checkpoints cannot be moved; use the original weights",
        )


def _with_tokens_of(config: Config, other: Config, sizes: tuple[int, int, int]) -> Config:
    """Return a configuration with another size of the vocabulary, and the special tokens of another one.

    ``sizes`` are its own, that of the other one, and the wanted one. A table of one's own may read the size
    from any key: from one that has the first two in these configurations.
    """
    own, theirs, size = sizes
    found: dict[str, Any] = {key: value for key, value in config.items() if not _TOKEN_ID.fullmatch(key)}
    found |= {key: value for key, value in other.items() if _TOKEN_ID.fullmatch(key)}
    read = [key for key, value in found.items() if (value, other.get(key)) == (own, theirs)]
    for key in ("vocab_size", "decoder_vocab_size", *read):
        if key in found:
            found[key] = size
    for key in ("text_config", "decoder", "encoder", "model_cfg", "text_cfg"):
        if isinstance(found.get(key), Mapping):
            within = other.get(key)
            found[key] = _with_tokens_of(found[key], within if isinstance(within, Mapping) else {}, sizes)
    return found


def _with_ties_of(config: Config, other: Config) -> Config:
    """Return a configuration that ties what another one ties."""
    found = {key: value for key, value in config.items() if key != _TIED}
    found |= {_TIED: other[_TIED]} if _TIED in other else {}
    own, theirs = config.get(_TEXT), other.get(_TEXT)
    if isinstance(own, Mapping) and isinstance(theirs, Mapping):
        found[_TEXT] = _with_ties_of(own, theirs)
    return found


def untied_config(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for the model's family that does not tie its embeddings."""
    found = {**config, _TIED: False}
    if isinstance(text := config.get(_TEXT), Mapping) and _TIED in text:
        found[_TEXT] = {**text, _TIED: False}
    names, known = frozenset({*model.names, *model.ties}), model.architecture
    still = model.family.table(found, names).ties.keys() & model.ties.keys()
    untied = known.task_heads - model.ties.keys()
    others = {name for name in untied if VOCABULARY in known.tensors[name].names()}
    elsewhere = others and not {_module(name) for name in others} & {_module(name) for name in model.ties}
    if still or elsewhere or model.family.tied_scale:
        raise MismatchError(
            f"{model.label} ties {listing(model.ties)} to its embedding, and in the output they would differ:"
            f" a {model.family.name} with an output head of its own is another architecture",
            hint="leave an adapter an adapter; train a fine-tune with tied embeddings",
        )
    return found


def _module(name: str) -> str:
    return name.partition(".")[0]


def _table(checkpoint: Checkpoint, family: Family, config: Config, names: frozenset[str]) -> Table:
    """Return the table of a family; refuse a configuration that lacks settings or has impossible ones."""
    file = checkpoint.config_label
    try:
        table = family.table(config, names)
    except KeyError as error:
        raise ArchitectureError(
            f"{checkpoint.label}: {file} lacks {error.args[0]!r}, which the {family.name} table needs",
            hint=WRONG_FILE,
        ) from error
    except ArchitectureError as error:
        raise ArchitectureError(f"{checkpoint.label}: {error.message}", hint=error.hint) from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise ArchitectureError(
            f"{checkpoint.label}: {file} has an impossible value ({error})", hint=WRONG_FILE
        ) from error
    return _with_modules(table, checkpoint)


def _with_modules(table: Table, checkpoint: Checkpoint) -> Table:
    """Return the table with the dense layers behind an encoder, which are heads: they read its stream."""
    sentence, stream = checkpoint.sentence, table.outputs.get("last_hidden_state")
    if sentence is None or not sentence.tensors:
        return table
    if not stream:
        raise ArchitectureError(
            f"{checkpoint.label}: {listing(sentence.tensors)} reads an output of the encoder that its table"
            " does not name",
            hint="give the folder of the encoder alone, without modules.json",
        )
    return replace(table, heads={**table.heads, **sentence.layouts(stream)})


def _bound(
    checkpoint: Checkpoint, family: Family, table: Table, names: Mapping[str, TensorPieces]
) -> Architecture:
    """Give every tensor its layout."""
    shapes = {ours: stored.info(checkpoint.tensors).shape for ours, stored in names.items()}
    return replace(bind(table, shapes, f"{checkpoint.label}: {family.name}"), family=family.name)


def _drop_second_names(
    checkpoint: Checkpoint, names: dict[str, TensorPieces], ties: Mapping[str, str]
) -> None:
    """Keep tied tensors once, under their first name, as current releases of the libraries store them."""
    for second, first in ties.items():
        if second in names and first in names:
            two, one = names[second], names[first]
            if not torch.equal(two.join(checkpoint.read), one.join(checkpoint.read)):
                raise ArchitectureError(
                    f"{checkpoint.label}: the configuration ties {listing(two.names)} to"
                    f" {listing(one.names)}, but their values differ",
                    hint='set "tie_word_embeddings": false in config.json if the tensors are meant to differ',
                )
            del names[second]


def input_files(*inputs: object) -> list[Path]:
    """Return the paths that hold inputs: models, files of π, and references that exist on this machine.

    Other inputs, such as models in memory and hub ids of data, have no path.
    """
    given = (one.checkpoint.root if isinstance(one, Model) else one for one in inputs)
    paths = (Path(expanduser(one)) for one in given if isinstance(one, str | Path))
    roots = [path for path in paths if exists(path)]
    return [*roots, *(path for root in roots if root.is_dir() for path in root.iterdir())]
