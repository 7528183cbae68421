"""The verb ``apply``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfusion.cli.command import Verb
from transfusion.cli.console import show
from transfusion.transport.settings import ApplySettings


def _show(result: Any, values: Mapping[str, Any], as_json: bool) -> None:
    written = str(values["output"])
    show({"written": written}, as_json, f"π(A) written to {written}")


APPLY = Verb(
    "apply",
    ApplySettings,
    "Write π(A): the same function as A, its units in B's order.",
    _show,
    console=("as_json", "quiet"),
    written=True,
)
