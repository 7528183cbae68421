"""The report, without a browser: what it tells, from what, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest

import reports
import transfusion
from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, OutputError
from transfusion.model.model import Model
from transfusion.report.charts import VARIABLES, Curve, bars, draw_heat_map, draw_strands, drawn_panels, lines
from transfusion.report.measures import Bases, head_panels, tensor_roles
from transfusion.report.page import make_hero
from transfusion.report.parts import NARROW, WIDE, brief
from transfusion.report.results import read_inputs
from transfusion.report.sections import what_was_moved


class Reader(HTMLParser):
    """Checks that every tag is closed, and notes ids, references and text."""

    VOID = frozenset(("meta", "link", "br", "input"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.tips: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        info = dict(attrs)
        self.ids += [info["id"]] if "id" in info else []
        self.tips += [info["data-tip"]] if "data-tip" in info else []
        self.outside += [
            info[key] for key in ("src", "href") if key in info and not info[key].startswith(("#", "data:"))
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def job(made, tmp_path_factory):
    return reports.make(tmp_path_factory.mktemp("report"), made("vit-classifier"))


@pytest.fixture(scope="module")
def full(job, tmp_path_factory):
    """The same run with all kinds of results beside it."""
    place = tmp_path_factory.mktemp("full") / "moved"
    shutil.copytree(job.run, place)
    return reports.Job(**{**vars(job), "run": place}).with_results()


@pytest.fixture(scope="module")
def page(full):
    return transfusion.report(full.run, ceiling=full.ceiling)


def section(page, id):
    return next(one for one in page.sections if one.id == id)


def figures(part):
    return [one for _, one in part.tabs] if hasattr(part, "tabs") else [part] if hasattr(part, "draw") else []


def numbers(page, id):
    """The numbers behind a figure, by the first cell of each row."""
    found = next(
        one for some in page.sections for part in some.parts for one in figures(part) if one.id == id
    )
    return {row[0]: list(row[1:]) for row in found.table.rows}


def test_everything_there_is_to_tell_has_a_section(page):
    ids = [one.id for one in page.sections]
    assert ids == [
        "moved", "advice", "evaluation", "layers", "heads", "tau", "alpha", "fewshot", "barrier", "proof",
        "time", "commands",
    ]  # fmt: skip
    assert page.missing == []
    assert page.notes == []


def test_the_page_is_one_whole_file(page):
    text = page.html()
    read = Reader(text)
    assert len(read.ids) == len(set(read.ids))
    assert read.outside == []
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert page.html() == text, "the same material makes the same page"


def test_the_hero_shows_the_measured_numbers(page):
    hero = page.hero
    assert (hero.title, hero.verdict, hero.mood) == ("tuned, moved onto b", "alignable", "fair")
    assert [name for _, name, _ in hero.stations] == ["a", "tuned", "guarded", "b"]
    assert [(one.value, one.mood) for one in hero.numbers[:3]] == [
        ("+22.5", "good"),
        ("−5.0", "bad"),
        ("75 %", ""),
    ]


@pytest.mark.parametrize(
    ("interval", "mood", "whole"), [([-3.0, 0.2], "", "good"), ([-3.0, -0.1], "bad", "fair")]
)
def test_a_gain_whose_interval_includes_0_is_neither_good_nor_bad(interval, mood, whole, full, tmp_path):
    info = json.loads((full.run / "evaluate.json").read_text())
    info["models"][1]["gain"]["support"] = -1.4
    info["models"][1]["gain_interval"] = {"task": [-1.0, 46.0], "support": interval}
    place = shutil.copytree(full.run, tmp_path / full.run.name)
    (place / "evaluate.json").write_text(json.dumps(info).replace(str(full.run), str(place)))
    hero = transfusion.report(place).hero
    assert [(one.value, one.mood) for one in hero.numbers[:2]] == [("+22.5", ""), ("−1.4", mood)]
    assert hero.mood == whole, "a loss that may be chance is no measured loss"


def test_a_loss_of_support_or_a_weak_prediction_is_no_success(page, job):
    assert any("smaller α" in step for step in page.hero.next_steps), "the support has lost 5 points"
    assert 'class="verdict fair"' in page.html()
    assert transfusion.report(job.run).hero.mood == "good"
    assert transfusion.report(job.run).hero.next_steps == []
    for found, mood in ((0.8, "good"), (0.29, "fair"), (0.05, "bad")):
        advice = {"verdict": "predicted", "text": "some", "found": found, "null": 0.01}
        hero = make_hero(read_inputs(job.run), advice, None)
        assert hero.mood == mood
        assert any("--alpha auto" in step for step in hero.next_steps) == (mood != "good")
        assert any("transport with --refine goes on: it" in step for step in hero.next_steps) == (
            mood != "good"
        )


REFINED = {
    "start": "moved",
    "measure": "answers",
    "before": {"synthetic": 0.37},
    "after": {"synthetic": 0.57},
    "divergence": [1.38, 0.44],
    "kept": 0.67,
    "steps": 300,
}


def test_a_refined_run_opens_with_what_arrived(full, job):
    """Not with the share of B that π predicted, which decides nothing any more."""
    advice = {"verdict": "predicted", "text": "some", "found": 0.44, "null": 0.01}
    inputs = read_inputs(job.run)
    refined = replace(inputs, metadata=inputs.metadata | {"refinement": REFINED})
    hero = make_hero(refined, advice, None)
    assert (hero.verdict, hero.mood) == ("refined", "good")
    assert hero.summary.endswith("and trained there to answer like it.")
    assert dict(hero.outcome)["arrived"].startswith("answers like the fine-tune's, 37% → 57%")
    for start, lead in (("moved", "B + α·π(τ), refined, written as"), ("base", "B, refined, written as")):
        refinement = REFINED | {"start": start}
        assert what_was_moved(inputs.metadata | {"refinement": refinement}).lead.startswith(lead)
    assert dict(hero.outcome)["load it"].endswith(f'.from_pretrained("{job.run.name}")')
    hardly = inputs.metadata | {"refinement": REFINED | {"after": {"synthetic": 0.02}}}
    little = make_hero(replace(inputs, metadata=hardly), advice, None)
    assert little.mood == "fair"
    assert dict(little.outcome)["arrived"].startswith("hardly anything: ")
    worse = inputs.metadata | {"refinement": REFINED | {"divergence": [0.44, 1.38]}}
    assert make_hero(replace(inputs, metadata=worse), advice, None).mood == "fair"


def test_the_next_step_is_not_what_the_run_did_already(job):
    inputs = read_inputs(job.run)
    done = {"alignment": inputs.metadata["alignment"] | {"method": "auto"}, "output_shift": {"alpha": 0.5}}
    inputs = replace(inputs, metadata=inputs.metadata | done)
    advice = {"verdict": "predicted", "text": "some", "found": 0.29, "null": 0.01}
    steps = make_hero(inputs, advice, None).next_steps
    assert any("--calibrate" in step for step in steps)
    assert not any("--alpha auto" in step for step in steps)


def test_a_page_tells_no_absolute_path(page, full, job, tmp_path):
    for html in (page.html(), transfusion.report(job.run).html()):
        assert str(full.run.parent) not in html
        assert str(job.a.parent) not in html
        assert str(tmp_path.parents[1]) not in html
    command = "transfusion evaluate b moved --against b --data TASK --support DATA -o moved/evaluate.json"
    assert command in transfusion.report(job.run).html()


def test_without_results_the_hero_tells_what_needs_no_data_and_commands_fill_the_rest(job):
    page = transfusion.report(job.run)
    assert [one.name for one in page.hero.numbers] == ["correlation of π(A) with B", "tensors moved", "α"]
    assert page.hero.numbers[0].value == "1.00"
    commands = [one.text for one in page.missing]
    assert [text.split()[1] for text in commands] == [
        "evaluate",
        "sweep",
        "fewshot",
        "barrier",
        "verify",
        "report",
    ]
    assert str(job.b) in commands[0]
    assert f"--via {job.pi}" in commands[1]
    html = page.html()
    assert 'id="alpha"' not in html, "an empty section is shown"
    assert "transfusion sweep" in html


def test_layers_are_found_where_units_were_only_reordered(page):
    rows = numbers(page, "layers-all")
    assert set(rows) >= {"layer.0.head", "layer.1.ffn", "layer.2.qk"}
    assert all(row[0] == "1.000" for row in rows.values())
    assert all(abs(float(row[1].replace("−", "-"))) < 0.5 for row in rows.values())
    assert len(section(page, "layers").parts[0].tabs) == 1 + len({id.rsplit(".", 1)[1] for id in rows})


def test_heads_are_where_pi_has_put_them(page, job):
    pi = Alignment.load(job.pi)
    info = [row for row in section(page, "heads").parts[0].table.rows if row[0].startswith("layer 1 ·")]
    assert [int(row[2]) for row in info] == pi.maps["layer.1.head"].index[0].tolist()
    assert all(row[3] == "100 %" for row in info)


def test_shares_of_the_task_vector_are_those_of_the_files(page, job):
    a, tuned = Model.open(job.a), Model.open(job.tuned)
    squares: dict[str, float] = {}
    for name, role in tensor_roles(a.architecture).items():
        square = float((tuned.read(name).double() - a.read(name).double()).square().sum())
        squares[role] = squares.get(role, 0.0) + square
    total = sum(squares.values())
    rows = numbers(page, "tau")
    assert {role: row[1] for role, row in rows.items()} == {
        role: f"{100 * square / total:.1f} %" for role, square in squares.items()
    }
    assert rows["query"][2] == "1.000"


def test_a_ceiling_that_is_the_moved_fine_tune_itself_has_a_cosine_of_1(job, tmp_path):
    moved = transfusion.transport(job.tuned, base=job.a, onto=job.b, via=job.pi).save(tmp_path / "same")
    rows = numbers(transfusion.report(job.run, ceiling=moved), "ceiling")
    assert all(row[0] == "1.000" for row in rows.values())
    assert all(float(rows[role][1].replace("−", "-")) < 0.9 for role in ("query", "MLP in"))


def test_a_ceiling_that_is_no_fine_tune_of_b_is_refused(job, made, tmp_path, cli):
    stranger = made("vit-classifier", 5)
    code, _, err = cli("report", job.run, "--ceiling", stranger, "-o", tmp_path / "report.html")
    assert code == MismatchError.exit_code
    assert f"does not look like a fine-tune of {job.b}" in err
    assert "give B fine-tuned itself as --ceiling" in err
    assert not (tmp_path / "report.html").exists()


def test_a_pi_that_turns_units_shows_shares_of_energy_and_what_is_predicted(made, tmp_path):
    job = reports.make(tmp_path, made("vit-classifier"), "functional")
    page = transfusion.report(job.run)
    assert page.hero.verdict.endswith("of B predicted")
    rows = numbers(page, "layers-all")
    info = json.loads((job.run / "transfusion.json").read_text())["alignment"]["advice"]["axes"]
    assert rows.keys() == info.keys()
    assert numbers(page, "arriving")["MLP in"] != []
    assert section(page, "heads").parts[0].table.rows


def test_units_that_leave_their_heads_are_counted_head_by_head(job, monkeypatch):
    from dataclasses import replace

    from transfusion.alignment.maps import Map
    from transfusion.architecture.architecture import HeadPolicy

    a = Model.open(job.a)
    policy = replace(a.architecture.policy, heads=HeadPolicy.FLAT)
    flat = a.architecture.under(policy)
    size, heads = flat.sizes["layer.0.qk"], flat.sizes["layer.0.head"]
    turn = np.eye(size)
    here, there = 0, size - 1  # the first unit of the first head and the last of the last, half each
    turn[[here, there]] = [(turn[here] + turn[there]) / 2**0.5, (turn[here] - turn[there]) / 2**0.5]
    one = np.ones(1)
    metadata = replace(Alignment.load(job.pi).provenance, policy=policy)
    pi = Alignment.of({"layer.0.qk": Map.rotation(turn[None], one, one)}, flat, metadata)
    (panel,) = head_panels(pi, Bases(a=a))
    width = size // heads
    assert panel.shares.shape == (heads, heads)
    assert panel.shares[0, -1] == pytest.approx(0.5 / width)
    assert panel.shares.sum(axis=1) == pytest.approx(np.ones(heads))


def test_heads_in_groups_are_counted_one_by_one(made):

    a = made("llama")
    pi = transfusion.align(a, a, method="random", seed=5)
    groups, within = pi.maps["layer.1.group"].index[0], pi.maps["layer.1.rep"].index
    wanted = [
        source * len(row) + position for source, row in zip(groups, within, strict=True) for position in row
    ]
    assert len(wanted) > len(groups)
    panel = next(one for one in head_panels(pi, Bases()) if one.id == "layer.1.rep")
    assert panel.title == "layer 1 · attention heads"
    assert [source for _, source, _ in panel.strongest()] == wanted


def test_records_of_every_step_are_told(page, job):
    rows = [row[0] for row in section(page, "time").parts[0].table.rows]
    assert rows == ["align", "transport", "barrier", "evaluate", "fewshot", "sweep", "verify"]
    commands = [one.text for one in section(page, "commands").parts]
    assert commands[0].startswith("transfusion transport ")
    assert commands[-1] == "transfusion transport --from transfusion.json -o ../again"


def test_the_numbers_of_results_are_told_as_they_were(page):
    task, support = ["52.5 % (48.5 % to 56.5 %)", "+22.5 (+19.5 to +25.5)"], ["85.0 % (81.0 % to 89.0 %)"]
    assert numbers(page, "scores")["moved"] == [*task, *support, "−5.0 (−8.0 to −2.0)"]
    assert page.hero.numbers[0].note == "95 %: +19.5 to +25.5; accuracy 52.5 %"
    losses = section(page, "fewshot").parts[-1].table.rows
    assert [row[1] for row in losses] == ["0", "1", "2"], "before the first step, and after each"
    assert numbers(page, "fewshot-0")["outside blocks"] == ["1.000"]
    best = section(page, "alpha").parts[1].rows
    assert ("guarded", "1", "+25.0", "−5.0") in best
    assert numbers(page, "fewshot-0")["encoder.layer.0.*"] == ["0.400"]
    assert ("guarded", "0.010", "") in section(page, "barrier").parts[1].rows
    proof = section(page, "proof").parts[0].rows
    assert proof[0] == ("about", "this run's π and a")
    assert ("largest difference", "3e-15 over logits, in float64") in proof


def test_models_that_are_gone_are_said_to_be_gone(job, tmp_path):
    shutil.copytree(job.run, tmp_path / "moved")
    info = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    info["base"] |= {"name": "gone/a", "path": "/gone/a"}
    del info["settings"]["via"]
    (tmp_path / "moved" / "transfusion.json").write_text(json.dumps(info))
    page = transfusion.report(tmp_path / "moved")
    assert page.notes == [
        "The run did not keep its π in a file.", "gone/a is not at its recorded place."
    ]  # fmt: skip
    assert {one.id for one in page.sections} == {"moved", "advice", "time", "commands"}
    assert any("transfusion align gone/a" in one.text for one in page.missing)
    assert page.notes[1] in page.html()


def test_a_run_that_found_its_own_pi_shows_it(job, tmp_path):
    """Without --via, as in the README: π is kept with the output, and its heads and layers are drawn."""
    transfusion.transport(job.tuned, base=job.a, onto=job.b, output=tmp_path / "moved", method="random")
    page = transfusion.report(tmp_path / "moved")
    assert not page.notes
    assert {"layers", "heads"} <= {one.id for one in page.sections}
    assert page.hero.strands is not None


def test_other_weights_at_the_same_place_are_not_taken_for_the_same(job, tmp_path):
    shutil.copytree(job.run, tmp_path / "moved")
    info = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    info["onto"]["path"] = str(job.a)
    (tmp_path / "moved" / "transfusion.json").write_text(json.dumps(info))
    page = transfusion.report(tmp_path / "moved")
    assert page.notes == [f"{job.b} has other weights now."]


def test_a_folder_with_results_only(full, tmp_path):
    for name in ("sweep.json", "barrier.json"):
        shutil.copy(full.run / name, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.json").write_text("[1, 2")
    page = transfusion.report(tmp_path, [full.run / "evaluate.json"])
    assert page.hero.title == "tuned, moved onto b"
    assert [one.id for one in page.sections] == ["evaluation", "alpha", "barrier", "time", "commands"]
    assert page.hero.numbers[0].value == "+25.0"
    Reader(page.html())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", 'it has no "verb"'),
        ('{"verb": "dance"}', "its \"verb\" is 'dance'"),
        ('{"verb": "sweep", "task": {}}', "a result of sweep: task.data: field required"),
        (
            '{"verb": "evaluate", "task": {"metric": 3}, "models": [{}]}',
            "a result of evaluate: task.data: field required",
        ),
        ("nonsense", "not readable as JSON"),
    ],
)
def test_results_that_are_not_understood_are_refused_by_name(content, said, job, tmp_path, cli):
    (tmp_path / "odd.json").write_text(content)
    code, _, err = cli("report", job.run, tmp_path / "odd.json", "-o", tmp_path / "report.html")
    assert code == 1
    assert f"{tmp_path / 'odd.json'}: " in err
    assert said in err
    assert not (tmp_path / "report.html").exists()


def test_another_pi_is_refused(job, tmp_path):
    other = transfusion.align(job.a, job.b, method="random", seed=8).save(tmp_path / "other.safetensors")
    with pytest.raises(MismatchError, match="is another π than that of this run"):
        transfusion.report(job.run, via=other)


def test_the_verb_writes_and_protects(job, tmp_path, cli):
    output = tmp_path / "report.html"
    code, out, _ = cli("report", job.run, "-o", output)
    assert (code, out) == (
        0,
        f"written to {output}: Moved, Advice, Layers, Heads, Task vector, Time, Commands\n",
    )
    assert output.read_text().startswith("<!doctype html>")
    code, _, err = cli("report", job.run, "-o", output)
    assert code == OutputError.exit_code
    assert "exists already" in err
    code, _, err = cli("report", tmp_path / "none", "-o", output)
    assert "none: no such file or folder" in err, "what is missing comes before what is in the way"
    code, out, _ = cli("report", job.run, "-o", output, "--force", "--json")
    assert json.loads(out)["sections"][0] == "moved"


def test_what_a_report_is_made_of_is_never_overwritten(full, cli, tmp_path):
    inside = [full.run / name for name in ("transfusion.json", "sweep.json", "config.json")]
    weights = [place / "model.safetensors" for place in (full.run, full.ceiling, full.a, full.tuned)]
    for place in (*inside, *weights, full.pi):
        before = place.read_bytes()
        code, _, err = cli("report", full.run, "--ceiling", full.ceiling, "-o", place, "--force")
        assert code == OutputError.exit_code, place
        assert "is, or holds, an input" in err
        assert place.read_bytes() == before
    other = shutil.copy(full.run / "sweep.json", tmp_path / "other.json")
    assert cli("report", full.run, other, "-o", other, "--force")[0] == OutputError.exit_code
    page = full.run / "report.html"
    for _ in range(2):
        assert cli("report", full.run, "-o", page, "--force")[0] == 0
    page.unlink()


def test_results_about_other_models_are_marked_and_make_no_headline(job, tmp_path):
    other = tmp_path / "successor"
    shutil.copytree(job.b, other)
    files = [
        reports.write(tmp_path / f"{verb}.json", verb, info)
        for verb, info in {
            "sweep": reports.sweep(str(job.tuned), str(job.a), str(other)),
            "fewshot": reports.fewshot(str(job.tuned), str(job.a), str(other)),
            "barrier": reports.barrier(str(job.a), str(other)),
            "evaluate": reports.evaluation(str(other), str(tmp_path / "theirs"), str(job.ceiling)),
        }.items()
    ]
    page = transfusion.report(job.run, files)
    assert page.hero.numbers == transfusion.report(job.run).hero.numbers
    note = "sweep.json is about other models: tuned of a, moved onto successor."
    assert f"{note} It is not used for the main numbers." in page.notes
    assert len(page.notes) == 4
    for id in ("alpha", "fewshot", "barrier"):
        assert section(page, id).parts[0].startswith("About other models: ")
    (scores,) = section(page, "evaluation").parts
    assert scores.caption.startswith("About other models: successor, theirs and ceiling. Task: ")
    assert scores.table.strong is None


def test_a_result_is_known_by_its_models_however_they_were_written(job, tmp_path, monkeypatch):
    monkeypatch.chdir(job.a.parent)
    info = reports.sweep("tuned", "./a", str(job.b))
    place = reports.write(tmp_path / "sweep.json", "sweep", info)
    assert transfusion.report(job.run, [place]).hero.numbers[0].value == "+25.0"
    monkeypatch.chdir(tmp_path)  # from here, the relative paths lead nowhere
    page = transfusion.report(job.run, [place])
    assert page.hero.numbers[0].value == "+25.0"
    assert page.notes == []


def test_a_folder_of_results_on_several_targets_has_no_headline(full, tmp_path):
    b, other = str(full.b), "models/successor"
    reports.write(tmp_path / "sweep.json", "sweep", reports.sweep(str(full.tuned), str(full.a), b))
    for name, onto in (("one", b), ("two", other)):
        info = reports.evaluation(onto, str(full.run), str(full.ceiling))
        reports.write(tmp_path / f"{name}.json", "evaluate", info)
    page = transfusion.report(tmp_path, via=full.pi)
    assert "layers" in [one.id for one in page.sections]
    assert page.hero.title == f"Results in {tmp_path.name}"
    assert page.hero.numbers == [], "not even of π, which is about one of them"
    assert page.hero.stations == []
    assert "several targets, b and successor" in page.hero.summary
    titles = [one.title for one in section(page, "evaluation").parts]
    assert titles == ["Accuracy of each model onto b", "Accuracy of each model onto successor"]


def test_an_evaluation_makes_the_headline_rather_than_the_best_of_a_sweep(full, tmp_path):
    for name in ("sweep.json", "evaluate.json"):
        shutil.copy(full.run / name, tmp_path / name)
    assert transfusion.report(tmp_path, ceiling=full.ceiling).hero.numbers[0].value == "+22.5"
    (tmp_path / "evaluate.json").unlink()
    first = transfusion.report(tmp_path).hero.numbers[0]
    assert (first.value, first.note) == (
        "+25.0",
        "guarded, α = 1, the best of the sweep, chosen on this data",
    )


def test_hostile_names_stay_text(full, tmp_path):
    info = json.loads((full.run / "sweep.json").read_text())
    hostile = '<script>alert("x")</script>&"\''
    info["curves"][1]["label"] = info["finetuned"] = hostile
    (tmp_path / "sweep.json").write_text(json.dumps(info))
    text = transfusion.report(tmp_path).html()
    assert "<script>alert" not in text
    assert any(tip.startswith(hostile) for tip in Reader(text).tips)


def test_verify_keeps_its_result(job, tmp_path, cli):
    code, out, _ = cli("verify", job.a, "--via", job.pi, "-o", tmp_path / "verify.json")
    assert code == 0
    assert out.startswith("π(A) computes what A computes")
    assert out.endswith(f"\nwritten to {tmp_path / 'verify.json'}\n")
    info = json.loads((tmp_path / "verify.json").read_text())
    assert (info["verb"], info["equal"], info["outputs"]) == ("verify", True, ["logits"])
    assert info["run"]["seconds"] > 0
    assert (info["a"], info["via"]) == (str(job.a), str(job.pi))
    pi = Alignment.load(job.pi)
    assert info["alignment"] == {"blake3": pi.digest, "method": pi.provenance.method}
    code, _, err = cli("verify", job.a, "--via", job.pi, "-o", tmp_path / "verify.json")
    assert code == 1
    assert "exists already" in err
    code, _, err = cli("verify", job.a, "--via", job.pi, "-o", tmp_path / "verify.txt")
    assert code == 1
    assert "verify.txt: not a file of JSON" in err
    other = tmp_path / "impossible.json"
    assert cli("verify", job.a, "--via", job.pi, "-o", other, "--tolerance", "0")[0] == 3
    assert json.loads(other.read_text())["equal"] is False, "a proof that fails is a result, too"


def test_a_prediction_names_its_pi_by_content(job, tmp_path, cli):
    assert cli("verify", job.a, "--via", job.pi, "--onto", job.b, "-o", tmp_path / "verify.json")[0] == 0
    info = json.loads((tmp_path / "verify.json").read_text())
    assert info["alignment"]["blake3"] == Alignment.load(job.pi).digest
    assert (info["a"], info["b"], info["holds"]) == (str(job.a), str(job.b), True)
    found = section(transfusion.report(job.run, [tmp_path / "verify.json"]), "proof")
    assert found.parts[0].rows[0] == ("about", "this run's π and a")


def test_a_proof_about_another_pi_is_none_of_this_run(job, tmp_path):
    foreign = {**job.proof("0" * 64), "via": "elsewhere/pi-other.safetensors", "axes": {"x": {}}}
    place = reports.write(tmp_path / "verify.json", "verify", foreign)
    page = transfusion.report(job.run, [place])
    note = (
        f"verify.json is left out: it is about another π (pi-other.safetensors), {'0' * 12}…, not this run's."
    )
    assert note in page.notes
    assert note.replace("'", "&#39;") in page.html()
    assert "proof" not in [one.id for one in page.sections]
    assert any(one.text.startswith("transfusion verify") for one in page.missing)
    assert "verify" not in [row[0] for row in section(page, "time").parts[0].table.rows]


@pytest.mark.parametrize("name", ["vit", "clip", "gpt2", "llama", "bert", "mixtral", "t5", "whisper"])
def test_parts_of_the_model_are_told_from_layouts(name, made):
    found = tensor_roles(Model.open(made(name)).architecture)
    by_role: dict[str, set[str]] = {}
    for tensor, role in found.items():
        by_role.setdefault(role, set()).add(tensor)
    assert {"embeddings", "norms", "attention output", "MLP in", "MLP out"} <= by_role.keys()
    fused = "query + key + value" in by_role
    assert fused == (name == "gpt2")
    if not fused:
        assert all(re.search(r"q(uery|_proj|)\.", tensor) for tensor in by_role["query"])
        assert all(re.search(r"k(ey|_proj|)\.", tensor) for tensor in by_role["key"])
        assert by_role["value"]
    assert all("norm" in tensor.lower() or "ln" in tensor for tensor in by_role["norms"]), by_role["norms"]
    assert not by_role.get("other", set()) - {t for t in found if "gate" in t or "relative" in t}


CHARTS = {
    "bars": bars(
        "id", "bars", [("one", [0.4, 0.1]), ("two", [None, 0.2])], ["found"], brief, tick="null"
    ).draw,
    "lines": lines(
        "id", "lines", [Curve("one", [(0, 1.0), (1, 2.0)]), Curve("two", [(0, 0.5)], 1)], "α", "loss", brief
    ).draw,
    "heat map": partial(draw_heat_map, "heads", [("layer 0", np.eye(4))], ()),
    "strands": partial(draw_strands, "strands", np.eye(8)),
}


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS.keys())
def test_every_chart_follows_the_theme_and_is_the_same_every_time(chart, width):
    text = chart(width)
    assert text == chart(width)
    assert Reader(text).tips
    assert not re.search(r"#[0-9a-f]{6}", text), "a colour that no theme changes"
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(VARIABLES.values())
    assert set(re.findall(r"<(\w+)", text)) <= {"svg", "path", "text"}
    assert not re.search(r"\b(id|href|clip-path|xmlns)=", text)


def test_names_that_a_drawing_library_or_xml_takes_for_something_else_stay_text():
    for name in ("$\\frac{1}{0}$", "<b>&amp;", "tab\x08 and \x00", "名前", "a" * 300):
        text = bars("id", name, [(name, [0.5])], ["found"], brief).draw(NARROW)
        (tip,) = Reader(text).tips
        assert tip == name.replace("\x00", "�").replace("\x08", "�") + ": 0.5"


def test_large_matrices_are_drawn_in_part_and_told_whole():
    rng = np.random.default_rng(0)
    matrices = [(f"layer {i}", rng.dirichlet(np.ones(16), 16)) for i in range(64)]
    shown = drawn_panels(matrices)
    assert 1 < len(shown) < 64
    assert (shown[0][0], shown[-1][0]) == ("layer 0", "layer 63")
    assert len(Reader(draw_heat_map("heads", matrices, (), NARROW)).tips) <= 6500
