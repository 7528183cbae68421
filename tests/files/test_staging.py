"""Writing: an output appears whole or not at all, an interrupted run goes on, and inputs never mix."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from making import written_by_us
from small_models import CASES, finetuned
from transfusion.alignment.alignment import Alignment
from transfusion.errors import CheckpointError, OutputError
from transfusion.files.publishing import StagingFolder, open_staging
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.runtime.resources import Resources
from transfusion.transport.output import Output
from transfusion.transport.record import PI_FILE
from transfusion.transport.transport import transport


def in_shards(folder: Path, place: Path, size: str = "12KB") -> Path:
    """The same model, saved in several shards by its library."""
    import transformers

    transformers.LlamaForCausalLM.from_pretrained(folder).save_pretrained(place, max_shard_size=size)
    return place


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    a, b = in_shards(made("llama", 1), root / "a"), in_shards(made("llama", 2), root / "b")
    tuned = in_shards(finetuned(CASES["llama"], a, root / "whole"), root / "tuned", "20KB")
    return {"a": a, "b": b, "tuned": tuned}


def prepared(inputs: dict[str, Path], **more: object) -> Output:
    found = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], method="random", **more)
    assert isinstance(found, Output)
    return found


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Path:
    return prepared(inputs).save(tmp_path_factory.mktemp("undisturbed") / "moved")


def content(folder: Path) -> dict[str, bytes]:
    """All files but those that tell of the time and place of a run."""
    info = ("transfusion.json", "README.md")
    files = {
        path.name: path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in info
    }
    found = {name: path.read_bytes() for name, path in files.items()}
    if (pi := files.get(Path(PI_FILE).name)) is not None:  # it says how long it took
        found[pi.name] = Alignment.load(pi).digest.encode()
    return found


# ── shards ───────────────────────────────────────────────────────────────────────────────────


def test_a_streamed_file_is_what_safetensors_would_have_written(tmp_path):
    """Types mixed, an empty tensor, a single number, a name that is not ASCII: the library reads them all."""
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "single": torch.tensor(2.5),
        "double": torch.randn(2, 2, 2, dtype=torch.float64),
        "numbers": torch.arange(7),
        "nothing": torch.zeros(0, 4),
        "naïve": torch.tensor([True, False]),
        "turned": torch.randn(4, 3).T,
    }
    write_shard(tmp_path / "file.safetensors", {name: LazyTensor.of(one) for name, one in tensors.items()})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, one in tensors.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one), name
    with safe_open(tmp_path / "file.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_file_is_flushed_when_it_is_written_and_an_error_of_the_disk_is_one_of_the_run(
    tmp_path, monkeypatch
):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    many = LazyTensor((100, 100), torch.float32, lambda: [lambda: torch.ones(1, 100)] * 100)
    path = tmp_path / "file.safetensors"
    write_shard(path, {"x": many})
    assert flushed == [path.stat().st_size]

    def full(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="Input/output"):
        write_shard(path, {"x": many})


def test_blocks_that_do_not_add_up_are_a_bug_and_not_a_file(tmp_path):
    short = LazyTensor((4,), torch.float32, lambda: [lambda: torch.zeros(3)])
    with pytest.raises(AssertionError, match=r"\d+ bytes were written, but the header announces \d+"):
        write_shard(tmp_path / "file.safetensors", {"short": short})


def test_the_output_has_the_shards_of_b(inputs, undisturbed):
    index = json.loads((inputs["b"] / "model.safetensors.index.json").read_text())
    found = json.loads((undisturbed / "model.safetensors.index.json").read_text())
    assert found["weight_map"] == index["weight_map"]
    assert found["metadata"]["total_size"] == index["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) > 3
    import transformers

    transformers.LlamaForCausalLM.from_pretrained(undisturbed)


@pytest.mark.parametrize("jobs", [1, 3])
def test_any_number_of_threads_writes_the_same(jobs, inputs, undisturbed, tmp_path):
    prepared(inputs).save(tmp_path / "moved", resources=Resources(jobs=jobs))
    assert content(tmp_path / "moved") == content(undisturbed)


def test_a_single_file_has_the_same_tensors(inputs, undisturbed, tmp_path):
    prepared(inputs).save(tmp_path / "moved.safetensors")
    alone = load_file(tmp_path / "moved.safetensors")
    apart = {name: one for file in undisturbed.glob("*.safetensors") for name, one in load_file(file).items()}
    assert alone.keys() == apart.keys()
    assert all(torch.equal(alone[name], apart[name]) for name in alone)
    assert [path.name for path in tmp_path.iterdir()] == ["moved.safetensors"]


# ── every tensor once ────────────────────────────────────────────────────────────────────────


def split_as(folder: Path, place: Path, names: tuple[str, str]) -> Path:
    """The same model in two files of these names, with an index."""
    shutil.copytree(folder, place)
    (whole,) = place.glob("*.safetensors")
    state = load_file(whole)
    whole.unlink()
    halves = [dict(list(state.items())[half::2]) for half in range(2)]
    for name, part in zip(names, halves, strict=True):
        (place / name).parent.mkdir(exist_ok=True)
        if name.endswith(".bin"):
            torch.save(part, place / name)
        else:
            save_file(part, place / name, {"format": "pt"})
    placed = {tensor: name for name, part in zip(names, halves, strict=True) for tensor in part}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return place


OPEN_CLIP_SHARDS = tuple(f"open_clip_model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama", ("p/m.safetensors", "q/m.safetensors")),
        ("llama", ("pytorch_model-00001.bin", "model-00001.bin")),
        ("llama", ("w.bin", "w.safetensors")),
        ("llama", ("W.safetensors", "w.safetensors")),
        ("llama", OPEN_CLIP_SHARDS),
        ("open_clip", OPEN_CLIP_SHARDS),
    ],
)
def test_shards_whose_names_collide_lose_no_tensor(case, names, made, tmp_path):
    b = split_as(made(case, 2), tmp_path / "b", names)
    tuned = finetuned(CASES[case], made(case, 1), tmp_path / "tuned")
    place = transport(tuned, base=made(case, 1), onto=b, method="random").save(tmp_path / "moved")
    found = [name for file in place.glob("*.safetensors") for name in load_file(file)]
    assert sorted(found) == sorted(Model.open(b).checkpoint.tensors)
    assert Model.open(place).checkpoint.tensors.keys() == set(found)
    build(Model.open(place))  # its library loads it


def test_an_output_that_lacks_a_tensor_does_not_appear(inputs, tmp_path, monkeypatch):
    """Whatever may lose one: before anything is published, the tensors are counted."""
    real = write_shard

    def forgetful(path: Path, tensors: dict[str, LazyTensor], *more: object) -> str:
        kept = list(tensors)[1:] if path.name.startswith("model-00002") else list(tensors)
        return real(path, {name: tensors[name] for name in kept}, *more)  # type: ignore[arg-type]

    monkeypatch.setattr("transfusion.files.writing.write_shard", forgetful)
    with pytest.raises(OutputError, match="would not hold every planned tensor exactly once"):
        prepared(inputs).save(tmp_path / "moved")
    assert not list(tmp_path.iterdir())


# ── interruptions ────────────────────────────────────────────────────────────────────────────


def dies(run: object) -> None:
    """Run something in a child process, which must be killed by itself on the way."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            run()  # type: ignore[operator]
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it was not killed"


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, *, after: bool) -> None:
    """Let the process kill itself at the n-th call of a function, before or after it."""
    real, calls = getattr(owner, name), [0]

    def deadly(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls[0] == call and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(owner, name, deadly)


MOMENTS = [
    *((Output, "rows", call, False) for call in (1, 2, 9, 20)),
    *((StagingFolder, "finish", call, after) for call in (1, 2, 4) for after in (False, True)),
    (StagingFolder, "begin", 1, True),
    *((StagingFolder, "publish", call, after) for call in (1, 2) for after in (False, True)),  # π, the whole
    (Output, "keep_pi", 1, False),
    (Output, "keep_pi", 1, True),
]


@pytest.mark.parametrize(("owner", "name", "call", "after"), MOMENTS)
def test_killed_at_any_moment_the_old_output_is_whole_and_the_next_run_goes_on(
    owner, name, call, after, inputs, undisturbed, tmp_path, monkeypatch
):
    place = written_by_us(tmp_path / "moved", {"config.json": "the old one"})
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, after=after)
        dies(lambda: prepared(inputs).save(place, force=True, resources=Resources(jobs=1)))
    published = name == "publish" and call == 2 and after
    if published:
        assert content(place) == content(undisturbed)
    else:
        assert (place / "config.json").read_text() == "the old one"
    prepared(inputs).save(place, force=True, resources=Resources(jobs=1))
    assert content(place) == content(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"], "something was left behind"


def test_an_output_that_was_replaced_is_not_taken_for_a_finished_one(
    inputs, undisturbed, tmp_path, monkeypatch
):
    """Killed after the exchange, the staging folder holds the old output, whose shards have the same names and sizes."""
    place = prepared(inputs, alpha=0.5).save(tmp_path / "moved")
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "publish", 2, after=True)
        dies(lambda: prepared(inputs).save(place, force=True, resources=Resources(jobs=1)))
    assert content(place) == content(undisturbed)
    prepared(inputs).save(place, force=True)
    assert content(place) == content(undisturbed)


def test_what_was_finished_is_not_made_again(inputs, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "finish", 3, after=True)
        dies(lambda: prepared(inputs).save(tmp_path / "moved", resources=Resources(jobs=1)))
    made: list[str] = []
    moved = prepared(inputs)
    moved.save(tmp_path / "moved", on_tensor=made.append)
    assert 0 < len(made) < len(moved.tensors)
    assert content(tmp_path / "moved") == content(undisturbed)
    provenance = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    whole = json.loads((undisturbed / "transfusion.json").read_text())
    assert provenance["moved"] == whole["moved"], "what the first run remarked was forgotten"


@pytest.mark.parametrize("changed", ["alpha", "dtype", "finetune", "base", "b"])
def test_a_shard_made_from_other_inputs_is_never_used(changed, inputs, made, tmp_path, monkeypatch):
    """Between the two runs something changed: the output is that of a run with the new inputs alone."""
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "finish", 3, after=True)
        dies(lambda: prepared(inputs).save(tmp_path / "moved", resources=Resources(jobs=1)))
    now, more = dict(inputs), {}
    if changed == "alpha":
        more = {"alpha": 0.5}
    elif changed == "dtype":
        more = {"dtype": "float64"}
    else:
        role = {"finetune": "tuned", "base": "a", "b": "b"}[changed]
        now[role] = _slightly_other(inputs[role], tmp_path / "other")
    prepared(now, **more).save(tmp_path / "moved")
    prepared(now, **more).save(tmp_path / "anew")
    assert content(tmp_path / "moved") == content(tmp_path / "anew")


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def overwrite(file: Path) -> None:
    """Change the last number in place, and set the time back."""
    info = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x01\x3f")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def truncate(file: Path) -> None:
    """Tensors that were mapped would end the program by a signal when they are looked at."""
    os.truncate(file, 4096)


@pytest.mark.parametrize("change", [touch, overwrite, truncate])
@pytest.mark.parametrize("role", ["a", "b", "tuned"])
def test_an_input_that_changes_during_the_run_spoils_it(role, change, inputs, tmp_path):
    now = {name: shutil.copytree(place, tmp_path / name) for name, place in inputs.items()}
    moved, touched = prepared(now), []

    def meddle(name: str) -> None:
        if not touched:
            touched.append(name)
            change(sorted(now[role].glob("*.safetensors"))[0])

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        moved.save(tmp_path / "moved", on_tensor=meddle)
    assert not (tmp_path / "moved").exists()


def _slightly_other(folder: Path, place: Path) -> Path:
    """The same model but for one number in its last shard."""
    shutil.copytree(folder, place)
    file = sorted(place.glob("*.safetensors"))[-1]
    state = load_file(file)
    name = next(name for name, one in state.items() if one.ndim == 2)
    state[name][0, 0] += 0.5
    save_file(state, file, {"format": "pt"})
    return place


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"bytes"', '"size"'),
        lambda text: text.replace('"bytes": ', '"bytes": -'),
        lambda text: f"[{text}]",
        lambda text: "[" * 100_000,
        lambda text: "",
    ],
)
@pytest.mark.parametrize("file", ["recipe.json", "finished/*.json"])
def test_a_damaged_note_is_not_believed(file, damage, inputs, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "finish", 2, after=True)
        dies(lambda: prepared(inputs).save(tmp_path / "moved", resources=Resources(jobs=1)))
    for note in (tmp_path / ".moved.partial").glob(file):
        note.write_text(damage(note.read_text()))
    prepared(inputs).save(tmp_path / "moved")
    assert content(tmp_path / "moved") == content(undisturbed)


def test_a_truncated_shard_is_made_again(inputs, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "finish", 2, after=True)
        dies(lambda: prepared(inputs).save(tmp_path / "moved", resources=Resources(jobs=1)))
    shard = sorted((tmp_path / ".moved.partial" / "output").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    prepared(inputs).save(tmp_path / "moved")
    assert content(tmp_path / "moved") == content(undisturbed)


def test_two_runs_to_one_place_do_not_meet(inputs, tmp_path):
    moved = prepared(inputs)
    with open_staging(tmp_path / "moved", force=False) as staging:
        staging.begin()
        with pytest.raises(OutputError, match="another run is writing"):
            moved.save(tmp_path / "moved")


def test_a_replacement_in_two_steps_is_undone_if_it_was_cut_between(inputs, undisturbed, tmp_path):
    """Where a system cannot exchange two folders in one step, a kill may leave the old one aside."""
    aside = tmp_path / ".moved.partial" / "replaced"
    aside.mkdir(parents=True)
    (aside / "config.json").write_text("the old one")
    with pytest.raises(OutputError, match="exists already"):
        prepared(inputs).save(tmp_path / "moved")
    assert (tmp_path / "moved" / "config.json").read_text() == "the old one"


# ── full disks and read-only places ──────────────────────────────────────────────────────────


def test_a_full_disk_is_reported_and_the_run_goes_on_when_there_is_room(
    inputs, undisturbed, tmp_path, monkeypatch
):
    """The system itself refuses to let a file grow."""
    written_by_us(tmp_path / "moved", {"config.json": "the old one"})
    largest = max(file.stat().st_size for file in undisturbed.glob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))
    try:
        with pytest.raises(OutputError, match="could not be written .* nothing was changed") as caught:
            prepared(inputs).save(tmp_path / "moved", force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "moved" / "config.json").read_text() == "the old one"
    if (tmp_path / ".moved.partial").exists():
        assert "resumes from" in str(caught.value.hint)
    prepared(inputs).save(tmp_path / "moved", force=True)
    assert content(tmp_path / "moved") == content(undisturbed)


def test_no_space_left_is_named_and_finished_shards_are_kept(inputs, undisturbed, tmp_path, monkeypatch):
    real, calls = write_shard, [0]

    def full(path: Path, *args: object) -> str:
        calls[0] += 1
        if calls[0] == 3:
            path.write_bytes(b"half a shard")
            raise OSError(28, "No space left on device")
        return real(path, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("transfusion.files.writing.write_shard", full)
        with pytest.raises(OutputError, match="No space left on device") as caught:
            prepared(inputs).save(tmp_path / "moved")
    assert "resumes from" in str(caught.value.hint)
    assert len(list((tmp_path / ".moved.partial" / "output").iterdir())) == 2, "the half shard takes up space"
    prepared(inputs).save(tmp_path / "moved")
    assert content(tmp_path / "moved") == content(undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_failure_that_no_second_run_would_mend_leaves_nothing(inputs, tmp_path):
    with pytest.raises(OutputError, match="float16 cannot hold"):
        prepared(inputs, alpha=1e9, dtype="float16").save(tmp_path / "moved")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_place_is_refused_before_any_work(inputs, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        prepared(inputs).save(tmp_path / "moved")


def test_a_place_that_becomes_read_only_is_reported(inputs, tmp_path, monkeypatch):
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(OutputError, match="Read-only file system"):
            prepared(inputs).save(tmp_path / "moved")
    assert not list(tmp_path.iterdir())


# ── the real thing ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_fifty_kills_at_random_moments(inputs, undisturbed, tmp_path):
    """A whole program, killed again and again: each run goes on, and the output is that of one run."""
    import random

    pi = transport(inputs["tuned"], base=inputs["a"], onto=inputs["b"], method="random").alignment.save(
        tmp_path / "pi.safetensors"
    )
    rng = random.Random(0)
    slow = (
        "import sys, time\n"
        "from transfusion.transport.output import Output\n"
        "from transfusion.cli import main\n"
        "real = Output.rows\n"
        "def rows(self, *args):\n"
        "    time.sleep(0.05)\n"
        "    return real(self, *args)\n"
        "Output.rows = rows\n"
        "print('ready', flush=True)\n"
        "main(sys.argv[1:])\n"
    )
    old = {"config.json": "the old one"}
    place = written_by_us(tmp_path / "moved", old)
    arguments = ["transport", inputs["tuned"], "--base", inputs["a"], "--onto", inputs["b"], "--via", pi]
    arguments += ["-o", place, "--force", "--jobs", "1"]
    kills, finished = 0, 0
    while kills < 50:
        run = subprocess.Popen(
            [sys.executable, "-c", slow, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(rng.uniform(0.0, 2.0))
        run.kill()
        _, info = run.communicate()
        if run.returncode == -signal.SIGKILL:
            kills += 1
        else:
            assert run.returncode == 0, info.decode()
            finished += 1
        if (place / "config.json").read_text() != "the old one":
            assert content(place) == content(undisturbed)
            finished += run.returncode != 0
            shutil.rmtree(place)
            written_by_us(place, old)
    assert finished, "no run ever came through"
    subprocess.run([sys.executable, "-c", slow, *map(str, arguments)], check=True, capture_output=True)
    assert content(place) == content(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "pi.safetensors"]
    assert Model.open(place)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("target", ["loop", "nowhere"])
def test_a_link_that_leads_nowhere_is_refused_before_any_work(target, inside, cli, inputs, tmp_path):
    (place := tmp_path / "loop").symlink_to(target)
    output = place / "moved" if inside else place
    a, b, tuned = (inputs[name] for name in ("a", "b", "tuned"))
    for command in (
        ("align", a, b, "--method", "naive"),
        ("transport", tuned, "--base", a, "--onto", b, "--method", "naive"),
    ):
        code, _, err = cli(*command, "-o", output)
        assert code == 1
        assert f"error: {place} is a link that leads nowhere" in err
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
