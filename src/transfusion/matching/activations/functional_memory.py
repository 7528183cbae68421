"""The memory that functional alignment takes, from headers alone, and how a limit is kept.

Two phases follow each other. Passes hold one unit of a model, the hidden states of all probes, and the
activations of a block for each batch that runs. Solutions hold the maps that were found, and for each thread
the samples of one axis and some matrices of its size: first of neurons and heads, then of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from transfusion.architecture.architecture import HeadPolicy, Space
from transfusion.architecture.layouts import names_in
from transfusion.matching.activations.probed_pair import bytes_of_samples
from transfusion.matching.methods import FunctionalOptions, MlpSolver
from transfusion.model.model import Model
from transfusion.model.vocabulary_map import VOCABULARY
from transfusion.running.activation_store import HELD_OUT, precision
from transfusion.running.meta_models import skeleton
from transfusion.running.probes.generated_texts import memory_of_texts
from transfusion.running.probes.probe_counts import enough_probes, tokens_of_a_probe
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.running.probes.synthetic_texts import written_texts
from transfusion.running.probes.tokenizers import has_tokenizer
from transfusion.running.streaming import unit_sizes
from transfusion.runtime.memory_budget import LIBRARY, NO_LIMIT, MemoryBudget

NUMBER = 4
"""Bytes of a number in float32."""
MATRICES = 44
"""Bytes for every entry of an axis's square matrix: the covariance, and four matrices in float64 with one in
float32 while its polar factor is found; assignments take less."""
ASSIGNED = 12
"""The same where units are assigned: the covariance and the costs, in float32. 9 were measured."""
SAMPLES = 3
"""Samples of one side of a module in memory at a time: of A, of B, and what is being computed from one."""
STREAM_SAMPLES = 5
"""The same for a point of the stream: as read, normalised, and what is being computed."""
BY_HEAD = 4
"""Covariances of heads that are kept together: of queries, keys, values, and what the projection reads."""
KEPT_STATES = 4
"""Tensors of the size of the hidden states that a pass keeps between two blocks."""
BATCHES = 2 * HELD_OUT


@dataclass(frozen=True)
class ModelPasses:
    """What running a model on the probes holds in memory."""

    model: Model
    options: FunctionalOptions

    @cached_property
    def module(self) -> nn.Module:
        return skeleton(self.model)

    @cached_property
    def subject(self) -> ProbedModel:
        return ProbedModel(self.model, self.module)

    @cached_property
    def probes(self) -> int:
        """How many inputs the model is run on."""
        return enough_probes(self.subject, self.options.probes, self.options.samples)

    @cached_property
    def tokens(self) -> int:
        """The tokens of all probes."""
        return self.probes * tokens_of_a_probe(self.subject)

    @cached_property
    def texts(self) -> int:
        """Bytes of the texts that a language model writes, before all passes."""
        if self.options.calibrate or not self.subject.writes:
            return 0
        written = written_texts(self.subject, self.probes, reads=has_tokenizer(self.subject))
        return memory_of_texts(self.subject, written)

    @cached_property
    def whole(self) -> int:
        """Bytes of all weights, in float32."""
        return NUMBER * sum(one.numel() for one in self.module.parameters())

    @cached_property
    def by_unit(self) -> int:
        """Bytes of the largest unit and of what stays, with a tensor as it is stored."""
        return unit_sizes(self.model, self.module) + max(
            (self.model.info(name).nbytes for name in self.model.names), default=0
        )

    @cached_property
    def states(self) -> int:
        """Bytes of the hidden states of all probes."""
        widths = [space.size for space in self.model.architecture.spaces.values() if space.stream]
        return KEPT_STATES * NUMBER * self.tokens * max(widths, default=0)

    @cached_property
    def of_a_batch(self) -> int:
        """Bytes of the activations of one batch in its largest block, attention included."""
        outputs: dict[str, int] = {}
        for name, layout in self.model.architecture.tensors.items():
            if layout.arrow is not None and len(layout.outputs) == 1 and name in self.model.names:
                block = ".".join(part for part in name.split(".") if part.isdigit())
                size = self.model.info(name).shape[layout.outputs[0]]
                outputs[block] = outputs.get(block, 0) + (size if VOCABULARY not in layout.names() else 0)
        return 2 * NUMBER * max(outputs.values(), default=0) * self.tokens // BATCHES


@dataclass(frozen=True)
class FunctionalMemory:
    """How the memory of one process is divided in functional alignment."""

    threads: int
    block: int
    """Bytes that the most demanding axis takes."""
    demanding: str
    passes: int
    """Bytes of running a model."""
    maps: int
    """Bytes of all maps, at the most: for both treatments of heads."""
    stream: int
    """Bytes that the widest point of the stream takes."""
    samples: int
    """Bytes on disk."""
    budget: MemoryBudget = NO_LIMIT

    @property
    def total(self) -> int:
        """The most bytes of the process, with the library that runs the models."""
        solving = self.maps + self.threads * max(self.block, self.stream)
        return self.budget.program + LIBRARY + max(self.passes, solving)

    @classmethod
    def of(
        cls,
        a: Model,
        b: Model,
        options: FunctionalOptions,
        threads: int,
        budget: MemoryBudget = NO_LIMIT,
        *,
        by_unit: bool,
    ) -> FunctionalMemory:
        """Fit up to ``threads`` threads into the budget."""
        running = [ModelPasses(model, options) for model in (a, b)]
        branches: dict[str, int] = {}
        points: dict[str, int] = {}
        maps: dict[tuple[str, int], int] = {}
        for model in _treatments(a, options):
            for space in model.architecture.moving():
                of_axes = branches if space.stream is None else points
                of_axes[space.id] = max(of_axes.get(space.id, 0), axis_bytes(model, space, options))
                if not is_assigned(model, space, options):
                    rows = model.architecture.rows(space.id)
                    maps[space.id, space.size] = NUMBER * rows * space.size**2
        demanding = max(branches, key=branches.__getitem__, default="")
        block, stream = branches.get(demanding, 0), max(points.values(), default=0)

        def made(count: int) -> FunctionalMemory:
            of_passes = max(
                (one.by_unit if by_unit else one.whole)
                + max(one.texts, (one.states if by_unit else 0) + count * one.of_a_batch)
                for one in running
            )
            return cls(
                count,
                block,
                demanding,
                of_passes,
                sum(maps.values()),
                stream,
                bytes_of_samples(a, options),
                budget,
            )

        found = made(threads)
        while budget.limit is not None and found.total > budget.limit and found.threads > 1:
            found = made(found.threads - 1)
        budget.require(found.total - budget.program, "functional alignment")
        return found

    def as_dict(self) -> dict[str, int | str]:
        """Return plain data for a dry run."""
        return {
            "memory": self.total,
            "threads": self.threads,
            "memory_of_a_block": self.block,
            "most_demanding": self.demanding,
            "memory_of_passes": self.passes,
            "memory_of_maps": self.maps,
            "samples_on_disk": self.samples,
        }


def _treatments(model: Model, options: FunctionalOptions) -> list[Model]:
    """Return the model with its units inside heads, and with units that move between heads, if they may.

    The maps of both are in memory until the better ones are chosen.
    """
    flat = replace(model.architecture.policy, heads=HeadPolicy.FLAT)
    return [model, model.under(flat)] if options.freely else [model]


def axis_bytes(model: Model, space: Space, options: FunctionalOptions) -> int:
    """Return the bytes of an axis: of sums over samples, or of its matrices while it is solved."""
    units = space.size * model.architecture.rows(space.id)
    width = max((units, *_widths(model, space)))
    learned = options.samples - options.samples // HELD_OUT
    copies = SAMPLES if space.stream is None else STREAM_SAMPLES
    number = precision(width).itemsize
    summed = number * (copies * width * learned + (BY_HEAD if space.parent else 1) * units**2)
    return max(summed, (ASSIGNED if is_assigned(model, space, options) else MATRICES) * units**2)


def _widths(model: Model, space: Space) -> Iterator[int]:
    """Yield the widths of all modules that read or write an axis; those of fused modules are larger."""
    for name, layout in model.architecture.tensors.items():
        if layout.arrow is not None and space.stream is None:
            for dim in (*layout.outputs[:1], *layout.inputs[:1]):
                if space.id in names_in(layout.items[dim]):
                    yield model.info(name).shape[dim]


def is_assigned(model: Model, space: Space, options: FunctionalOptions) -> bool:
    """Return whether the units of an axis will certainly be assigned: those of a gated MLP."""
    if options.mlp is MlpSolver.ROTATED or space.stream is not None or space.parent is not None:
        return False
    tensors = model.architecture.tensors.items()
    layouts = [layout for name, layout in tensors if name.endswith("weight") and space.id in layout.names()]
    writing = sum(space.id in names_in(layout.items[dim]) for layout in layouts for dim in layout.outputs)
    reading = any(space.id in names_in(layout.items[dim]) for layout in layouts for dim in layout.inputs)
    return options.mlp is MlpSolver.ASSIGNED or (writing > 1 and reading)
