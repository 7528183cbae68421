"""Run cases again: ``python -m fuzzing FORMAT [NUMBER...]``; without numbers, all of a format."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fuzzing import FORMATS, Runner, cases
from fuzzing.formats import WITNESS


def main(format: str, *numbers: str) -> int:
    chosen = [int(number) for number in numbers] or [case.number for case in cases(format)]
    faulty = 0
    with tempfile.TemporaryDirectory() as place, Runner(Path(place)) as runner:
        for number in chosen:
            outcome = runner.run(format, number)
            faulty += bool(outcome.faults)
            if outcome.faults or numbers:
                print(outcome, flush=True)
    print(f"{len(chosen)} cases, {faulty} of them with faults")
    return int(faulty > 0)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in (*FORMATS, WITNESS):
        sys.exit(f"python -m fuzzing FORMAT [NUMBER...], where FORMAT is one of {', '.join(FORMATS)}")
    sys.exit(main(*sys.argv[1:]))
