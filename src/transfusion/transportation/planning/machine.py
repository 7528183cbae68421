"""Machines: how fast one core and its surroundings are, by a few constants that a file can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from transfusion.errors import SettingError
from transfusion.matching.solvers.assignment import HUGE
from transfusion.runtime.untrusted_files import read_json, validate
from transfusion.transportation.planning.assumptions import COMPUTED, VISIT
from transfusion.transportation.planning.schedule import shared
from transfusion.transportation.planning.work import Work, WorkItem

_KEY = "transfusion-machine"
_TIMES = ("assignments", "candidates")
_Constant: TypeAlias = Annotated[float, Field(gt=1e-15, lt=1e18)]


@dataclass(frozen=True)
class Machine:
    """What one node does in a second. Everything but storage is by one core while the others rest."""

    cores: int
    product: float
    """Operations of products in float32."""
    together: float
    """The share of that speed that each core keeps when all of them work."""
    summing: float
    """Numbers of a gain to which a product is added."""
    reading: float
    """Bytes of bfloat16 weights from files that are in memory already, read and converted to float32."""
    hashing: float
    """Bytes of such files, looked through and hashed."""
    picking: float
    """Numbers of a matrix picked column by column."""
    placing: float
    """Columns of which is worked out where they come from."""
    moving: float
    """Numbers of a tensor moved by maps of both of its dimensions."""
    comparing: float
    """Numbers multiplied with each other and summed up."""
    eigen: float
    """The cubes of the sizes of matrices whose eigenvalues are found."""
    fresh: float
    """Bytes of memory that the system hands out anew."""
    storage: float
    """Bytes from the disk."""
    writing: float
    """Bytes to the disk."""
    assignments: Mapping[int, float]
    """Not in a second: how many seconds an assignment takes, by size."""
    candidates: Mapping[int, float]
    """The same among candidates, as huge ones are solved."""

    def assigning(self, size: int) -> float:
        """Seconds of one assignment; between the sizes measured, and beyond them, by powers of the size."""
        times = self.candidates if size >= HUGE else self.assignments
        known = sorted(times)
        low, high = next(((low, high) for low, high in pairwise(known) if size <= high), known[-2:])
        return times[low] * math.pow(size / low, max(0.0, _power(times, low, high)))

    @property
    def growth(self) -> float:
        """The power of its size by which an assignment takes longer, at the two largest sizes measured."""
        low, high = sorted(self.assignments)[-2:]
        return _power(self.assignments, low, high)

    def seconds(self, work: Work) -> float:
        """How long one core takes."""
        return self._products(work) + self._rest(work)

    def seconds_alone(self, task: WorkItem, cores: int) -> float:
        """How long a task takes that has all cores, which share the rows of its products."""
        share = min(1.0, shared(task.height, cores) / self.pace(cores))
        apart = task.work.apart / self.reading
        return share * (self._products(task.work) + apart) + self._rest(task.work) - apart

    def seconds_divided(self, work: Work, shares: int) -> float:
        """How long it takes if so many workers compute rows of its products, each reading for itself."""
        return self._products(work) / shares + self._rest(work)

    def with_new_memory(self, share: float) -> Machine:
        """The same if a share of what is read, moved, picked or summed goes into memory that the system hands
        out anew: two bytes for each of bfloat16, four for a number, and eight for one of a gain, which the
        solver copies.
        """
        new = {"reading": COMPUTED / 2, "moving": COMPUTED, "picking": COMPUTED, "summing": 2 * COMPUTED}
        slower: dict[str, Any] = {
            name: 1 / (1 / getattr(self, name) + share * count / self.fresh) for name, count in new.items()
        }
        return replace(self, **slower)

    def pace(self, busy: int) -> float:
        """The share of its speed that a core keeps while so many of its node are busy."""
        return 1.0 if busy == 1 else max(self.together, 1 / busy)

    def _products(self, work: Work) -> float:
        return work.flops / self.product + work.summed / self.summing

    def _rest(self, work: Work) -> float:
        return (
            work.read / self.reading
            + work.hashed / self.hashing
            + work.picked / self.picking
            + work.placed / self.placing
            + work.moved / self.moving
            + work.compared / self.comparing
            + work.eigen / self.eigen
            + work.visits * VISIT
            + sum(count * self.assigning(size) for size, count in work.assignments.items())
        )

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for a file."""
        times = {
            name: {str(size): seconds for size, seconds in sorted(getattr(self, name).items())}
            for name in _TIMES
        }
        return {_KEY: 1, **asdict(self), **times}

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """The constants that `--measure-machine` wrote, here or elsewhere."""
        names = [one.name for one in fields(cls)]
        try:
            info = read_json(Path(path), SettingError)
            if _KEY not in info:
                raise ValueError("it holds something else")
            if info[_KEY] != 1 or not {*names, *_TIMES} <= info.keys():
                raise ValueError("it is of another release")
            times: dict[str, Any] = {
                name: {int(n): float(s) for n, s in info[name].items()} for name in _TIMES
            }
            rest: dict[str, Any] = {
                name: float(info[name]) for name in names if name not in (*_TIMES, "cores")
            }
            validate(info, dict[str, int | _Constant | dict[str, _Constant]], "", hint="", error=SettingError)
            machine = cls(**{**rest, **times, "cores": int(info["cores"])})
            numbers = [*rest.values(), machine.cores]
            numbers += [number for one in times.values() for pair in one.items() for number in pair]
            if min(map(len, times.values())) < 2 or not all(
                number > 0 and math.isfinite(number) for number in numbers
            ):
                raise ValueError("a constant that is not positive, or fewer than two assignments")
        except (SettingError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            reason = str(error).splitlines()[0]
            raise SettingError(
                f"{path}: no file of a machine's constants that can be used here ({reason})",
                hint="write one on that machine: transfusion plan --measure-machine -o FILE.json",
            ) from error
        return machine


def _power(times: Mapping[int, float], low: int, high: int) -> float:
    """The power of its size by which an assignment takes longer between two sizes."""
    return math.log(times[high] / times[low]) / math.log(high / low)
