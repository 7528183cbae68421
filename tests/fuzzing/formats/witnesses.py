"""Faults made on purpose, by the one file that may do anything: a table given as ``--architecture``.

They show that the fuzzer notices what it looks for. This is no format: nothing here is from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fuzzing.cases import Build, Command, Made, Place

COUNT = 0
DEEDS = {
    "waits for ever": ("import time; time.sleep(1000)", "hangs"),
    "computes for ever": ("while True: pass", "hangs"),
    "ends the process": ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "the process ended: -7"),
    "runs a program": ("import os; os.system('true')", "code ran: os.system"),
    "makes the canary": ("open({canary!r}, 'w').close()", "code ran: the canary is there"),
    "reads outside": ("open({outside!r} + '/secret.txt').read()", "read outside"),
    "maps a file outside": (
        "import safetensors; safetensors.safe_open({outside!r} + '/model.safetensors', 'np')",
        "read outside: model.safetensors",
    ),
    "changes an input": ("open('table.py', 'a').write('#')", "changed or made where nothing may be written"),
    "writes beside the inputs": ("open('new', 'w').close()", "changed or made where nothing may be written"),
    "raises what is no exception": ("raise BaseException('panic')", "raised BaseException: panic"),
    "says that it was not expected": (
        "import sys; print('unexpected: KeyError', file=sys.stderr)",
        "an unexpected error",
    ),
    "leaves something behind": (
        "open({outputs!r} + '/x', 'w').close(); raise ValueError",
        "left behind after an error: x",
    ),
    "exits with another code": ("raise SystemExit(5)", "exit code 5"),
    "exits without a hint": ("raise SystemExit(1)", "an error without a hint"),
    "fails": ("raise SystemExit(2)", "refused, although nothing is wrong with it"),
    "takes all memory": ("bytearray(2**32)", "refused, although nothing is wrong with it"),
}


def _does(deed: str) -> Build:
    def build(place: Place) -> Sequence[Command]:
        where: dict[str, Any] = {
            "canary": str(place.canary),
            "outside": str(place.outside),
            "outputs": str(place.outputs),
        }
        table = place.write("table.py", deed.format(**where))
        return [place.transport(more=["--architecture", table], done=True)]

    return build


def made() -> Iterator[Made]:
    for title, (deed, _) in DEEDS.items():
        yield Made(title, _does(deed))
