"""Drafts: the text of a family's table, for ``--architecture``, from the analysis of one model.

Names and values come from untrusted files. The text is read and never run, so that all of them are data; what
a text cannot hold is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from transfusion.architecture.table import Config
from transfusion.errors import ArchitectureError, VerificationError, listing
from transfusion.families import known_keys
from transfusion.model.recognition import SECTIONS
from transfusion.running.live_model import vector_effects
from transfusion.verification.certify import APART
from transfusion.verification.drafting.analysis import Analysis, Stack
from transfusion.verification.drafting.attention import Attention, heads_in
from transfusion.verification.drafting.axes import AxisGroup, find_branch
from transfusion.verification.drafting.split_attention import PROJECTIONS
from transfusion.verification.drafting.trials import Kind, Part, Slot

LETTERS = ("x", "y", "z", "w")
"""The points of the stream in a block."""
GENERIC = {"dense", "linear", "proj", "projection", "out", "weight", "fc"}
NAMED = 8
"""The number of tensors in a signature."""
WINDOW = ("channel", "row", "column", "depth")
TEXT = ("input_ids", "token_type_ids", "decoder_input_ids")
KINDS = {"pixel_values": "image", **dict.fromkeys(TEXT, "tokens")}
"""Inputs that `random_inputs` can make, with their kinds."""

ROTARY = "a permutation inside heads changes the outputs, as with rotary positions"
SLOPED = "a permutation of heads changes the outputs, as with one slope per head"
SELECTED = "ids select its rows"
WINDOWED = "the inputs have this order"
COMPUTED = "the library adds positions that it computes"
KNOWN_OUTSIDE = "users read the outputs in this order"
_BY_HAND = "a table repeats one block; write this table by hand"

HEADER = """\
# {name}, as in {class_name}: a draft, made by trials on a live model.
#
# The names are those of the module's parameters in memory; add aliases for those of a checkpoint.
# The table is valid for the configuration that it was made with."""
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_KEY = re.compile(r"[A-Za-z0-9_.-]+")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Draft:
    """An item of a layout for every dimension that was found, and the axes that the items use.

    ``prefix`` is what the library puts before the names of the base model in models with a task head.
    """

    def __init__(self, found: Analysis, config: Config, prefix: str) -> None:
        self.found, self.config, self.prefix = found, config, prefix
        self.trials, self.stacks = found.trials, found.stacks
        _require("a tensor", _PATH, (*self.trials.names, *self.trials.module.state_dict()))
        if len(self.stacks) > 1 and (sections := [key for key in SECTIONS if key in config]):
            raise VerificationError(
                f"several stacks, {listing(stack.prefix for stack in self.stacks)}, with a section of the"
                f" configuration for each: {listing(sections)}",
                hint="write a table with a line 'part' for every section, as docs/notation.md shows",
            )
        for stack in self.stacks:
            if len(stack.joins) % stack.depth or len(stack.joins) > len(LETTERS) * stack.depth:
                raise VerificationError(
                    f"{len(stack.joins)} branches are added to the stream in {stack.depth} blocks"
                    f" ({stack.prefix}.0, …): not the same number in each",
                    hint=_BY_HAND,
                )
        self.items: dict[Slot, str] = {
            slot: self._point(stream, point, slot[0])
            for stream in found.streams
            for slot, point in stream.slots.items()
        }
        self.outputs = {
            name: self._point(stream, point)
            for stream in found.streams
            for name, point in stream.outputs.items()
        }
        """Outputs of the model that lie on a free axis."""
        self.axes: dict[str, str] = {}
        """The lines that declare them, by name."""
        self.sizes: dict[str, dict[str, str]] = {stack.name: {} for stack in self.stacks}
        """For every stack, the sizes that do not follow from shapes, as expressions."""
        unsaved = getattr(self.trials.module, "_keys_to_ignore_on_save", None) or ()
        self.computed = [name for name in self.trials.parameters if name in unsaved]
        """Parameters that the library computes, and stores in no file."""
        self._name_attentions()
        self._name_inner()
        self._name_ends()

    # ── names of axes ────────────────────────────────────────────────────────────────────────

    def _point(self, stream: AxisGroup, point: int, name: str = "") -> str:
        """Return the name of a point of a stream, in the row of a tensor or a module."""
        own = self.found.stack_of(name)
        if own is not None and own.stream is stream and point in own.points:
            each = len(own.joins) // own.depth
            step = own.points.index(point) - each * (own.number(name) or 0)
            if 0 <= step <= each:
                return "x@next" if step == each else LETTERS[step]
        if ends := self._ends(stream, point):
            return ends[0]
        where = f"in {self.found.block_of(name)}*" if own else "outside the blocks"
        raise VerificationError(
            f"point {point} of the stream, which is no end of a stack of blocks, is used {where}",
            hint="only the ends of a stack have names there; write this table by hand",
        )

    def _ends(self, stream: AxisGroup, point: int) -> list[str]:
        """Return the names of a point that lies at an end of one or more stacks."""
        return [
            f"{stack.name}.{end}" if len(self.stacks) > 1 else end
            for stack in self.stacks
            if stack.stream is stream
            for end, where in (("x@first", 0), ("x@last", -1))
            if stack.points[where] == point
        ]

    def _declare(self, name: str, line: str) -> None:
        if self.axes.setdefault(name, line) != line:
            raise VerificationError(
                f"the axis {name} is free in some blocks and fixed in others", hint=_BY_HAND
            )

    def _name_attentions(self) -> None:
        seen: Counter[str] = Counter()
        for attention in self.found.attentions:
            block = self.found.block_of(attention.tensor)
            stack = self.found.stack_of(attention.tensor) or self.stacks[0]
            seen[block] += 1
            suffix = "" if seen[block] == 1 else str(seen[block])
            names = re.compile(r"\b(" + "|".join(attention.sizes) + r")\b")
            for slot, layout in attention.layouts.items():
                self.items[slot] = names.sub(rf"\g<1>{suffix}", layout)
            for axis in ("head", "group", "rep", "rot", "qk", "vo"):
                if axis in attention.sizes:
                    self._declare(axis + suffix, _attention_axis(attention, axis, suffix))
            named, sizes = heads_in(self.config), self.sizes[stack.name]
            heads, groups = (self._key(named, one, stack) for one in (attention.heads, attention.groups))
            if "rot" in attention.sizes:
                sizes["rot" + suffix] = str(attention.sizes["rot"])
            if "head" in attention.sizes:
                sizes["head" + suffix] = heads
            else:
                sizes["group" + suffix], sizes["rep" + suffix] = groups, f"{heads} / {groups}"

    def _key(self, settings: Mapping[str, object], value: int, stack: Stack) -> str:
        """Return the setting with a value, by its name rather of this stack than of another; or the value."""
        others = [other.name for other in self.stacks if other is not stack]
        named = [key for key, one in settings.items() if one == value and key.isidentifier()]
        named.sort(key=lambda key: (stack.name not in key, any(other in key for other in others)))
        return next(iter(named), str(value))

    def _name_inner(self) -> None:
        seen: Counter[str] = Counter()
        block_of = self.found.block_of

        def name_in(block: str) -> str:
            seen[block] += 1
            name = "ffn" if seen[block] == 1 else f"ffn{seen[block]}"
            self._declare(name, f"axis {name}{'' if block else ' per model'}")
            return name

        for writer, reader in self.found.folded:
            name = name_in(block_of(writer.module))
            self.items |= dict.fromkeys(writer.outputs, f"[{name}|{name}]")
            self.items[reader.inputs[0]] = name
        for part, group in self.found.inner:
            block = block_of(part.module)
            if block and {block_of(name) for name, _ in group.slots} == {block}:
                name = name_in(block)
            else:
                name = self._new_name(part.module)
                self._declare(name, f"axis {name} per model")
            self.items |= dict.fromkeys(group.slots, name)
            self.outputs |= dict.fromkeys(group.outputs, name)

    def _name_ends(self) -> None:
        """Name the fixed axes; those whose rows ids select come first, as others may have their size."""
        parts = self.trials.parts
        owners = {slot: part for part in reversed(parts) for slot in part.slots}
        rows = {slot for part in parts if part.kind is Kind.EMBEDDING for slot in part.rows}
        selected: dict[int, str] = {}
        inside: dict[tuple[str, int], str] = {}
        for slots in sorted(self.found.ends, key=lambda slots: not rows & set(slots)):
            size, part = self.trials.extent(slots[0]), owners[slots[0]]
            if size == 1:
                continue
            known = next((self.items[slot] for slot in slots if slot in self.items), None)
            alike = (self._pattern(slots[0][0]), slots[0][1])
            name = known or inside.get(alike) or self._end_name(slots[0], part, selected)
            if "{}" in alike[0]:
                inside[alike] = name
            if rows & set(slots):
                why = SELECTED
                selected.setdefault(size, name)
            else:
                why = WINDOWED if slots[0] in (*part.rows, *part.inputs) else KNOWN_OUTSIDE
            scope = " per stack" if name in inside.values() else ""
            self.axes.setdefault(name, f"fixed {name}{scope}: {why}")
            self.items |= dict.fromkeys(slots, name)

    def _end_name(self, slot: Slot, part: Part, selected: Mapping[int, str]) -> str:
        size = self.trials.extent(slot)
        if part.kind is Kind.CONVOLUTION and slot[1] > 0:
            return WINDOW[slot[1] - 1]
        if part.kind is Kind.EMBEDDING and size == self.config.get("vocab_size"):
            return "vocab"
        if part.kind is Kind.LINEAR and size in selected:
            return selected[size]
        return self._new_name(slot[0] if part.kind is Kind.BARE else part.module)

    def _new_name(self, module: str) -> str:
        words = [word for word in module.removeprefix(self.prefix).split(".") if not word.isdigit()]
        word = next((word for word in reversed(words) if word not in GENERIC), words[-1]).replace("-", "_")
        taken = {*self.axes, *LETTERS, *self.sizes}
        return next(n for n in (word, *(f"{word}_{i}" for i in range(2, 99))) if n not in taken)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────

    def _pattern(self, name: str) -> str:
        """Return a name without the prefix, and with ``{}`` for the block number."""
        stack = self.found.stack_of(name)
        if stack is not None and name not in self.found.once:
            start = f"{stack.prefix}.{stack.number(name)}"
            name = stack.prefix + ".{}" + name[len(start) :]
        return name.removeprefix(self.prefix)

    def _rows(self) -> dict[Stack | str, list[tuple[str, str]]]:
        """Return names and layouts, once for all blocks, by section: stacks, rows outside, the task head."""
        effects = vector_effects(self.trials.module, self.trials.run)
        layouts: dict[Stack | str, dict[str, dict[int, str]]] = {}
        for name in self.trials.parameters:
            if name in self.computed:
                continue
            stack = self.found.stack_of(name)
            layout = self._layout(name, scales=effects.get(name, 0.0) > APART)
            outside = self.stacks[0] if len(self.stacks) == 1 else "outside"
            section = "heads" if self.prefix and not name.startswith(self.prefix) else outside
            rows = layouts.setdefault(stack or section, {})
            rows.setdefault(self._pattern(name), {})[stack.number(name) or 0 if stack else 0] = layout
        odd = [
            pattern
            for stack in self.stacks
            for pattern, one in layouts[stack].items()
            if "{}" in pattern and (len(set(one.values())) > 1 or len(one) < stack.depth)
        ]
        if odd:
            raise VerificationError(f"the blocks differ from each other in {listing(odd)}", hint=_BY_HAND)
        return {
            section: list(_merged({pattern: next(iter(one.values())) for pattern, one in rows.items()}))
            for section, rows in layouts.items()
        }

    def _layout(self, name: str, *, scales: bool) -> str:
        dims = [self.items.get((name, dim), "_") for dim in range(self.trials.parameters[name].ndim)]
        owner = next((part for part in self.trials.parts if (name, 0) in part.slots), None)
        if len(dims) == 1 and dims != ["_"] and scales:
            return f"scale {dims[0]}"
        if len(dims) < 2 or owner is None or owner.kind in (Kind.BARE, Kind.ELEMENTWISE):
            return " ".join(dims)
        arrow = "<-" if (name, 0) in owner.outputs else "->"
        return f"{dims[0]} {arrow} {' '.join(dims[1:])}"

    def _shortcuts(self, stack: Stack) -> Iterator[tuple[str, str, str]]:
        each = len(stack.joins) // stack.depth
        found: dict[int, set[tuple[str, str, str]]] = {step: set() for step in range(each)}
        assert stack.stream is not None
        for place, join in enumerate(stack.joins):
            modules = (join.entry, find_branch(self.trials, join, stack.stream.size))
            if not all(modules):  # after the last block the stream may be averaged; another block will do
                continue
            block, step = divmod(place, each)
            inside = f"{stack.prefix}.{block}"
            ends = (self._point(stack.stream, point, inside) for point in (join.source, join.target))
            entry, branch = (self._pattern(self.trials.in_memory(module)) for module in modules if module)
            found[step].add((entry, " -> ".join(ends), branch))
        for step, ways in found.items():
            if not ways:
                writers = listing(part.module for part in stack.joins[step].writers)
                raise VerificationError(
                    f"the shortcut around {writers} was not found",
                    hint="no module's input equals the stream that the branch is added to; write a table by"
                    " hand, as docs/your-own.md shows",
                )
            if len(ways) > 1:
                raise VerificationError(
                    f"the blocks differ in their shortcuts: {listing(entry for entry, _, _ in ways)}",
                    hint=_BY_HAND,
                )
            yield from ways

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    def text(self, name: str, class_name: str, library: str, inputs: Mapping[str, Tensor]) -> str:
        """Return the text, for the class and the configuration that it was made with."""
        lines = [HEADER.format(name=name, class_name=class_name)]
        if idle := " ".join(self.found.idle):
            lines.append(f"# These have no effect on the outputs, and stay as they are: {idle}")
        lines += ["", f"family {name}", f"library {library}", *self._settings(name, library)]
        lines += [*_inputs(library, inputs), *self.axes.values(), *self._table()]
        return "\n".join(lines) + "\n"

    def _settings(self, name: str, library: str) -> Iterator[str]:
        """The models, their names, and the settings that the table ignores or requires."""
        config = self.config
        harmless = known_keys("harmless") if library == "transformers" else frozenset()
        own = sorted(set(config) - harmless - {"model_type"})
        _require("a setting", _KEY, own)
        required = {key: config[key] for key in own if self._must_stay(key, config[key])}
        if self._ties() and "tie_word_embeddings" in config:
            required["tie_word_embeddings"] = config["tie_word_embeddings"]
        models = dict.fromkeys(map(require_word, (config.get("model_type") or name, name)))
        yield f"models {' '.join(models)}"
        if not config.get("model_type"):
            yield f"signature {' '.join(self._signature())}"
        if self.prefix:
            yield f"prefixes {self.prefix}"
        ignored = ["@harmless" if harmless else "model_type", *(key for key in own if key not in required)]
        yield f"ignores {' '.join(ignored)}"
        yield from _columns("requires ", ((key, _json(key, value)) for key, value in required.items()))

    def _signature(self) -> list[str]:
        """Return some tensors by whose names a model is recognised, if its configuration names no family."""
        patterns = dict.fromkeys(map(self._pattern, self.trials.parameters))
        return [pattern.replace("{}", "0") for pattern in patterns][:NAMED]

    def _must_stay(self, key: str, value: object) -> bool:
        """Whether a setting may affect the computation, and not only the sizes."""
        if isinstance(value, bool) or not isinstance(value, int):
            return not isinstance(value, list)
        sizes = {extent for one in self.trials.parameters.values() for extent in one.shape}
        for one in self.found.attentions:
            sizes |= {one.heads, one.groups, *one.sizes.values()}
        known = value in sizes or value in [stack.depth for stack in self.stacks]
        rotated = [own.get("rot") for own in self.sizes.values()]
        return not known or "rot" in key or str(value) in rotated

    def _ties(self) -> dict[str, str]:
        """Return the first names of tied tensors by their second names."""
        tied = ((name, first) for name, first in self.trials.names.items() if name != first)
        return {name.removeprefix(self.prefix): first.removeprefix(self.prefix) for name, first in tied}

    def _table(self) -> Iterator[str]:
        rows = self._rows()
        depths = {key: value for key, value in self.config.items() if counts_blocks(key, value)}
        yield from self._originals()
        for stack in self.stacks:
            yield f"stack {stack.name} {self._key(depths, stack.depth, stack)}"
            if sizes := self.sizes[stack.name]:
                yield f"sizes {', '.join(f'{axis} = {size}' for axis, size in sizes.items())}"
            yield from _columns("", rows[stack])
            yield from _columns("skip ", self._shortcuts(stack))
        for section in ("outside", "heads"):
            if section in rows:
                yield section
                yield from _columns("    ", rows[section])
        stored = self.trials.module.state_dict()
        if buffers := sorted({self._pattern(name) for name in stored if name not in self.trials.names}):
            yield f"buffers {' '.join(buffers)}"
        yield from self._pins()
        yield from (f"same {one} {other}" for one, other in self._same_points())
        yield from (f"tie {second} = {first}" for second, first in self._ties().items())
        _require("an output", _PATH, self.outputs)
        yield from (f"output {name} = {point}" for name, point in self.outputs.items())

    def _originals(self) -> Iterator[str]:
        """The tensors of fused attention, whose rows are named one by one here."""
        fused = {self._pattern(name): one for name, one in self.trials.split().items()}
        kinds = ((name, kind) for name, one in fused.items() for kind in one.kinds)
        rows = [(f"{name}.in_proj_{kind}", f"{name}.", _parts(kind)) for name, kind in kinds]
        if rows:
            yield "originals"
            yield from _columns("    ", rows)

    def _pins(self) -> Iterator[str]:
        """What the library computes, and the points that it is added to: they cannot move."""
        if self.computed:
            yield f"computed {' '.join(map(self._pattern, self.computed))}"
        slots = [slot for stream in self.found.streams for slot in stream.slots if slot[0] in self.computed]
        yield from dict.fromkeys(f"pin {self.items[slot]}: {COMPUTED}" for slot in slots)

    def _same_points(self) -> Iterator[tuple[str, str]]:
        """Yield the ends of stacks that are one point, and those that a shared tensor makes equal."""
        for stream in self.found.streams:
            for point in dict.fromkeys(point for stack in self.stacks for point in stack.points):
                first, *others = self._ends(stream, point) or [""]
                yield from ((first, other) for other in others)
            for one, other in sorted(stream.unified):
                yield self._point(stream, one), self._point(stream, other)


def _attention_axis(attention: Attention, axis: str, suffix: str) -> str:
    """Return the line that declares an axis of attention."""
    sizes, free, parent = attention.sizes, attention.free, attention.parents.get(axis)
    if axis not in free:
        return f"fixed {axis}{suffix} per layer: {SLOPED if axis in ('head', 'group', 'rep') else ROTARY}"
    if axis == "head" and attention.shares_heads:
        return f"axis {axis}{suffix} per stack"
    tied = axis == "vo" and "qk" in free and sizes["qk"] == sizes["vo"]
    within = f" in {parent}{suffix}" if parent else ""
    return f"axis {axis}{suffix}{within}{f' with qk{suffix}' if tied else ''}"


def _parts(kind: str) -> str:
    """Return the parts of a fused tensor: its weights, or its biases."""
    return " | ".join(f"{name}.{kind}" for name in PROJECTIONS)


def counts_blocks(key: str, value: object) -> bool:
    """Whether a setting may be the number of blocks, judged by its name."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return any(word in key for word in ("layer", "block", "depth"))


def _merged(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield one row for a weight and its bias if the bias has the weight's output axes."""
    for name, layout in rows.items():
        module, _, last = name.rpartition(".")
        weight = rows.get(f"{module}.weight")
        if last == "bias" and weight is not None and layout == _bias_of(weight):
            continue
        if last == "weight" and rows.get(f"{module}.bias") == _bias_of(layout):
            yield f"{module}.*", layout
        else:
            yield name, layout


def _bias_of(layout: str) -> str:
    before, arrow, after = layout.removeprefix("scale ").partition(" -> ")
    return after if arrow else before.partition(" <- ")[0]


def _inputs(library: str, inputs: Mapping[str, Tensor]) -> Iterator[str]:
    _require("an input", _IDENTIFIER, inputs)
    if library == "transformers" and set(inputs) <= set(KINDS):
        yield f"inputs {' '.join(sorted({KINDS[key] for key in inputs}))}"
        return
    for name, value in inputs.items():
        shape = f"({''.join(f'{size}, ' for size in value.shape[1:])})"
        below = "" if value.is_floating_point() else f", low=0, high={int(value.max()) + 1}, whole=True"
        yield f"draw {name} = Draw({shape}{below})"


def _columns(word: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines of cells, in columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield (word + "   ".join(cells)).rstrip()


# ── what a text cannot hold ──────────────────────────────────────────────────────────────────


def require_word(name: object) -> str:
    """Return the name of a family; refuse anything but a plain word."""
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise ArchitectureError(
            f"the model_type {name!r:.60} is not a valid name of a family",
            hint="a name has letters, digits, '_', '-' and '.' only; correct model_type in config.json",
        )
    return name


def _require(what: str, pattern: re.Pattern[str], names: Iterable[str]) -> None:
    for name in names:
        if not pattern.fullmatch(name):
            raise ArchitectureError(
                f"{what} {name!r:.60} has a name that is not allowed in a table",
                hint="names have letters, digits and '_' between dots; correct config.json",
            )


def _json(key: str, value: object) -> str:
    """Return a value as a text without the signs that mean something in a table."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArchitectureError(
            f"the setting {key} is {value!r:.60}, which is not allowed in a table",
            hint="settings are numbers, texts, and lists of them; correct config.json",
        ) from error
    return text.replace("#", r"\u0023").replace("|", r"\u007c")
