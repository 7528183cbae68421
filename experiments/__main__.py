"""The paper's tables and figures: python -m experiments NAME [--small]

python -m experiments --list                  all recipes
python -m experiments table-1 --small         the recipe on small models that are taught here
python -m experiments table-1 --device cuda   the paper's own bases and datasets, from the hub
python -m experiments all --small             every recipe
python -m experiments table-1 --dry-run       what would be trained, moved and measured
python -m experiments --write-docs            docs/experiments.md from the kept results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.recipes import PAIR, RECIPES
from transfusion.cli.console import out, print_error
from transfusion.errors import LibraryError, SettingError, TransfusionError


def parsed(arguments: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        "python -m experiments", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="a recipe, or all")
    parser.add_argument("--list", action="store_true", help="show the recipes")
    parser.add_argument("--small", action="store_true", help="small models, taught here")
    parser.add_argument("--seeds", type=int, default=1, help="how many times, each from its own seed")
    parser.add_argument(
        "--methods", nargs="+", help="instead of the recipe's; the barrier: NAME[:RESIDUAL[:SHORTCUTS]]"
    )
    parser.add_argument("--device", default="cpu", help="where models learn, are aligned and measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    parser.add_argument("--pair", type=int, nargs=2, default=PAIR, help="the barrier's two seeds")
    parser.add_argument("--digits", action="store_true", help="the barrier on scikit-learn's digits")
    parser.add_argument("-o", "--output", type=Path, help="where the result goes (experiments/results)")
    parser.add_argument("--figure", type=Path, help="where the figure goes (docs/pictures, if small)")
    parser.add_argument("--write-docs", action="store_true", help="write docs/experiments.md anew")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line. What models and data need is imported after the options are read."""
    given = sys.argv[1:] if arguments is None else arguments
    asked = parsed(given)
    try:
        if asked.list or not (asked.name or asked.write_docs):
            for one in RECIPES.values():
                out.print(f"{one.name:9} {one.title}: {one.kind}", markup=False)
            return 0
        if asked.seeds < 1:
            raise SettingError(f"seeds = {asked.seeds}: nothing would be done", hint="give 1 or more")
        try:
            from experiments.work import work
        except ModuleNotFoundError as error:
            raise LibraryError(
                f"the experiments need {error.name}, which is not installed",
                hint="pip install '.[demo,images,open-clip]', from a clone of the repository",
            ) from error
        work(asked, given)
    except TransfusionError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
