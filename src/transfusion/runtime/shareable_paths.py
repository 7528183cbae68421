"""Texts that are made to be shared, without absolute paths of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from os.path import abspath
from pathlib import Path

_PATH = re.compile(r"""(?<![^\s"'=(\[,])(?:'/[^'\n]+'|"/[^"\n]+"|/[^\s'",;:()\[\]]+)""")


def shareable_path(path: str, root: Path | None = None) -> str:
    """Return an absolute path relative to ``root``, or its last part if it lies elsewhere.

    Every other name is returned as it is.

    >>> shareable_path("/home/me/work/models/b", Path("/home/me/work"))
    'models/b'
    >>> shareable_path("/data/models/b", Path("/home/me/work")), shareable_path("org/b")
    ('b', 'org/b')
    """
    if not path.startswith("/"):
        return path
    place = Path(abspath(path))
    if root is not None:
        for start, prefix in ((Path(abspath(root)), ""), (Path(abspath(root)).parent, "../")):
            if start != Path("/") and place.is_relative_to(start):
                return f"{prefix}{place.relative_to(start)}"
    return place.name or path


def shareable_text(text: str, root: Path | None = None, known: Iterable[Path] = ()) -> str:
    """Return a text with `shareable_path` in place of every absolute path.

    ``known`` are paths that are recognised even if they contain spaces and are not quoted.

    >>> shareable_text("transfusion report /home/me/moved -o '/home/my page.html'")
    "transfusion report moved -o 'my page.html'"
    """
    if "/" not in text:
        return text
    for path in sorted({abspath(one) for one in known}, key=len, reverse=True):
        if path in text:
            text = re.sub(rf"{re.escape(path)}(?![^\s/'\",;:()])", shareable_path(path, root), text)

    def shortened(found: re.Match[str]) -> str:
        quote = found[0][0] if found[0][0] in "'\"" else ""
        return f"{quote}{shareable_path(found[0].strip(quote or None), root)}{quote}"

    return _PATH.sub(shortened, text)
