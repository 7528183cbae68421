"""Settings of a verb: one dataclass, from which all else derives.

Its fields are the parameters of the Python function, the options of the command line, the entries of the
record and the rows of the page of verbs. A field is declared once::

    @dataclass(frozen=True)
    class TransportSettings(Common):
        finetuned: Finetune = argument("the fine-tune of A")
        _: KW_ONLY
        alpha: float = setting(1.0, "how much of the change to add", kind=float)

    @verb(TransportSettings)
    def transport(settings: TransportSettings) -> Output: ...

    transport("models/tuned", alpha=0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from inspect import get_annotations, signature
from typing import Any, ParamSpec, TypeVar

from transfusion.errors import SettingError

MODELS, RESOURCES = "Models", "Resources"
"""Groups of the help that most verbs have."""
A = "A: the base that was fine-tuned; a folder, a file or a hub id."
B = "B: the new release of the base; a folder, a file or a hub id."
CONFIG = "The config.json of weights that come without one."
ARCHITECTURE = "A table of your own: a text, or a file of Python."
"""Help of settings that most verbs have."""
BEFORE_VERBS: list[Callable[[Any], None]] = []
"""Functions that are called with the settings of every verb before it runs."""
_KEY = "setting"
_Parameters = ParamSpec("_Parameters")
_Settings = TypeVar("_Settings")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Setting:
    """What is said of a field: its help, and how it is written on the command line."""

    help: str
    kind: type = str
    """The type of its value on the command line. A dataclass of settings stands for all of its own."""
    flag: str | None = None
    """How it is written, such as ``--output,-o``; the default is the field's name with dashes."""
    parse: Callable[[str], Any] | None = None
    """Makes the value of what was typed."""
    choices: Collection[str] = ()
    shown: str | bool = False
    """The default that the help shows, in words; True for the default itself."""
    metavar: str | None = None
    panel: str | None = None
    """The group of the help that it stands in."""
    least: float | None = None
    most: float | None = None
    many: bool = False
    """Whether it may be given several times."""
    only: Collection[str] = ()
    """Of a dataclass of settings: those that the verb takes; the default is all."""
    typed: bool = True
    """Whether it can be given on the command line."""
    recorded: bool = True
    """Whether it decides the result, so that a record keeps it."""


def setting(default: Any, help: str, **about: Any) -> Any:
    """Declare an optional field; a switch or a number as its default says of which kind it is."""
    if isinstance(default, bool | int | float):
        about.setdefault("kind", type(default))
    return field(default=default, metadata={_KEY: Setting(help, **about)})


def argument(help: str, **about: Any) -> Any:
    """Declare a field that must be given."""
    return field(metadata={_KEY: Setting(help, **about)})


def described(settings: type[Any]) -> dict[str, tuple[Setting, Any]]:
    """Return the settings of a verb with their defaults, MISSING if there is none.

    Those that must be given come first, and its own before those that it shares with others.
    """
    own = [name for level in settings.__mro__ for name in get_annotations(level)]
    said = {one.name: (one.metadata[_KEY], one.default) for one in fields(settings) if _KEY in one.metadata}
    return {
        name: said[name]
        for name in sorted(said, key=lambda one: (said[one][1] is not MISSING, own.index(one)))
    }


def recorded(settings: Any) -> dict[str, Any]:
    """Return the settings that decide the result and differ from their defaults, as a record keeps them."""
    return {
        name: value
        for name, (about, default) in described(type(settings)).items()
        if about.recorded and (value := getattr(settings, name)) != default
    }


def verb(
    settings: Callable[_Parameters, _Settings],
) -> Callable[[Callable[[_Settings], _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator: the function takes the fields of its settings as parameters."""

    def around(run: Callable[[_Settings], _Result]) -> Callable[_Parameters, _Result]:
        from transfusion.runtime.progress import following, of_caller

        names = signature(settings).parameters

        @wraps(run)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            _refuse_unknown(run.__name__, kwargs, names)
            if "progress" in names and "progress" not in kwargs and (shown := of_caller()) is not None:
                kwargs["progress"] = shown
            chosen = settings(*args, **kwargs)
            for prepare in BEFORE_VERBS:
                prepare(chosen)
            with following(getattr(chosen, "progress", None)):
                return run(chosen)

        call.settings = settings  # type: ignore[attr-defined]
        call.__signature__ = signature(settings).replace(  # type: ignore[attr-defined]
            return_annotation=run.__annotations__.get("return", None)
        )
        call.__doc__ = _documented(run.__doc__ or "", settings)
        return call

    return around


def _refuse_unknown(verb: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    from transfusion.runtime.resources import Resources

    for name in given:
        if name not in names and "resources" in names and name in Resources.__dataclass_fields__:
            raise SettingError(
                f"{verb} has no parameter {name!r}", hint=f"give resources=transfusion.Resources({name}=…)"
            )
        if name not in names:
            close = get_close_matches(name, names, 1)
            raise SettingError(
                f"{verb} has no parameter {name!r}",
                hint=f"did you mean {close[0]!r}?" if close else f"help(transfusion.{verb}) shows all",
            )


def _documented(text: str, settings: Any) -> str:
    """Return a docstring with a line for every setting before its examples."""
    about, examples, rest = text.partition("\n    >>> ")

    def default_of(one: Setting, default: Any) -> str:
        shown = one.shown if isinstance(one.shown, str) else repr(default)
        return "" if default is MISSING else f" Default: {shown}."

    lines = [
        f"    ``{name}``: {one.help}{default_of(one, default)}"
        for name, (one, default) in described(settings).items()
    ]
    return "\n".join([about.rstrip(), "", *lines, ""]) + examples + rest
