"""What ``verify`` and ``inspect --propose`` do: claims about symmetries, tried on live models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfusion.cli.console import command, err, out, print_json
from transfusion.cli.shared import files_of, require_json
from transfusion.errors import VerificationError

if TYPE_CHECKING:
    from transfusion.runtime.run_record import RunRecord


@dataclass(frozen=True)
class VerifyRun:
    """What becomes of a result of ``verify``: a proof that fails is a result, too."""

    output: Path | None
    force: bool
    as_json: bool
    record: RunRecord

    @classmethod
    def begun(cls, output: Path | None, inputs: Iterable[Path], force: bool, as_json: bool) -> VerifyRun:
        """Before the work: the place is looked at, and the time."""
        from transfusion.runtime.run_record import RunRecord

        require_json(output, inputs, force=force)
        return cls(output, force, as_json, RunRecord("verify", command()))

    def info(self, result: dict[str, Any]) -> None:
        """Write it, and print it for programs, as far as that was asked for; people have read it by now."""
        from transfusion.checkpoint.publishing import publish_file, write_json

        whole = self.record.of(result)
        if self.output is not None:
            publish_file(self.output, lambda staged: write_json(staged, whole), force=self.force)
        if self.as_json:
            print_json(whole)
        elif self.output is not None:
            out.print(f"written to {self.output}", markup=False)


def draft(model: str, config: Path | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Propose a table, and write or print it with its certificate."""
    from transfusion.checkpoint.publishing import publish_file, require_writable, write_text
    from transfusion.verification.drafting.draft_from_folder import propose_for

    if output is not None:
        require_writable(output, force=force, inputs=files_of(model), folder=False)
    proposal = propose_for(model, config=config).require()
    checks = proposal.certificate.checks
    if output is not None:
        publish_file(output, lambda staged: write_text(staged, proposal.text), force=force)
    if as_json:
        written = {} if output is None else {"written": str(output)}
        info = [{**asdict(check), "passed": check.passed} for check in checks]
        print_json({**written, "certified_on": proposal.certified_on, "checks": info, "text": proposal.text})
        return
    if output is None:
        print(proposal.text, end="")
    messages = err if output is None else out
    for check in checks:
        messages.print(f"✓ {check}", markup=False)
    messages.print(f"certified on {proposal.certified_on}", markup=False)
    if output is not None:
        out.print(f"draft written to {output}", markup=False)


def prove(a: str, via: str, config: Path | None, tolerance: float, proof: VerifyRun) -> None:
    """Run A and π(A), and fail if they differ."""
    from transfusion.alignment.alignment import Alignment
    from transfusion.verification.equivalence import verified_model
    from transfusion.verification.equivalence import verify as run

    pi = Alignment.load(via)
    found = run(a, via=pi, tolerance=tolerance, config=config)
    aided = f", with P_out·P_inᵀ in {found.shortcuts} shortcuts" if found.shortcuts else ""
    text = (
        f"π(A) computes what A computes{aided}: largest difference {found.difference:.2g}"
        f" over {', '.join(found.outputs)}"
    )
    if found.equal and not proof.as_json:
        out.print(text, markup=False)
    proof.info({**verified_model(a, pi, via), **found.metadata()})
    if not found.equal:
        raise VerificationError(
            f"π(A) does not compute what A computes: largest difference {found.difference:.3g}"
            + (f", first in {found.parting}" if found.parting else ""),
            hint=found.reason
            if found.difference > 1e-9
            else "float64 itself is no more exact than this; allow a larger --tolerance",
        )


def predict_activations(
    a: str, onto: str | None, via: str, config: Path | None, calibrate: Path | None, proof: VerifyRun
) -> None:
    """Run A and B, and fail if π does not predict what B computes."""
    from transfusion.alignment.alignment import Alignment
    from transfusion.cli import views
    from transfusion.verification.equivalence import predict, verified_model

    pi = Alignment.load(via)
    b = onto or pi.provenance.target
    found = predict(a, b, via=pi, calibrate=calibrate, config=config)
    info = found.metadata()
    if found.holds and not proof.as_json:
        out.print(views.prediction(info["axes"]))
        out.print(f"{found.mean}; shown: {found.probes}", markup=False)
    proof.info({**verified_model(a, pi, via), "b": b, **info})
    if not found.holds:
        raise VerificationError(
            f"π does not tell what B computes: {found.mean}", hint="the two models may have nothing in common"
        )


def turns(via: str) -> bool:
    """Whether a file of π turns units, so that no equality can be proved."""
    from transfusion.alignment.alignment import Alignment
    from transfusion.alignment.maps import Rotation

    return any(isinstance(map_, Rotation) for map_ in Alignment.load(via).maps.values())


def certify(file: Path, class_name: str, config: Path | None, proof: VerifyRun) -> None:
    """Certify a table of one's own on a small model, and fail if it does not hold."""
    from transfusion.verification.certification import certify_file

    certificate = certify_file(file, class_name, config)
    checks = [{**asdict(check), "passed": check.passed} for check in certificate.checks]
    if not proof.as_json:
        for check in certificate.checks:
            out.print(f"{'✓' if check.passed else '✗'} {check}", markup=False)
    proof.info({"architecture": str(file), "passed": certificate.passed, "checks": checks})
    if not certificate.passed:
        raise VerificationError(
            f"the table in {file} does not tell the truth about {class_name}:"
            f" {len(certificate.failures)} of {len(certificate.checks)} checks failed",
            hint="; ".join(check.what for check in certificate.failures),
        )
