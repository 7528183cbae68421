"""Tables: the names and axes of all tensors of a family. `binding` matches a table with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Config: TypeAlias = Mapping[str, Any]
WRONG_FILE = "fetch the config.json that belongs to these weights"
"""The hint where a configuration does not fit its weights."""
ANGLES = "rotary positions rotate each pair of units by its own angle"


class Symmetry(StrEnum):
    """The changes of basis that an axis admits without changing the function."""

    FIXED = "fixed"
    PERMUTATION = "permutation"
    ROTARY = "rotary"
    """Rotary positions rotate units j and j + d/2 as a pair: each pair may be rotated by any angle."""
    INTERLEAVED = "interleaved"
    """The same, with the units 2j and 2j + 1 as a pair."""

    @property
    def rotates_pairs(self) -> bool:
        """Whether pairs of units may be rotated, and no unit may be permuted."""
        return self in (Symmetry.ROTARY, Symmetry.INTERLEAVED)


@dataclass(frozen=True)
class Axis:
    """The declaration of an axis: its name, its symmetry and its scope."""

    name: str
    group: Symmetry = Symmetry.PERMUTATION
    within: str | None = None
    scope: str = "layer"
    """One per ``layer``, per ``stack`` or per ``model``."""
    tied_with: str | None = None
    """An axis of the same size that moves with this one under `InnerPolicy.TIED`."""
    why: str = ""
    """For an axis whose units cannot be permuted: the reason."""


def fixed(name: str, why: str, *, scope: str = "model", within: str | None = None) -> Axis:
    """Return an axis that cannot move, with the reason."""
    return Axis(name, Symmetry.FIXED, within, scope, None, why)


Rows: TypeAlias = dict[str, str]
"""The layout of each tensor, by its name; see `rows_of`."""
UNREAD = "unread "
"""Before the layout of a tensor that files may have and the library leaves unread, such as those of blocks
that predict further tokens. It moves with what it reads, and is no evidence of how two models correspond."""


def rows_of(text: str) -> Rows:
    """Read rows, one per line: ``name  layout``.

    A name that ends in ``.*`` is a module with a weight and perhaps a bias: the bias has the output's axes if
    the layout has an arrow, and the weight's otherwise. ``scale`` before a layout: a vector that multiplies
    the units of the axis, as the weight of a norm or LayerScale; the bias of ``.*`` is not. ``?`` after a
    name: the tensor may be absent; it becomes the word ``optional`` before the layout.
    """
    found: Rows = {}
    for line in text.strip().splitlines():
        name, _, layout = line.strip().partition(" ")
        found[name.removesuffix("?")] = "optional " * name.endswith("?") + layout.strip()
    return found


@dataclass
class Stack:
    """A column of equal blocks, usually on one residual stream, with what stands before and after it.

    ``{}`` in the name of a row is the number of the block, ``{1+}`` the same in a row that only the blocks
    from 1 on have, and ``{kind}`` in a row that only the blocks of a kind have.
    """

    name: str
    depth: int
    rows: Rows = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    shortcuts: dict[tuple[str, ...], tuple[str, str, str, str]] = field(default_factory=dict)
    """Residual connections (entry, from, to, branch): the stream goes in at module *entry*, and the output of
    module *branch* is added to it. The first word of a key is the point that one comes from."""
    points: tuple[str, ...] = ("x", "y", "z", "w")
    kinds: dict[str, Collection[int]] = field(default_factory=dict)
    """Kinds of blocks, where not all blocks are alike: the numbers of the blocks of each kind."""
    branch_factor: float = 1.0
    """What the output of every branch is multiplied by before it is added to the stream."""
    residual: bool = True
    """Whether the points are on one residual stream; if not, each moves on its own under any policy."""
    one_space: bool = False
    """Whether a point is the same space in all blocks under any policy, as where a gate between a branch and
    its addition leaves no place for P_out P_inᵀ, or all blocks share one modulation of the stream."""

    @property
    def is_read(self) -> bool:
        """Whether the library runs its blocks: not those that predict further tokens."""
        return not self.rows or not all(layout.startswith(UNREAD) for layout in self.rows.values())


@dataclass
class Table:
    """The rows, axes and ends of all models of one configuration."""

    stacks: list[Stack] = field(default_factory=list)
    axes: list[Axis] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    """Rows outside the stacks; ``stack.x@last`` names a point of a stream there."""
    heads: Rows = field(default_factory=dict)
    """Rows, all optional, that base models may lack and fine-tunes may have."""
    buffers: list[str] = field(default_factory=list)
    """Tensors that older releases of the library stored and that never move."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of axes that belong to no stack."""
    unified: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of stream points that one shared tensor forces to be the same (tied embeddings)."""
    pinned: dict[str, str] = field(default_factory=dict)
    """Stream points that cannot move, with the reason, such as values that the code writes there."""
    unrotated: str = ""
    """Why the stream may be permuted, but not rotated, after norms are folded; empty if it may."""
    ties: dict[str, str] = field(default_factory=dict)
    """Second names of tied tensors: second name → first name."""
    outputs: dict[str, str | None] = field(default_factory=dict)
    """Outputs of the live model whose last dimension is an axis that may move; None for an output
    that is in different spaces in different releases of the library, or serves training only, and is
    not compared."""

    @property
    def read_stacks(self) -> list[Stack]:
        """The stacks that the library runs."""
        return [stack for stack in self.stacks if stack.is_read]

    def has_head(self, name: str) -> bool:
        """Whether a tensor of this name is a task head."""
        return any(fnmatchcase(name, pattern) for pattern in self.heads)


@dataclass(frozen=True)
class Draw:
    """How one input of a live model is drawn, for each example of a batch."""

    shape: tuple[int, ...] = ()
    low: float | None = None
    """Numbers between ``low`` and ``high``; without them, noise."""
    high: float = 1.0
    whole: bool = False
    """Whether the numbers are integers, below ``high``."""
    same: Any = None
    """The same value in every example, as nested lists of numbers."""
    role: str = ""
    """What it is to a model that denoises: the ``latent``, the ``time`` or the ``text``."""


@dataclass(frozen=True)
class Component:
    """A part of a model that is a model of another family, with a section of the configuration to itself."""

    prefix: str
    """What the names of its modules begin with, such as ``vision_tower.``."""
    model_type: str = ""
    """Its kind, where the section names none."""
    family: Family | None = None
    """Its family, if it is none that stands alone: whatever kind the section names."""
    known_keys: frozenset[str] = frozenset()
    """Further keys of its section that cannot matter."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further keys of its section that must have one of these values."""
    whole: bool = False
    """Whether it is a whole model, with heads and names as it has them alone; see `whole_below`."""


@dataclass(frozen=True)
class Family:
    """A family of architectures: how to recognise it, and its table."""

    name: str
    library: str
    table: Callable[[Config, frozenset[str]], Table]
    kin: str = ""
    """What it has in common with families that were trained on from each other: tensors of one name are then
    one part, and others have no counterpart. Empty: it corresponds to itself alone."""
    signature: tuple[str, ...] = ()
    """Tensors by which the family is recognised without a configuration; the longest of several matching
    signatures counts. Empty: the family is only known by its configuration."""
    from_shapes: Callable[[Shapes], dict[str, Any]] | None = None
    """A configuration read off the shapes; None where they leave anything open, such as the number of
    heads."""
    fits: Callable[[Shapes], bool] = lambda shapes: True
    """Whether the shapes fit the family, if another family has the same names."""
    complete: Callable[[Config, Shapes], Config] = lambda config, shapes: config
    """Returns the configuration, completed with settings that follow from the shapes."""
    model_types: tuple[str, ...] = ()
    """The names of the family in configurations; for timm, patterns of its names, with ``*``; for diffusers,
    classes, first the one that is built."""
    inputs: tuple[str, ...] = ()
    """The kind of input of a live model: ``image``, ``patches`` (an image in patches), ``tokens``,
    ``spectrogram``, ``waveform``."""
    draws: Callable[..., Mapping[str, Draw]] | None = None
    """How inputs for a live model are drawn, by name, where those kinds do not fit; from a configuration,
    and the numbers of patches and words if others than a few."""
    denoises: str = ""
    """How a model of diffusers denoises. ``flow``: it predicts noise minus image, of a mixture in straight
    lines; ``flow_to_image``: the opposite of that, and its time runs from noise to image; ``noise``: it
    predicts the noise, or what a scheduler's file beside it says, in discrete steps whose noise grows like
    Stable Diffusion's; ``noise_linear``: the same, and it grows in a straight line."""
    build: Callable[[Config], Any] | None = None
    """Builds the module of a configuration, if its class is the user's own and of no library."""
    make_inputs: Callable[[Config, int, Any], Mapping[str, Any]] | None = None
    """Makes so many inputs for such a module, with a random generator of torch, where ``draws`` cannot."""
    frame: Callable[[Config], tuple[int, int, int]] | None = None
    """Channels, rows and columns of probes, if the model takes images of any size."""
    arrange: Callable[[Config, Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Returns the arguments of a live model from a batch of inputs, where it wants others than those: tokens
    of the text that stand for the image, the patches that are masked, lists or numbers instead of tensors."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """Models of other families that are parts of this one, by the section of the configuration."""
    whole_parts: Mapping[str, Family] = field(default_factory=dict)
    """The families of parts that are whole models, by what their names begin with, once a configuration has
    told them."""
    prefixes: tuple[str, ...] = ()
    """The prefix of names that libraries add in models with a task head, and drop in models without one."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Other names of modules or tensors, as pairs (other, ours), with ``{}`` for numbers. ``ours[1]`` is
    the part 1 of a concatenation that files keep whole and a live module keeps apart. ``ours#{}`` is a
    member, by its number, of a stack along a first dimension that files keep apart and a live module
    keeps whole; ``ours#{}[1]`` is the part 1 of that member, if it is in parts of one size, too."""
    original: str = ""
    """The names in the files that a model's authors distribute, where these differ from the library's:
    see `naming`."""
    tied_scale: bool = False
    """Whether a model with tied embeddings also scales what its head reads, so that untying changes more."""
    positions_after_padding: bool = False
    """Whether positions are counted from behind the row of the padding token."""
    whole_only: bool = False
    """Whether a live module needs all of its weights at once: it cannot be run unit by unit."""
    repeats_block: bool = False
    """Whether one block runs several times, so that it corresponds to no single block of another family."""
    computed: tuple[str, ...] = ()
    """Tensors that the library computes anew, so that files may lack them."""
    known_keys: frozenset[str] = frozenset()
    """Configuration keys that the table takes into account, or that cannot matter to it."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Configuration keys that must have one of these values."""
    class_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By kind of model, settings that transformers 4 leaves out of the sections of a configuration."""

    @property
    def draws_inputs(self) -> bool:
        """Whether its table, or the user's file, says how inputs are drawn."""
        return self.draws is not None or self.make_inputs is not None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name only: the architecture already has everything else."""
        return Family, (self.name, self.library, _elsewhere)


def _elsewhere(config: Config, names: frozenset[str]) -> Table:
    raise NotImplementedError("the table is where the model was opened")
