"""Flags that several verbs share, made into what they stand for before a verb sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def given(**makers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let parameters of a verb be made of flags: on the command line, those of its maker are in its place.

    >>> def place(host: str = "here", port: int = 1) -> str:
    ...     return f"{host}:{port}"
    >>> @given(where=place)
    ... def call(where: str, loud: bool = False) -> str:
    ...     return where.upper() if loud else where
    >>> list(signature(call).parameters), call(port=2, loud=True)
    (['host', 'port', 'loud'], 'HERE:2')

    A maker may have parameters that are made of flags as well, and two may share a flag.
    """

    def around(verb: Callable[..., Any]) -> Callable[..., Any]:
        flags = {flag.name: flag for flag in _flags(verb, makers)}
        usual = {name: flag.default for name, flag in flags.items() if flag.default is not Parameter.empty}

        @wraps(verb)
        def run(**said: Any) -> Any:
            known = {**usual, **said}
            own = {name: known[name] for name in signature(verb).parameters if name not in makers}
            for name, maker in makers.items():
                own[name] = maker(**{flag: known[flag] for flag in signature(maker).parameters})
            return verb(**own)

        run.__signature__ = Signature(list(flags.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
        return run

    return around


def _flags(verb: Callable[..., Any], makers: dict[str, Callable[..., Any]]) -> Iterator[Parameter]:
    """The parameters that the command line has, by name, those of makers in place of what they make."""
    parameters = signature(verb).parameters
    info = {name: one.annotation for name, one in parameters.items() if name not in makers}
    kinds = get_type_hints(  # of these alone: what makers make may be of a type that is imported late
        type("Flags", (), {"__annotations__": info}), verb.__globals__, include_extras=True
    )
    for name, parameter in parameters.items():
        if name in makers:
            yield from _flags(makers[name], {})
        else:
            yield parameter.replace(annotation=kinds[name], kind=Parameter.KEYWORD_ONLY)
