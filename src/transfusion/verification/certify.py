"""Certification: numerical tests of a table's claims on a live model in float64.

Random permutations of all free axes together must leave the outputs unchanged. A random permutation of each
fixed axis alone must change them. Axes of rotary pairs are rotated by random angles in the first test, and
permuted in the second. Vectors that the table calls scales must multiply activations; all other vectors must
be added to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import nn

from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Architecture, InnerPolicy, Policy, Residual
from transfusion.architecture.naming import Naming, without_part
from transfusion.architecture.table import Family, Symmetry
from transfusion.errors import ArchitectureError
from transfusion.families import register_file
from transfusion.matching.procrustes import random_pair_rotations
from transfusion.report.result_files import Result, ResultFiles
from transfusion.running.live_model import LiveModel, largest_difference, vector_effects
from transfusion.runtime.optional_libraries import require_library
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.untrusted_files import read_json

EXACT = 1e-9
"""Equal outputs differ by at most this."""
APART = 1e-6
"""Different outputs differ by more than this."""
_EFFECT = "its effect differs from that of a bias"


@dataclass(frozen=True)
class Check:
    """One test of a claim: the measured change, and whether there should be one."""

    what: str
    difference: float
    should_change: bool
    measured: str = "the outputs change"

    @property
    def passed(self) -> bool:
        return self.difference > APART if self.should_change else self.difference <= EXACT

    def __str__(self) -> str:
        wanted = f"more than {APART:g}" if self.should_change else f"at most {EXACT:g}"
        return f"{self.what}: {self.measured} by {self.difference:.2g}, expected {wanted}"


@dataclass(frozen=True, repr=False)
class Certificate(Result):
    """All tests on one model."""

    checks: tuple[Check, ...]

    def __rich__(self) -> Text:
        return Text("\n".join(f"{'✓' if check.passed else '✗'} {check}" for check in self.checks))

    def metadata(self) -> dict[str, Any]:
        """Return all checks as plain data."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {"passed": self.passed, "checks": checks}

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def difference(self) -> float:
        """The largest change of the outputs in the tests that should change nothing."""
        return max(check.difference for check in self.checks if not check.should_change)


def certify(live: LiveModel, *, seed: int = 5) -> Certificate:
    """Test every claim of a table on a live model. If a test fails, test each free axis alone.

    ``live`` is a model in float64 with its table, under the default policy (no axes tied), and ``seed`` that
    of the random permutations and rotations.

    >>> from transfusion.running.live_model import LiveModel
    >>> certify(LiveModel.of(transfusion.Model.open("models/a"))).passed
    True
    """
    checks = tuple(_checks(live, seed))
    if all(check.passed for check in checks):
        return Certificate(checks)
    return Certificate((*checks, *(check for check in free_axes(live, seed=seed) if not check.passed)))


def _checks(live: LiveModel, seed: int) -> Iterator[Check]:
    tied = _under(live, Policy(Residual.TIED))
    yield Check("all free axes, one map for the stream", _difference(tied, seed, shortcuts=False), False)
    both = _under(live, Policy(Residual.TIED, InnerPolicy.TIED))
    yield Check("the same, q·k and v·o together", _difference(both, seed), False)
    untied = _under(live, Policy())
    yield Check("all free axes, a map for every point of the stream", _difference(untied, seed), False)
    if any(cut.source != cut.target for cut in untied.architecture.shortcuts):
        plain = _difference(untied, seed, shortcuts=False)
        yield Check("the same with plain shortcuts", plain, True)
    spaces = live.architecture.spaces.values()
    for axis in sorted({one.axis for one in spaces if one.group is Symmetry.FIXED and one.size > 1}):
        yield Check(f"the fixed axis {axis}", _difference(_only(live, axis), seed), True)
    for axis in sorted({space.axis for space in live.architecture.rotary_spaces()}):
        permuted = _difference(_only(live, axis), seed)
        yield Check(f"the axis {axis}, permuted instead of rotated", permuted, True)
    yield from _scales(live)


def _scales(live: LiveModel) -> Iterator[Check]:
    """Check the scale that multiplies least and, of the other vectors, the one that multiplies most."""
    naming, architecture = Naming(live.family, live=True), live.architecture
    effects = {
        name: effect
        for parameter, effect in vector_effects(live.module, live.outputs).items()
        if (layout := architecture.tensors.get(name := without_part(naming.canonical(parameter))[0]))
        and layout.names()
    }
    if scales := {
        name: effects.get(name, 0.0) for name in architecture.scales
    }:  # an unused one shows nothing
        weakest = min(sorted(scales), key=scales.__getitem__)
        yield Check(f"the scale {weakest}", scales[weakest], True, _EFFECT)
    if added := [name for name in effects if name not in architecture.scales]:
        strongest = max(added, key=effects.__getitem__)
        yield Check(f"the vector {strongest}", effects[strongest], False, _EFFECT)


def free_axes(live: LiveModel, *, seed: int = 5) -> Iterator[Check]:
    """Yield a test of each free axis alone, with a tied stream, to find the axis that breaks the outputs."""
    tied = _under(live, Policy(Residual.TIED))
    for axis in sorted({space.axis for space in tied.architecture.free()}):
        alone = _only(tied, axis, Symmetry.PERMUTATION)
        yield Check(f"the free axis {axis}", _difference(alone, seed), False)
    for axis, group in {space.axis: space.group for space in tied.architecture.rotary_spaces()}.items():
        alone = _only(tied, axis, group)
        yield Check(f"the axis {axis}, rotated in pairs", _difference(alone, seed), False)


def _under(live: LiveModel, policy: Policy) -> LiveModel:
    return replace(live, architecture=live.architecture.under(policy))


def _only(live: LiveModel, axis: str, group: Symmetry | None = None) -> LiveModel:
    """Return the model with all fixed but one axis: permuted, or moved where it is of that group.

    An axis of one name may be free in one stack and not in another.
    """
    spaces = {}
    for id, space in live.architecture.spaces.items():
        moves = space.axis == axis and group in (None, space.group)
        spaces[id] = replace(space, group=(group or Symmetry.PERMUTATION) if moves else Symmetry.FIXED)
    return replace(live, architecture=replace(live.architecture, spaces=spaces))


def certify_file(
    file: Path,
    class_name: str,
    config: Path | None = None,
    *,
    output: Path | None = None,
    force: bool = False,
) -> Certificate:
    """Certify the first family of a file on a small model.

    ``class_name`` is ``module:Class``; or ``Class``, looked for in the file, then in transformers. ``config``
    is a JSON file with the settings of the small model; by default they are the file's ``EXAMPLE``.
    """
    record, files = RunRecord("verify"), ResultFiles.checked(output, force=force, inputs=(file, config))
    tables = register_file(file)
    settings = read_json(config) if config else getattr(tables, "EXAMPLE", None)
    if settings is None:
        raise ArchitectureError(
            f"{file}: it defines no EXAMPLE, the settings of a small model to test the table on",
            hint="give a file of settings as `config`, or add EXAMPLE = {...} to a file of Python",
        )
    module, _, name = class_name.rpartition(":")
    places = [import_module(module)] if module else [tables, require_library("transformers")]
    model = next((getattr(place, name) for place in places if hasattr(place, name)), None)
    if model is None:
        raise ArchitectureError(
            f"there is no class {name} in {' or '.join(place.__name__ for place in places)}",
            hint="give module:Class, with the module on Python's path",
        )
    found = certify_class(model, settings, tables.FAMILIES[0])
    return files.finish(found, record, {"architecture": str(file)})


def certify_class(
    model: type[nn.Module], settings: Mapping[str, Any], family: Family, *, seed: int = 1
) -> Certificate:
    """Build a small model of a class with random parameters, and certify a table on it."""
    config_class = getattr(model, "config_class", None)
    module: Any = model(config_class(**settings)) if config_class else model(**settings)
    config = module.config.to_dict() if config_class else settings
    randomise(module, seed)
    return certify(LiveModel.from_module(module.double().eval(), family, config))


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Draw every parameter at random. Activations stay of order one; norms and biases have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.3 * noise)
    return module


def random_move(architecture: Architecture, seed: int) -> Alignment:
    """Return random permutations of all free axes and random rotations of all rotary pairs."""
    metadata = Provenance(
        family=architecture.family,
        architecture=architecture.digest(),
        policy=architecture.policy,
        method="random",
        options={},
        seed=seed,
        source="",
        source_fingerprint="",
        target="",
        target_fingerprint="",
    )
    maps = {**random_maps(architecture, seed), **random_pair_rotations(architecture, seed)}
    return Alignment.of(maps, architecture, metadata)


def _difference(live: LiveModel, seed: int, *, shortcuts: bool = True) -> float:
    """Return the change of the outputs by a random alignment of all free axes."""
    alignment = random_move(live.architecture, seed)
    before = live.outputs()
    with live.moved(alignment, shortcuts=shortcuts):
        return largest_difference(live.expected(alignment, before), live.outputs())
