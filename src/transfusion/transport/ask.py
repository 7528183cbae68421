"""The function `ask`: what a fine-tune answers, in a file that serves every new base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transfusion import __version__
from transfusion.errors import MismatchError, SettingError
from transfusion.files.checkpoint import HeadersOnly, description
from transfusion.files.publishing import open_staging, require_writable
from transfusion.model.model import Model, input_files
from transfusion.model.pair import open_model
from transfusion.running.building import skeleton
from transfusion.running.probes.noised import is_denoiser
from transfusion.running.probes.probed_model import vocabulary
from transfusion.runtime.engines import require_device
from transfusion.runtime.settings import verb
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.lora_file import OtherParts
from transfusion.transport.finetunes import Finetune, open_finetune
from transfusion.transport.plan import TransportPlan
from transfusion.transport.refinement.asked import FORMAT as OF_TEXTS
from transfusion.transport.refinement.asked import Asked, reading_answers, require_named
from transfusion.transport.refinement.denoised import FORMAT as OF_LATENTS
from transfusion.transport.refinement.denoised import AskedDenoiser
from transfusion.transport.refinement.denoising import ask_about_latents
from transfusion.transport.refinement.language import ask_fine_tune, is_language_model
from transfusion.transport.settings import AskSettings, MovingSettings


@verb(AskSettings)
def ask(settings: AskSettings) -> Asked | AskedDenoiser:
    """Let a fine-tuned language model write texts and answer them, for `transport` with ``answers``.

    An adapter of a model that denoises makes latents, and predicts what noise was mixed into them.

    The answers are all of the fine-tune that a refinement needs, so they can be made where it is kept, and
    once for any number of new bases.

    >>> asked = transfusion.ask("models/llama/lora", base="models/llama/a", output="answers.safetensors")
    """
    require_device(settings.resources.device)
    a = open_model(settings.base, settings.config)
    tuned = open_finetune(settings.finetuned, settings.config, OtherParts.DROP)
    plan = TransportPlan.planned(a, a)
    if not (learns_by_answers(plan, tuned) or learns_denoising(plan, tuned)):
        raise SettingError(
            f"{tuned.label} is no language model and no adapter of a model that denoises, or brings a head",
            hint="leave it out: the transport itself asks other models, while B learns",
        )
    find = partial(answers_of, plan, tuned, settings)
    if settings.output is None:
        return find()
    path = Path(settings.output)
    roots = [one.checkpoint.root for one in (tuned, a)]
    require_writable(path, force=settings.force, inputs=input_files(*roots), folder=False)
    with open_staging(path, force=settings.force) as staging:
        asked = find(kept=staging.keep(f"texts-{_key(settings, tuned, a)}"))
        staging.begin()
        asked.save(staging.output / path.name)
    return asked


def _key(settings: AskSettings, tuned: Finetune, a: Model) -> str:
    """A hash of what decides the texts that a model writes, so that no run goes on with those of another."""
    text = json.dumps([__version__, settings.seed, tuned.fingerprint, a.fingerprint])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def base_in(answers: Path) -> Model:
    """Return the base of the fine-tune that was asked: its shapes and settings, without weights."""
    with reading_answers(answers) as (_, about):
        require_named(about, answers)
        return Model.of(HeadersOnly.described(about["shapes"], about["base"]))


def learns_by_answers(plan: TransportPlan, tuned: Finetune) -> bool:
    """Whether a refinement asks a fine-tune before B learns: language models, without heads of their own."""
    if not all(is_language_model(one) for one in {id(one): one for one in (plan.a, plan.b)}.values()):
        return False
    if isinstance(tuned, Model):
        return is_language_model(tuned)
    if tuned.kind.prompt:
        return False
    return not TransportPlan.planned(plan.a, plan.a).adapter(tuned, trust_base=True).carried


def learns_denoising(plan: TransportPlan, tuned: Finetune) -> bool:
    """Whether a refinement asks a fine-tune what it predicts of noised latents: adapters of denoisers."""
    if not isinstance(tuned, Adapter) or plan.alignment.other_shape or not is_denoiser(plan.a):
        return False
    return not TransportPlan.planned(plan.a, plan.a).adapter(tuned, trust_base=True).carried


def answers_of(
    plan: TransportPlan,
    tuned: Finetune,
    settings: MovingSettings | AskSettings,
    kept: Path | None = None,
) -> Asked | AskedDenoiser:
    """Return the answers of a fine-tune: those in the user's file, or it is asked.

    ``kept`` is a file name for texts of an interrupted run.
    """
    if learns_denoising(plan, tuned):
        return asked_denoiser_of(plan, tuned, settings)
    return asked_of(plan, tuned, settings, kept)


def asked_denoiser_of(
    plan: TransportPlan, tuned: Finetune, settings: MovingSettings | AskSettings
) -> AskedDenoiser:
    """Return what the adapter of a denoiser answers: as in the user's file, or it is asked."""
    if settings.calibrate is not None:
        raise SettingError(
            "`calibrate`: a model that denoises is asked about latents that it makes", hint="leave it out"
        )
    about = _about(plan, tuned)
    if (file := getattr(settings, "answers", None)) is not None:
        asked = AskedDenoiser.load(Path(file))
        _require_answers_of(asked.about, about, file)
        return asked
    assert isinstance(tuned, Adapter)
    on_a = TransportPlan.planned(plan.a, plan.a).adapter(tuned, trust_base=True)
    return ask_about_latents(
        plan.a, about, seed=2 * settings.seed, device=settings.resources.device, moved=on_a
    )


def _about(plan: TransportPlan, tuned: Finetune) -> dict[str, Any]:
    """Return who is asked, and the shapes of its base."""
    a = plan.a.to_run
    about: dict[str, Any] = {"finetuned": tuned.fingerprint, "base": a.fingerprint, "label": tuned.label}
    return {**about, "shapes": description((a.original or a).checkpoint)}


def require_answers(plan: TransportPlan, tuned: Finetune, file: str | Path) -> None:
    """Refuse answers of another fine-tune by the header of their file."""
    kind = OF_LATENTS if learns_denoising(plan, tuned) else OF_TEXTS
    with reading_answers(Path(file), kind) as (_, found):
        _require_answers_of(found, _about(plan, tuned), file)


def _require_answers_of(found: Mapping[str, Any], about: Mapping[str, Any], file: str | Path) -> None:
    """Refuse answers of another fine-tune, or of one of another base."""
    require_named(found, Path(file))
    for name in {"finetuned", "base", "tokens"} & about.keys():
        if found.get(name) != about[name]:
            raise MismatchError(
                f"{file}: these are answers of {found['label']}, and {about['label']} is another model",
                hint="`transfusion ask` makes the answers of this one",
            )


def asked_of(
    plan: TransportPlan,
    tuned: Finetune,
    settings: MovingSettings | AskSettings,
    kept: Path | None = None,
) -> Asked:
    """Return the answers of a language model: those in the user's file, or it is asked."""
    a = plan.a.to_run  # in its own tokens, if B's are quite others
    about = _about(plan, tuned)
    about["tokens"] = vocabulary(skeleton(a))
    if (file := getattr(settings, "answers", None)) is not None:
        asked = Asked.load(Path(file))
        _require_answers_of(asked.about, about, file)
        return asked
    on_a = TransportPlan.planned(a, a)
    moved = on_a.move((tuned,), trust_base=True) if isinstance(tuned, Adapter) else None
    asked_model = plan.in_b_vocabulary(tuned).to_run if isinstance(tuned, Model) else moved
    assert asked_model is not None
    calibrate = None if settings.calibrate is None else Path(settings.calibrate).resolve()
    return ask_fine_tune(
        a,
        asked_model,
        about,
        seed=settings.seed,
        device=settings.resources.device,
        calibrate=calibrate,
        kept=kept,
    )
