"""Language models: the fine-tune is asked, and B learns from the answers alone."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from making import case
from small_models import CASES, GPT2, finetuned
from tests.transport.test_adapter import train_adapter
from transfusion import ask, transport
from transfusion.errors import CheckpointError, DataError, LibraryError, MismatchError, SettingError
from transfusion.running import building
from transfusion.runtime.progress import Progress
from transfusion.runtime.sharding import divided
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.refinement.asked import MASS, MOST, Answers, Asked, shortened
from transfusion.transport.refinement.language import once
from transfusion.transport.refinement.learning import distance

TARGETS = ["q_proj", "v_proj", "down_proj"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
"""What `accelerate launch` calls for several processes; itself, it starts only one without a GPU."""
FEW = {"HELD_OUT": 16, "LEAST_HELD_OUT": 8, "WRITTEN": 32}
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def few_inputs(monkeypatch):
    """Few texts, so that the runs are short."""
    for name, count in FEW.items():
        monkeypatch.setattr(refinement_inputs, name, count)


@pytest.fixture(scope="module")
def given(made, aligned, tmp_path_factory):
    """A LoRA for one Llama, another Llama that was trained apart, and π."""
    a, b = made("llama"), made("llama", 2)
    folder = tmp_path_factory.mktemp("lora")
    train_adapter(a, folder / "lora", TARGETS, task_type="CAUSAL_LM")
    pi = folder / "pi.safetensors"
    aligned(a, b, method="naive").save(pi)
    return {"finetuned": folder / "lora", "base": a, "onto": b, "via": pi}


@pytest.fixture(scope="module")
def answers(given, tmp_path_factory):
    """The answers of the LoRA."""
    file = tmp_path_factory.mktemp("answers") / "answers.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        for name, count in FEW.items():
            patch.setattr(refinement_inputs, name, count)
        ask(given["finetuned"], base=given["base"], output=file)
    return file


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


# ── answers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocabulary", [20, 2000])
@pytest.mark.parametrize("sharpness", [0.1, 8.0])
def test_an_answer_holds_the_likeliest_tokens_and_the_rest(vocabulary, sharpness):
    logits = sharpness * torch.randn(3, 5, vocabulary)
    answers = Answers(torch.zeros(3, 5, dtype=torch.int32), *shortened(logits))
    wanted = answers.of(torch.tensor([2, 0]))
    shares = logits[[2, 0]].log_softmax(-1)
    found = wanted.shares.exp().sum(-1)
    assert torch.allclose(found + wanted.rest.exp(), torch.ones(2, 5), atol=2e-3)
    if vocabulary > MOST:
        held = (wanted.shares > -torch.inf).sum(-1)
        assert ((found >= MASS - 1e-3) | (held == MOST)).all()
    else:
        assert (found > 0.998).all(), "a small vocabulary is there in whole"
    assert torch.equal(wanted.likely[..., 0], shares.argmax(-1))
    expected = shares.gather(-1, wanted.likely)
    there = wanted.shares > -torch.inf
    assert torch.allclose(wanted.shares[there], expected[there], rtol=1e-3, atol=1e-3)


def test_the_distance_is_the_divergence_and_its_gradient(monkeypatch):
    """With all tokens in the answer, it is KL(wanted ‖ found), however few are compared at a time."""
    from transfusion.transport.refinement import learning

    teacher, student = torch.randn(2, 4, 30), torch.randn(2, 4, 30, requires_grad=True)
    wanted = Answers(torch.zeros(2, 4, dtype=torch.int32), *shortened(teacher)).of(torch.arange(2))
    expected = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum"
    )
    (slope,) = torch.autograd.grad(0.5 * expected, student)
    for at_once in (1 << 22, 60):
        monkeypatch.setattr(learning, "AT_ONCE", at_once)
        student.grad = None
        found = distance(student * 1.0, torch.zeros(2, 4, dtype=torch.int64), wanted, 0.5)
        assert found.total == pytest.approx(expected.item(), rel=1e-2)
        assert found.answers == 8
        assert found.equal == int((teacher.argmax(-1) == student.argmax(-1)).sum())
        assert torch.allclose(student.grad, slope, atol=2e-3)


# ── the file ─────────────────────────────────────────────────────────────────────────────────


def test_a_file_of_answers_gives_the_same_adapter(given, cli, tmp_path):
    file = tmp_path / "answers.safetensors"
    code, out, err = cli("ask", given["finetuned"], "--base", given["base"], "-o", file)
    assert code == 0, err
    assert str(file) in out
    asked = {**given, "refine": True, "refine_steps": 6}
    transport(**asked, output=tmp_path / "at-once")
    transport(**asked, answers=file, output=tmp_path / "from-file")
    first, second = tensors(tmp_path / "at-once"), tensors(tmp_path / "from-file")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    excess = Asked.load(file).learned["plain"].excess
    assert excess is not None
    assert excess.abs().max() > 0, "the fine-tune differs from its base"


def test_a_lora_is_refined_where_a_never_was(given, tmp_path, monkeypatch):
    """The answers, π and the LoRA are enough; A's folder is gone."""
    file, lora = tmp_path / "answers.safetensors", tmp_path / "lora"
    shutil.copytree(given["finetuned"], lora)
    base = shutil.copytree(given["base"], tmp_path / "a")
    how = {"onto": given["onto"], "via": given["via"], "refine": True, "refine_steps": 4, "answers": file}
    ask(lora, base=base, output=file)
    transport(lora, base=base, **how, output=tmp_path / "with-a")
    shutil.rmtree(base)
    transport(lora, **how, output=tmp_path / "without-a")
    first, second = (tmp_path / name / "adapter_model.safetensors" for name in ("with-a", "without-a"))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(CheckpointError, match="by its shapes alone"):
        transport(lora, **{**how, "via": None}, output=tmp_path / "aligned")


class Interrupted(Progress):
    """Interrupts a run in its first phase whose text begins so."""

    def __init__(self, text: str) -> None:
        self.text = text

    @contextmanager
    def bar(self, total=None, text=""):
        def advance(text, done=None, total=None):
            self.stop(text)

        self.stop(text)
        yield advance

    def stop(self, text: str) -> None:
        if text.startswith(self.text):
            raise KeyboardInterrupt


def test_answers_are_for_a_refinement(given, answers):
    with pytest.raises(SettingError, match="`answers`: nothing is refined"):
        transport(**given, answers=answers)


def test_what_cannot_be_learned_is_refused_before_the_search(given, answers, made, tmp_path, monkeypatch):
    """The search may take an hour."""
    monkeypatch.setattr("transfusion.matching.align.align_pair", lambda *_: pytest.fail("it was searched"))
    train_adapter(made("llama"), tmp_path / "other", TARGETS[:1], task_type="CAUSAL_LM")
    job = {**given, "via": None, "refine": True, "output": tmp_path / "out"}
    with pytest.raises(MismatchError, match="is another model"):
        transport(**{**job, "finetuned": tmp_path / "other"}, answers=answers)
    tuned = finetuned(CASES["vit-classifier"], made("vit-classifier"), tmp_path / "images")
    images = {"base": made("vit-classifier"), "onto": made("vit-classifier", 2), "finetuned": tuned}
    for name, value in (("answers", answers), ("refine_batch", 4)):
        with pytest.raises(SettingError, match=f"`{name}`: only language models"):
            transport(**{**job, **images}, **{name: value})


def test_own_texts_belong_to_whoever_asks(given, answers, tmp_path):
    """Beside answers, nothing would read them."""
    (tmp_path / "own.txt").write_text("one\n")
    with pytest.raises(SettingError, match="nothing would use these inputs"):
        transport(**given, refine=True, answers=answers, calibrate=tmp_path / "own.txt")


def test_a_run_with_answers_is_repeated_with_them(given, tmp_path):
    """Others were asked with another seed, or with texts of the user's own."""
    file = tmp_path / "answers.safetensors"
    ask(given["finetuned"], base=given["base"], output=file, seed=5)
    transport(**given, refine=True, refine_steps=4, answers=file, output=tmp_path / "out")
    transport(repeat=tmp_path / "out", output=tmp_path / "again")
    first, second = tensors(tmp_path / "out"), tensors(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    file.unlink()
    with pytest.raises(CheckpointError, match="are not there any more"):
        transport(repeat=tmp_path / "out", output=tmp_path / "once-more")


def test_an_interrupted_run_does_not_go_on_with_other_answers(given, tmp_path):
    """The user has asked anew meanwhile."""
    asked = {**given, "refine": True, "refine_steps": 4}
    for seed in (0, 5):
        ask(given["finetuned"], base=given["base"], output=tmp_path / f"{seed}.safetensors", seed=seed)
    answers = [tmp_path / f"{seed}.safetensors" for seed in (0, 5)]
    with pytest.raises(KeyboardInterrupt):
        transport(
            **asked, answers=answers[0], output=tmp_path / "out", progress=Interrupted("refining, loss")
        )
    assert (tmp_path / ".out.partial" / "kept").is_dir()
    transport(**asked, answers=answers[1], output=tmp_path / "out")
    transport(**asked, answers=answers[1], output=tmp_path / "at-once")
    first, second = tensors(tmp_path / "out"), tensors(tmp_path / "at-once")
    assert all(torch.equal(first[name], second[name]) for name in first | second)


def test_texts_of_another_fine_tune_are_not_taken_over(given, made, tmp_path):
    """A run that was interrupted has written them, and the same file is to hold answers of this one."""
    train_adapter(made("llama"), tmp_path / "other", TARGETS[:1], task_type="CAUSAL_LM")
    with pytest.raises(KeyboardInterrupt):
        ask(
            tmp_path / "other",
            base=given["base"],
            output=tmp_path / "answers.safetensors",
            progress=Interrupted("answering texts"),
        )
    first = ask(given["finetuned"], base=given["base"], output=tmp_path / "answers.safetensors")
    second = ask(given["finetuned"], base=given["base"])
    assert torch.equal(first.learned["plain"].ids, second.learned["plain"].ids)


def test_a_killed_run_leaves_no_part_of_its_answers(tmp_path):
    """They take minutes to write where they are large, and the next run reads what is there."""

    class Killed:
        def save(self, path: Path) -> None:
            path.write_bytes(b"the beginning")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path / "of-a.safetensors", Killed, Asked.load)
    assert not (tmp_path / "of-a.safetensors").exists()


def test_one_model_at_a_time_is_in_memory(made, given, tmp_path, monkeypatch):
    """The fine-tune, then its base; B, then its student."""
    from transfusion.transport.refinement import language

    built: list[weakref.ref] = []

    def build(*args, **kwargs):
        gc.collect()
        assert all(one() is None for one in built)
        module = building.build(*args, **kwargs)
        built.append(weakref.ref(module))
        return module

    monkeypatch.setattr(language, "build", build)
    tuned = finetuned(CASES["llama"], given["base"], tmp_path / "tuned")
    transport(**{**given, "finetuned": tuned}, refine=True, refine_steps=2, force_unrelated=True)
    assert len(built) == 4


def test_answers_of_another_fine_tune_are_refused(given, made, tmp_path):
    file = tmp_path / "answers.safetensors"
    train_adapter(made("llama"), tmp_path / "other", TARGETS[:1], task_type="CAUSAL_LM")
    ask(tmp_path / "other", base=given["base"], output=file)
    with pytest.raises(MismatchError, match="another model"):
        transport(**given, refine=True, answers=file, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_holds_no_answers_is_refused(given, tmp_path):
    save_file({"one": torch.ones(2)}, tmp_path / "odd.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    for name in ("odd", "cut"):
        with pytest.raises(DataError, match=name):
            transport(**given, refine=True, answers=tmp_path / f"{name}.safetensors")


def damaged() -> list[tuple[str, object]]:
    """What a file of answers may have: in place of a setting, of a tensor, or beside these."""
    odd = torch.full((32, 13), 1e6)
    return [
        *((f"no {name}", None) for name in ("finetuned", "base", "label", "shapes", "tokens", "inputs")),
        ("tokens", "many"), ("tokens", 10**9), ("shapes", {"tensors": 3}), ("inputs", [1]),
        ("odd", odd), ("a.b.c", odd), ("learn.plain.c", odd), ("learn.plain.ids", odd),
        ("learn.plain.ids", odd.int()), ("learn.plain.ids", -odd.int()), ("learn.plain.counts", odd.int()),
        ("learn.plain.chosen", odd.half()), ("learn.plain.chosen", odd[:1].half()),
        *((f"no {name}", None) for name in ("learn.plain", "held.synthetic", "learn.plain.chosen", "held")),
    ]  # fmt: skip


@pytest.mark.parametrize(("what", "value"), damaged())
def test_answers_that_are_damaged_are_refused(given, answers, what, value, tmp_path):
    found = load_file(answers)
    with safe_open(answers, "pt") as file:
        header = dict(file.metadata())
    about = json.loads(header["answers"])
    if isinstance(value, torch.Tensor):
        found[what] = value
    elif value is not None:
        about[what] = value
    else:
        about.pop(what.removeprefix("no "), None)
        found = {name: one for name, one in found.items() if not name.startswith(what.removeprefix("no "))}
    save_file(found, tmp_path / "odd.safetensors", {**header, "answers": json.dumps(about)})
    job = {name: one for name, one in given.items() if name != "base" or what != "shapes"}
    with pytest.raises((DataError, MismatchError, CheckpointError)):
        transport(**job, refine=True, answers=tmp_path / "odd.safetensors")


def test_padded_texts_are_refused(given, tmp_path):
    """Padding would be learned as if it were text."""
    ids, file = torch.randint(2, 31, (64, 13)), tmp_path / "own.safetensors"
    mask = torch.ones_like(ids)
    save_file({"input_ids": ids, "attention_mask": mask}, file)
    assert "given" in ask(given["finetuned"], base=given["base"], calibrate=file).learned
    mask[:, 6:] = 0
    save_file({"input_ids": ids, "attention_mask": mask}, file)
    with pytest.raises(DataError, match=r"own\.safetensors: some texts are padded"):
        ask(given["finetuned"], base=given["base"], calibrate=file)


def test_images_are_not_asked_beforehand(made, tmp_path):
    with pytest.raises(SettingError, match="no language model"):
        ask(made("vit-classifier", 2), base=made("vit-classifier"), output=tmp_path / "answers.safetensors")


# ── other Bs ─────────────────────────────────────────────────────────────────────────────────


def small_gpt2(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **settings: int) -> Path:
    model = case("small", "gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2, **settings).build(seed)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_answers_reach_as_far_as_b_reads(tmp_path):
    """A reads longer texts than B, whose positions end before."""
    a, b = small_gpt2(tmp_path / "a", 1, n_positions=24), small_gpt2(tmp_path / "b", 2, n_positions=8)
    train_adapter(a, tmp_path / "lora", ["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    how = {"method": "functional", "refine": True, "refine_steps": 2, "force_unrelated": True}
    moved = transport(tmp_path / "lora", base=a, onto=b, **how)
    assert moved.metadata()["refinement"]["steps"] >= 0


def test_cut_answers_are_those_to_the_first_tokens():
    ids, logits = torch.randint(9, (3, 6)).int(), torch.randn(3, 6, 9)
    whole, cut = (Answers(ids[:, :n], *shortened(logits[:, :n])) for n in (6, 4))
    found = whole.within(4)
    assert all(torch.equal(getattr(found, name), getattr(cut, name)) for name in ("ids", "counts", "likely"))
    assert torch.equal(found.shares, cut.shares)
    assert whole.within(None) is whole.within(6) is whole


def test_a_lora_is_refined_on_a_b_in_float16(tmp_path, aligned):
    """Its norms take no mixture of types on a CPU."""
    a, b = (small_gpt2(tmp_path / name, seed, torch.float16) for seed, name in enumerate("ab"))
    train_adapter(a, tmp_path / "lora", ["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    how = {"refine": True, "refine_steps": 20, "refine_keep": 0.0}
    moved = transport(tmp_path / "lora", base=a, onto=b, via=aligned(a, b, method="naive"), **how)
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before


# ── several processes ────────────────────────────────────────────────────────────────────────


def test_two_processes_learn_what_one_learns_with_twice_the_batch(given, tmp_path):
    first, second = learned_by_one_and_two(given, tmp_path)
    plain = transport(**given).state_dict()
    assert any((first[name] - plain[name]).abs().max() > 1e-3 for name in first), "something was learned"
    assert_close(first, second)


@pytest.mark.slow
def test_two_processes_divide_a_whole_model(made, given, tmp_path):
    """Each holds half of all weights; one writes the same model that one process learns."""
    tuned = finetuned(CASES["llama"], given["base"], tmp_path / "tuned")
    first, second = learned_by_one_and_two({**given, "finetuned": tuned}, tmp_path)
    plain = transport(**{**given, "finetuned": tuned}).state_dict()
    assert any((first[name] - plain[name]).abs().max() > 1e-4 for name in first), "something was learned"
    assert_close(first, second)


INTERRUPTED = """
import sys
import weakref
from contextlib import contextmanager
from transfusion import transport
from transfusion.runtime.processes import processes
from transfusion.running import building
from transfusion.runtime.progress import Progress
from transfusion.transport.refinement import training

class Interrupted(Progress):
    @contextmanager
    def bar(self, total=None, text=""):
        def advance(text, done=None, total=None):
            if done == 4 and text.startswith("refining"):
                raise KeyboardInterrupt
        yield advance

def train(parameters, *args, **kwargs):
    held = sum(one.to_local().numel() for one in parameters.values())
    whole = sum(one.numel() for one in parameters.values())
    assert held < 0.6 * whole, (held, whole)
    return learn(parameters, *args, **kwargs)

learn, training.train = training.train, train
names = ("finetuned", "base", "onto", "via", "answers", "output")
job = dict(zip(names, sys.argv[1:]), refine=True, refine_steps=6, refine_batch=4)
try:
    transport(**job, progress=Interrupted())
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    pass
notes = []
class Noting(Progress):
    def note(self, text):
        notes.append(text)
transport(**job, progress=Noting())
assert any("goes on from step" in one for one in notes), notes
"""


@pytest.mark.slow
def test_a_divided_model_goes_on_where_it_was_interrupted(given, tmp_path):
    """What the processes hold is gathered in one file, and divided again."""
    job = {**given, "finetuned": finetuned(CASES["llama"], given["base"], tmp_path / "tuned")}
    _, whole = learned_by_one_and_two(job, tmp_path)
    (tmp_path / "run.py").write_text(INTERRUPTED)
    words = [job["finetuned"], *(job[name] for name in ("base", "onto", "via"))]
    words += [tmp_path / "answers.safetensors", tmp_path / "again"]
    done = subprocess.run(
        [*LAUNCH, str(tmp_path / "run.py"), *map(str, words)],
        capture_output=True,
        text=True,
        env=ALONE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_close(whole, load_file(next((tmp_path / "again").glob("*.safetensors"))))


def test_a_torch_that_cannot_divide_a_model_is_named(monkeypatch):
    from torch.distributed import fsdp

    monkeypatch.delattr(fsdp, "FSDPModule")
    with pytest.raises(LibraryError, match=r"torch .* cannot divide"):
        divided(torch.nn.Linear(2, 2), "cpu")


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)


def learned_by_one_and_two(job: dict[str, Path], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return what one process writes, and what two of them do with half the batch for each."""
    file = folder / "answers.safetensors"
    ask(job["finetuned"], base=job["base"], output=file)
    options = {"via": job["via"], "base": job["base"], "onto": job["onto"], "answers": file}
    words = ["transfusion", "transport", str(job["finetuned"]), "--refine", "--refine-steps", "6", "--json"]
    words += [one for name, value in options.items() for one in (f"--{name}", str(value))]

    def run(*command: str, batch: int, out: Path) -> str:
        every = [*command, "-m", *words, "--refine-batch", str(batch), "-o", str(out)]
        done = subprocess.run(every, capture_output=True, text=True, env=ALONE, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, batch=8, out=folder / "one")
    printed = run(*LAUNCH, batch=4, out=folder / "two")
    assert printed.count('"written"') == 1, "one process speaks and writes"
    return [load_file(next((folder / name).glob("*.safetensors"))) for name in ("one", "two")]


# ── before it begins ─────────────────────────────────────────────────────────────────────────


def test_a_dry_run_says_what_both_phases_take(given, cli, tmp_path):
    words = ["transport", given["finetuned"], "--base", given["base"], "--onto", given["onto"]]
    words += ["--via", given["via"], "-o", tmp_path / "out", "--refine", "--dry-run"]
    code, out, err = cli(*words)
    assert code == 0, err
    assert "ask: " in out
    ask(given["finetuned"], base=given["base"], output=tmp_path / "answers.safetensors")
    few, many = (
        json.loads(
            cli(*words, "--refine-steps", steps, "--answers", tmp_path / "answers.safetensors", "--json")[1]
        )
        for steps in (10, 10_000_000)
    )
    assert few["seconds_to_ask"] == 0
    assert many["seconds_to_learn"] > few["seconds_to_learn"]
    bounded = transport(**given, refine=True, refine_steps=10_000_000, refine_time="1s", dry_run=True)
    assert bounded.plan()["seconds_to_learn"] < 60 < many["seconds_to_learn"]
    assert many["memory_to_learn"] == few["memory_to_learn"] > 4 * many["bytes_to_write"]
    assert not (tmp_path / "out").exists()
