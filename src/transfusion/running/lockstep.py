"""Several forward passes side by side, which go through a module unit by unit together.

Every pass runs on a thread of its own, and only some of them at a time. Where weights are streamed, a pass
waits in front of each unit until all others are there. The unit is then loaded once, for all of them. The
hidden states of all passes are in memory meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from transfusion.running.streaming import StreamedModule


def run_side_by_side(
    run: Callable[[int], None], count: int, workers: int, streamed: StreamedModule | None = None
) -> None:
    """Call ``run(number)`` for every number below ``count``, some at a time, each on one thread of torch."""
    steps = _Lockstep(count, workers)

    def pass_through(number: int) -> None:
        torch.set_num_threads(1)
        steps.guard(lambda: run(number))

    threads = [threading.Thread(target=pass_through, args=(number,)) for number in range(count)]
    before = torch.get_num_threads()
    try:
        with nullcontext() if streamed is None else streamed.meeting(steps.wait_for_all):
            _run(threads, steps)
    finally:
        torch.set_num_threads(before)
    if steps.error is not None:
        raise steps.error


def _run(threads: list[threading.Thread], steps: _Lockstep) -> None:
    """Run all threads; an interrupt stops those that still run at their next unit."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:
        steps.stop(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise


class _StoppedError(Exception):
    """Another pass has failed."""


class _Lockstep:
    """Lets ``workers`` passes run at a time, and all of them meet in front of every unit."""

    def __init__(self, count: int, workers: int) -> None:
        self.error: BaseException | None = None
        self._members, self._free = count, max(1, workers)
        self._waiting = self._round = 0
        self._change = threading.Condition()

    def guard(self, run: Callable[[], None]) -> None:
        """Run one pass; an error ends all of them."""
        try:
            self._take_turn()
            run()
        except _StoppedError:
            pass
        except BaseException as error:
            self.stop(error)
        finally:
            with self._change:
                self._members -= 1
                self._free += 1
                self._change.notify_all()

    def stop(self, error: BaseException) -> None:
        """End all passes, because of an error in one of them or an interrupt."""
        with self._change:
            self.error = self.error or error
            self._change.notify_all()

    def wait_for_all(self, load: Callable[[], None]) -> None:
        """Wait until every pass is here; the last one to come loads what all of them need."""
        with self._change:
            self._waiting += 1
            self._free += 1
            self._change.notify_all()
            here = self._round
            while self._round == here and self._waiting < self._members:
                self._wait()
            if self._round == here:
                load()
                self._waiting, self._round = 0, self._round + 1
                self._change.notify_all()
        self._take_turn()

    def _take_turn(self) -> None:
        with self._change:
            while not self._free:
                self._wait()
            if self.error is not None:
                raise _StoppedError
            self._free -= 1

    def _wait(self) -> None:
        if self.error is not None:
            raise _StoppedError
        self._change.wait()
