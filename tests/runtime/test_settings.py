"""Settings: one dataclass gives the Python function, the command line and the record."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from inspect import signature

import pytest
import typer
from typer.testing import CliRunner

import transfusion
from transfusion.cli.command import Verb, command
from transfusion.errors import SettingError
from transfusion.runtime.progress import SILENT, Progress, phase
from transfusion.runtime.settings import argument, recorded, setting, verb


@dataclass(frozen=True)
class Place:
    jobs: int = setting(1, "Threads.", kind=int, least=1)
    device: str = setting("cpu", "Where.", shown=True)


@dataclass(frozen=True, kw_only=True)
class Shared:
    force: bool = setting(False, "Replace.", kind=bool, recorded=False)
    place: Place = setting(Place(), "Where to compute.", kind=Place, only=("jobs",), recorded=False)
    progress: Progress = setting(SILENT, "Follows the run.", typed=False, recorded=False)


@dataclass(frozen=True)
class MoveSettings(Shared):
    model: str = argument("The model.", metavar="MODEL")
    _: KW_ONLY
    alpha: float = setting(1.0, "How much.", kind=float, least=0, most=2)
    beta: float = setting(1.0, "Another.", kind=float)
    how: str = setting("sum", "The rule.", choices=("sum", "mean"))
    weights: tuple[float, ...] = setting(
        (), "Weights.", parse=lambda text: tuple(float(one) for one in text.split(","))
    )


@verb(MoveSettings)
def move(settings: MoveSettings) -> MoveSettings:
    """Move a model.

    >>> move("m")
    """
    with phase("moving"):
        return settings


def run(monkeypatch, *words):
    """Return exit code, printed text and the settings that the verb got from the command line."""
    got = []
    app = typer.Typer()
    app.command()(
        command(
            Verb(
                "move",
                MoveSettings,
                "Move.",
                lambda result, values, as_json: got.append(result),
                ("as_json",),
            )
        )
    )
    monkeypatch.setattr(transfusion, "move", move, raising=False)
    found = CliRunner().invoke(app, list(words))
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output, got[0] if got else None


def test_the_function_takes_the_fields_as_parameters():
    assert move("m", alpha=0.5) == MoveSettings("m", alpha=0.5)
    assert list(signature(move).parameters)[:1] == ["model"]
    assert "``alpha``: How much." in (move.__doc__ or "")


def test_a_misspelled_parameter_is_refused_with_the_right_one():
    with pytest.raises(SettingError, match="move has no parameter 'alhpa'.*\n.*did you mean 'alpha'"):
        move("m", alhpa=1)


def test_phases_are_followed_by_the_progress_that_was_given():
    seen = []

    class Seen(Progress):
        def bar(self, total=None, text=""):
            seen.append(text)
            return super().bar(total, text)

    move("m", progress=Seen())
    assert seen == ["moving"]


def test_a_record_keeps_what_decides_the_result():
    assert recorded(MoveSettings("m", alpha=0.5, force=True)) == {"model": "m", "alpha": 0.5}


def test_options_derive_from_the_fields(monkeypatch):
    code, _, got = run(
        monkeypatch, "m", "--alpha", "0.5", "--how", "mean", "--weights", "1,2", "--jobs", "3", "--force"
    )
    assert code == 0
    assert got.model == "m"
    assert (got.alpha, got.how, got.weights, got.place, got.force) == (
        0.5,
        "mean",
        (1.0, 2.0),
        Place(3),
        True,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--how", "best"], "'best' is not one of sum, mean"),
        (["m", "--alpha", "3"], "not between 0 and 2"),
        (["m", "--beta", "nan"], "must be finite"),
        (["m", "--device", "cuda"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_wrong_values_are_refused(monkeypatch, words, said):
    code, text, got = run(monkeypatch, *words)
    assert (code, got) == (2, None)
    assert said in " ".join(text.replace("│", " ").split())
