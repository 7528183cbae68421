"""What must be true after every command line, whatever it was given."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fuzzing.cases import Command, Place
from fuzzing.seeds import MARK

SCRIPT = "<script>alert(1)</script>"
PROGRAMS = frozenset(
    [
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "subprocess.Popen",
        "pty.spawn",
        "socket.connect",
        "socket.getaddrinfo",
    ]
)
"""What Python tells its auditors when another program is started, or the network is asked."""


@dataclass
class Watch:
    """What Python tells of files that are opened and programs that are started; one for the whole process."""

    outside: Path
    on: bool = False
    info: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event in PROGRAMS:
            self.info.append(f"code ran: {event}{arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(f"{self.outside}{os.sep}"):
                self.info.append(f"read outside: {path}")

    def __enter__(self) -> Watch:
        self.info.clear()
        self.on = True
        return self

    def __exit__(self, *about: object) -> None:
        self.on = False


class Sentry:
    """What the system tells of files that are opened in a folder, also by libraries that are no Python.

    Only Linux does; elsewhere nothing is checked.
    """

    _OPENED = 0x20

    def __init__(self, folder: Path) -> None:
        self._file = -1
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            self._file = libc.inotify_init1(os.O_NONBLOCK)
            libc.inotify_add_watch(self._file, os.fsencode(folder), self._OPENED)

    def seen(self) -> list[str]:
        """The names of the files that were opened since this was asked last."""
        try:
            info = os.read(self._file, 2**16) if self._file >= 0 else b""
        except BlockingIOError:
            return []
        names = []
        while info:
            (length,) = struct.unpack_from("I", info, 12)
            names.append(info[16 : 16 + length].rstrip(b"\0").decode())
            info = info[16 + length :]
        return sorted({name for name in names if name})  # the folder itself may be looked at


@dataclass(frozen=True)
class Ran:
    """One command line, and what became of it."""

    command: Command
    code: int | None
    """What it exited with; none, if it did not."""
    out: str
    err: str
    error: str = ""
    """What was raised, if it was not an exit."""
    trace: str = ""
    """Where."""


def faults(ran: Ran, place: Place, before: dict[str, str], info: list[str], opened: list[str]) -> list[str]:
    """Everything that is wrong."""
    found = [*dict.fromkeys(info), *(f"read outside: {name}" for name in opened)]
    if place.canary.exists():
        found.append("code ran: the canary is there")
    found += _changed(before, state(place))
    found += _manners(ran)
    found += _outputs(ran, place)
    return found


def state(place: Place) -> dict[str, str]:
    """The content of everything that must stay as it is, by path: inputs, seeds, what is outside."""
    root = place.world.root
    skipped = str(place.outputs)
    found: dict[str, str] = {}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if os.path.join(folder, name) != skipped]
        for name in [*names, *files]:
            path = Path(folder, name)
            if place.outside in path.parents:
                found[str(path)] = str(path.lstat().st_mtime_ns)  # opened by nobody, us included
            elif path.is_file() and not path.is_symlink():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[str(path)] = str(path.lstat().st_mode)
    return found


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return [f"changed or made where nothing may be written: {path}" for path in paths]


WRITTEN = {"config.json", "open_clip_config.json", "adapter_config.json", "transfusion.json"}
"""What the program writes itself; tokenizers and the like are B's, and are copied as they are."""


def _manners(ran: Ran) -> list[str]:
    """Exit codes, and what is said to the user."""
    found = []
    if ran.error:
        found.append(f"raised {ran.error}")
    elif ran.code not in (0, 1, 2, 3, 4):
        found.append(f"exit code {ran.code}")
    if "unexpected:" in ran.err or "Traceback" in ran.err or "panicked" in ran.err:
        found.append("an unexpected error")
    if ran.code in (1, 4) and "hint:" not in ran.err:
        found.append("an error without a hint")
    if odd := {letter for letter in ran.out + ran.err if not letter.isprintable() and letter != "\n"}:
        found.append(f"characters that may steer a terminal: {sorted(odd)}")
    if ran.command.refused and ran.code == 0:
        found.append("not refused")
    if ran.command.done and ran.code != 0:
        found.append("refused, although nothing is wrong with it")
    return found


def _outputs(ran: Ran, place: Place) -> list[str]:
    there = sorted(place.outputs.iterdir())
    if ran.code != 0:
        return [f"left behind after an error: {path.name}" for path in there]
    found = [f"left behind: {path.name}" for path in there if path != ran.command.output]
    for file in (path for path in place.outputs.rglob("*") if path.is_file()):
        if file.stat().st_size > 2**24:
            found.append(f"{file.name} has {file.stat().st_size} bytes")
            continue
        content = file.read_bytes()
        if MARK.tobytes() in content or b"SECRET-31415926" in content:
            found.append(f"what is outside stands in {file.name}")
        if file.suffix == ".html" and SCRIPT.encode() in content:
            found.append(f"a script of an input stands in {file.name}")
    if ran.command.output is not None and not ran.command.output.exists():
        return [*found, "exit code 0, and no output"]
    if ran.command.tensors is not None:
        assert ran.command.output is not None
        found += _tensors(ran.command.output, ran.command.tensors)
    if ran.command.loads and ran.command.output is not None:
        found += _loaded(ran.command.output)
    return found


def _tensors(output: Path, expected: frozenset[str]) -> list[str]:
    """Every tensor exactly once, all of them numbers, and an index that tells the truth."""
    import torch
    from safetensors import safe_open

    from transfusion.transport.record import PI_FILE

    holding: dict[str, list[str]] = {}
    found: list[str] = []
    files = sorted(output.rglob("*.safetensors")) if output.is_dir() else [output]
    for file in (one for one in files if one != output / PI_FILE):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                holding.setdefault(name, []).append(
                    str(file.relative_to(output)) if output.is_dir() else file.name
                )
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    found.append(f"{name} of the output is not finite")
    lost, new = sorted(expected - holding.keys()), sorted(holding.keys() - expected)
    found += [f"{len(lost)} tensors lost, such as {lost[0]}"] if lost else []
    found += [f"{len(new)} tensors that nobody asked for, such as {new[0]}"] if new else []
    found += [f"{name} is in {files}" for name, files in holding.items() if len(files) > 1]
    for index in output.glob("*.index.json") if output.is_dir() else ():
        placed = json.loads(index.read_text())["weight_map"]
        if {name: [file] for name, file in placed.items()} != holding:
            found.append("the index does not tell where the tensors are")
    for file in output.glob("*.json") if output.is_dir() else ():
        if file.name in WRITTEN or file.name.endswith(".index.json"):
            found += _json(file)
    return found


def _loaded(output: Path) -> list[str]:
    """Whether the library that it was written for takes the output."""
    from transfusion.model.model import Model
    from transfusion.running.live_model import LiveModel

    try:
        LiveModel.of(Model.open(output))
    except Exception as error:
        return [f"the output does not load: {type(error).__name__}: {error!s:.200}"]
    return []


def _json(file: Path) -> list[str]:
    """JSON that others can read: no NaN, no infinity."""

    def refuse(word: str) -> float:
        raise ValueError(word)

    try:
        json.loads(file.read_text(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        return [f"{file.name} of the output is no JSON ({str(error)[:80]})"]
    return []
