"""Probes: of every family's kind, the same for one seed, and like what the models are made for."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.first import OPEN_CLIP, _keep_open_clip, _open_clip
from small_models import BERT, CASES, FIRST, GPT2, OFTEN, VIT, Case, often
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes import enough_probes, make_probes, texts, tokens_of_a_probe
from transfusion.running.probes.audio import coloured_noise, log_mel
from transfusion.running.probes.audio import synthetic_audio as sounds
from transfusion.running.probes.images import normalisation, overlapping_shapes, patch_grid, smooth_noise
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.probed_model import ProbedModel, seeded_generator
from transfusion.running.probes.texts import (
    TOGETHER,
    corpus,
    frequent_tokens,
    generate_texts,
    natural_length,
    ordinary_tokens,
)
from transfusion.running.streaming import run_side_by_side
from wording import (
    BERT_WORDS,
    CLS,
    GPT2_WORDS,
    PAD,
    SEP,
    UNK,
    WORDS,
    joined,
    put_tokenizer,
    shown,
    subject_of,
)


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """A folder with a model of a case and the tokenizer."""

    def make(of: Case, seed: int = 1, words: int = WORDS) -> Path:
        return put_tokenizer(of.save(tmp_path_factory.mktemp("worded") / of.name, seed), words)

    return make


# ── every family ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", often(sorted(CASES), [FIRST[family] for family in OFTEN]))
def test_every_live_model_reads_its_probes(name, made):
    subject = subject_of(made(name))
    model, module = subject.model, subject.module
    probes, again, other = (make_probes(ProbedModel(model, module), 5, seed) for seed in (1, 1, 2))
    for inputs, same, differs in zip(probes.batches, again.batches, other.batches, strict=True):
        assert {len(one) for one in inputs.values()} == {5}
        assert all(torch.equal(inputs[key], same[key]) for key in inputs)
        assert any(not torch.equal(inputs[key], differs[key]) for key in inputs)
        assert all(one.dtype in (torch.float32, torch.int64) for one in inputs.values())
        outputs = run_model(module, model.family, inputs, double=False)
        assert all(torch.isfinite(one).all() for one in outputs.values())
    assert probes.about == again.about
    assert "5 " in probes.about


def test_batches_have_at_most_32(made):
    batches = shown(made("vit"), count=70).batches
    assert [len(batch["pixel_values"]) for batch in batches] == [32, 32, 6]


# ── the corpus ───────────────────────────────────────────────────────────────────────────────


def test_the_corpus_is_large_and_says_nothing_twice():
    passages = [text for group in corpus().values() for text in group]
    assert sum(len(text.split()) for text in passages) >= 12_000
    assert len(passages) == len(set(passages)) >= 300
    assert all(len(group) >= 4 for group in corpus().values())
    assert not any("\ufffd" in text or text != text.strip("\n") for text in passages)


FOREIGN = [
    "german",
    "french",
    "spanish",
    "italian",
    "portuguese",
    "polish",
    "russian",
    "chinese",
    "japanese",
    "arabic",
    "hindi",
]


@pytest.mark.parametrize(
    ("language", "letters"),
    [
        ("german", "äöüß"),
        ("french", "éèçœ"),
        ("spanish", "ñ¿áí"),
        ("italian", "èùòà"),
        ("portuguese", "ãõçê"),
        ("polish", "łęąż"),
        ("russian", "ыяжщ"),
        ("chinese", "的了是吗"),
        ("japanese", "のはをカ"),
        ("arabic", "المو"),
        ("hindi", "हैका"),
    ],
)
def test_every_language_is_written_in_its_letters(language, letters):
    text = "".join(corpus()[f"{language}.txt"])
    assert sum(letter in text for letter in letters) >= 3


def test_at_least_half_of_the_corpus_is_english():
    english = [text for name, group in corpus().items() if name[:-4] not in FOREIGN for text in group]
    words = sum(len(text.split()) for text in english)
    assert words > sum(len(text.split()) for group in corpus().values() for text in group) / 2


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def test_texts_are_whole_windows_of_the_corpus_between_special_tokens(worded):
    import transformers

    folder = worded(BERT_WORDS)
    probes = shown(folder)
    ids = joined(probes, "input_ids")
    assert probes.about == "40 passages of the bundled corpus"
    assert ids.shape == (40, BERT["max_position_embeddings"])
    assert (ids[:, 0] == CLS).all()
    assert (ids[:, -1] == SEP).all()
    assert not torch.isin(ids[:, 1:-1], torch.tensor([PAD, CLS, SEP])).any()
    assert not joined(probes, "token_type_ids").any()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    known = [row for row in ids[:, 1:-1] if UNK not in row]
    whole = "".join(text for group in corpus().values() for text in group)
    found = [tokenizer.decode(row).replace(" ", "")[2:-2] in whole.replace(" ", "") for row in known]
    assert sum(found) >= 0.8 * len(found) > 10  # the others go over the end of a passage


def test_texts_of_all_styles_are_mixed(worded):
    first, second = (joined(shown(worded(BERT_WORDS), seed=seed), "input_ids") for seed in (0, 1))
    rows = {tuple(row.tolist()) for row in first}
    assert len(rows) == 40
    assert len(rows & {tuple(row.tolist()) for row in second}) < 10


def test_more_texts_than_windows_start_at_other_places(worded):
    probes = shown(worded(BERT_WORDS), count=9000)
    rows = {tuple(row.tolist()) for row in joined(probes, "input_ids")}
    assert len(rows) > 8900


def test_a_tokenizer_that_knows_more_than_the_model_is_not_used(worded):
    probes = shown(worded(BERT_WORDS, words=2 * WORDS))
    assert probes.about.startswith("40 sequences of random frequent tokens (the tokenizer has token ")
    assert probes.about.endswith(f", and the model knows {WORDS})")
    assert joined(probes, "input_ids").max() < WORDS


def test_a_broken_tokenizer_is_told_of(tmp_path):
    folder = BERT_WORDS.save(tmp_path / "a", 1)
    (folder / "tokenizer.json").write_text("{}")
    assert "(the tokenizer cannot be used: " in shown(folder).about


def test_without_a_tokenizer_tokens_are_random_and_frequent(made):
    probes = shown(made("bert"))
    assert probes.about == "40 sequences of random frequent tokens (no tokenizer in the model's folder)"
    assert not joined(probes, "token_type_ids").any()


def test_frequent_tokens_follow_zipf_between_the_special_ones(made):
    subject = subject_of(made("bart"))
    settings = subject.settings
    ids = frequent_tokens(subject, 400, seeded_generator(0, 0))
    assert (ids[:, 0] == settings["bos_token_id"]).all()
    assert (ids[:, -1] == settings["eos_token_id"]).all()
    assert ids.shape == (400, subject.length)
    drawn = ids[:, 1:-1].flatten()
    assert not set(drawn.tolist()) & subject.special
    counts = drawn.bincount(minlength=subject.vocabulary)
    free = [id for id in range(subject.vocabulary) if id not in subject.special]
    assert counts[free[0]] > 1.5 * counts[free[1]] > 2 * counts[free[5]] > 0


# ── what models write ────────────────────────────────────────────────────────────────────────


def test_language_models_write_half_of_their_texts(worded):
    probes = shown(worded(GPT2_WORDS), count=41)
    assert probes.about == "20 passages of the bundled corpus and 21 sequences that the model wrote"
    assert joined(probes, "input_ids").shape == (41, GPT2["n_positions"])


def test_without_a_tokenizer_they_write_all(made):
    probes = shown(made("gpt2"))
    assert probes.about == "40 sequences that the model wrote (no tokenizer in the model's folder)"


def test_a_model_in_memory_writes_as_well(made):
    subject = subject_of(made("gpt2"))
    probes = make_probes(ProbedModel(Model.open(subject.module), subject.module), 40, 0)
    wanted = make_probes(subject, 40, 0)
    assert torch.equal(joined(probes, "input_ids"), joined(wanted, "input_ids"))
    assert "no tokenizer in GPT2LMHeadModel in memory, which is no folder" in probes.about


def test_what_a_model_writes_depends_on_its_weights(made):
    first, again, other = (
        generate_texts(subject_of(made("llama", seed)), 8, seeded_generator(0, 0)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_a_model_writes_is_what_it_finds_likely(made):
    subject = subject_of(made("gpt2"))
    ids = generate_texts(subject, 200, seeded_generator(0, 0))
    random = ids.clone()
    random[:, 1:] = ordinary_tokens(subject, (200, ids.shape[1] - 1), seeded_generator(0, 1))

    def loss(texts: torch.Tensor) -> float:
        with torch.no_grad():
            return float(subject.module(input_ids=texts, labels=texts).loss)

    assert loss(ids) < loss(random) - 0.5
    assert not torch.isin(ids[:, 1:], torch.tensor(sorted(subject.special))).any()


@pytest.mark.parametrize(
    ("ends", "length"),
    [
        ([60] * 40, 60),
        ([60] * 30 + [0] * 10, 256),
        ([20] * 40, 48),
        ([50] * 20 + [150] * 20, 150),
    ],
    ids=["all-end", "many-go-on", "short-ones", "nine-in-ten"],
)
def test_texts_are_as_long_as_nine_in_ten_that_the_model_ends(ends, length, made, monkeypatch):
    subject = subject_of(made("llama"))
    end = subject.token("eos")
    written = torch.full((len(ends), 256), end + 1)
    for row, tokens in enumerate(ends):
        if tokens:
            written[row, tokens - 1] = end
    monkeypatch.setattr(ProbedModel, "positions", 4096)
    monkeypatch.setattr(texts, "generate_texts", lambda *asked: written)
    assert natural_length(subject, 0) == length
    monkeypatch.setattr(ProbedModel, "positions", 100)
    written = written[:, :100]
    assert natural_length(subject, 0) == min(length, 100)


def test_without_a_known_end_texts_have_a_fixed_length(made, monkeypatch):
    subject = subject_of(made("llama"))
    monkeypatch.setattr(ProbedModel, "positions", 4096)
    monkeypatch.setattr(ProbedModel, "ends", [])
    assert natural_length(subject, 0) == 128
    monkeypatch.setattr(ProbedModel, "positions", 100)
    assert natural_length(subject, 0) == 100


def test_a_model_with_several_ends_may_end_its_texts_by_each(made):
    subject = subject_of(made("llama"))
    end, other = subject.token("eos"), subject.vocabulary - 2
    chat = replace(subject, module=deepcopy(subject.module), window=24)
    chat.module.config.eos_token_id = [end, other]
    assert chat.ends == [end, other]
    ids = generate_texts(chat, 200, seeded_generator(0, 0))
    for one in chat.ends:
        ended = ids[:, 1:-1] == one
        assert ended.any()
        assert (ids[:, 2:][ended] == subject.token("bos")).all()


def test_a_text_that_the_model_ends_is_followed_by_the_next_one(made):
    subject = subject_of(made("llama"))
    begin, end = subject.token("bos"), subject.token("eos")
    assert begin != end
    ids = generate_texts(replace(subject, window=32), 200, seeded_generator(0, 0))
    assert ids.shape == (200, 32)
    ended = ids[:, 1:-1] == end
    assert ended.any(), "the model ends some of its texts"
    assert (ids[:, 2:][ended] == begin).all()
    assert not torch.isin(ids, torch.tensor(sorted(subject.special - {begin, end}))).any()


def test_passes_side_by_side_write_the_same(made):
    subject = subject_of(made("llama"))
    passes = []

    def each(run, count):
        passes.append(count)
        run_side_by_side(run, count, 2)

    alone, together = (
        generate_texts(one, 2 * TOGETHER + 1, seeded_generator(0, 0))
        for one in (subject, replace(subject, each=each))
    )
    assert torch.equal(alone, together)
    assert set(passes) == {3}


WRITERS = (
    *("bloom", "falcon-7b", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "gptj", "llama", "mixtral"),
    *("olmo2", "opt", "phi", "phi3", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_computed_already_is_not_forgotten(name, made):
    """A model that reads only the last token and remembers the others writes what it would without."""
    subject = subject_of(made(name))
    assert subject.writes
    wanted = generate_texts(subject, 3, seeded_generator(0, 0))
    forward = subject.module.forward

    def forgetful(input_ids: Any, past_key_values: Any, **more: Any) -> Any:
        assert past_key_values is None
        return forward(input_ids=input_ids, **{**more, "use_cache": False})

    subject.module.forward = forgetful
    assert torch.equal(wanted, generate_texts(subject, 3, seeded_generator(0, 0)))


@pytest.mark.parametrize(
    "name", ["bert-untied", "gpt2-classifier", "t5-generation", "clip", "whisper-generation", "vit"]
)
def test_other_models_write_nothing(name, made):
    assert not subject_of(made(name)).writes


# ── encoders and decoders ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_decoders_get_another_text_behind_their_first_token(name, made):
    subject = subject_of(made(name))
    probes = make_probes(subject, 6, 0)
    read, said = (joined(probes, key) for key in ("input_ids", "decoder_input_ids"))
    start = subject.settings["decoder_start_token_id"]
    assert (said[:, 0] == start).all()
    body = said if (read[:, 0] == start).all() else said[:, 1:]
    assert torch.equal(body, read.roll(1, 0)[:, : body.shape[1]])
    assert not torch.equal(read[:, 1:], said[:, 1:])
    assert ((read == subject.settings["eos_token_id"]).sum(1) == 1).all()


def test_open_clip_ends_its_texts_with_the_largest_token(made):
    probes = shown(made("open_clip"))
    ids = joined(probes, "input_ids")
    assert ids.shape == (40, 13)
    assert (ids.argmax(1) == 12).all()
    assert probes.about.startswith("40 images of overlapping shapes and of smooth noise; 40 sequences")


def test_open_clip_brings_its_own_tokenizer(tmp_path):
    import open_clip

    config = {**OPEN_CLIP, "text_cfg": {**OPEN_CLIP["text_cfg"], "vocab_size": 49408}}
    of = Case(
        "words", lambda: _open_clip(config), "open_clip", lambda *given: _keep_open_clip(config, *given)
    )
    probes = shown(of.save(tmp_path / "a", 1))
    ids = joined(probes, "input_ids")
    assert (
        probes.about
        == "40 images of overlapping shapes and of smooth noise; 40 passages of the bundled corpus"
    )
    assert (ids[:, 0] == 49406).all()
    assert (ids.argmax(1) == 12).all()
    plain = [
        text for text in map(open_clip.SimpleTokenizer().decode, ids[:, 1:-1].tolist()) if text.isascii()
    ]
    assert len(plain) > 10


# ── images ───────────────────────────────────────────────────────────────────────────────────


def test_images_have_shapes_with_edges_and_some_are_noise(made):
    images = joined(shown(made("vit")), "pixel_values")
    assert images.abs().max() <= 2, "pixels between 0 and 1, less 0.5, in quarters"
    assert images.flatten(1).std(1).min() > 0.1, "there is something in every image"
    assert 0.4 < images.std() < 1.2
    drawn = overlapping_shapes(8, 3, 56, 56, seeded_generator(0, 0))
    blobs = torch.cat([smooth_noise((3, 56, 56), 5, seeded_generator(number, 0)) for number in range(8)])
    flat, smooth = (one.diff(dim=-1).abs().flatten() / one.std() for one in (drawn, blobs))
    assert flat.quantile(0.5) < smooth.quantile(0.5), "areas of one colour"
    assert flat.quantile(0.995) > 2 * smooth.quantile(0.995), "and edges between them"


def test_noise_is_smooth_and_of_unit_variance():
    assert smooth_noise((3, 56, 56), 9, seeded_generator(0, 0)).std() == pytest.approx(1)
    coarse, fine = (smooth_noise((3, 56, 56), cells, seeded_generator(0, 0)) for cells in (3, 14))
    steps = [one.diff(dim=-1).abs().mean() for one in (coarse, fine)]
    assert 3 * steps[0] < steps[1]
    noise = torch.randn(1, 3, 56, 56, generator=seeded_generator(0, 0))
    assert 3 * steps[1] < noise.diff(dim=-1).abs().mean()


@pytest.mark.parametrize(
    ("info", "mean", "std"),
    [
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]),
        ({"image_processor": {"image_mean": 0.5, "image_std": 0.5}}, [0.5] * 3, [0.5] * 3),
        ({"do_normalize": False, "image_mean": [9] * 3, "image_std": [9] * 3}, [0] * 3, [1] * 3),
    ],
)
def test_images_are_prepared_as_the_folder_tells(info, mean, std, tmp_path):
    folder = CASES["vit"].save(tmp_path / "a", 1)
    (folder / "preprocessor_config.json").write_text(json.dumps(info))
    images = joined(shown(folder), "pixel_values")
    pixels = images * torch.tensor(std).reshape(1, 3, 1, 1) + torch.tensor(mean).reshape(1, 3, 1, 1)
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    assert pixels.mean() == pytest.approx(0.5, abs=0.05)
    assert pixels.std() == pytest.approx(0.25, abs=0.03)


def test_timm_and_open_clip_tell_it_in_their_own_words(made):
    def numbers(subject: ProbedModel) -> list[list[float]]:
        return [pytest.approx(one.flatten().tolist()) for one in normalisation(subject)]

    assert numbers(subject_of(made("open_clip"))) == [[0.5] * 3, [0.5] * 3]
    of_timm = subject_of(made("timm-vit"))
    info = of_timm.module.pretrained_cfg
    assert numbers(of_timm) == [list(info["mean"]), list(info["std"])]
    assert numbers(subject_of(made("vit"))) == [[0.5] * 3, [0.25] * 3], "if nobody tells it"


def test_patches_are_cut_as_the_library_cuts_them(made):
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches

    from transfusion.running.probes.images import image_inputs, size

    subject = subject_of(made("siglip2-vision"))
    image = torch.randn(1, *size(subject))
    inputs = image_inputs(subject, image)
    wanted = convert_image_to_patches(image[0], subject.settings["patch_size"])
    assert torch.equal(inputs["pixel_values"][0], wanted)
    assert inputs["spatial_shapes"].prod(1).tolist() == [len(wanted)]


# ── sounds ───────────────────────────────────────────────────────────────────────────────────


def test_sounds_have_zero_mean_and_unit_variance_and_no_length_but_the_models(made):
    one = joined(shown(made("wav2vec2"), count=8), "input_values")
    assert one.mean(1).abs().max() < 1e-5
    assert torch.allclose(one.std(1), torch.ones(8), atol=1e-4)
    assert one.shape[1] <= 16000


def slope(sound: torch.Tensor) -> float:
    """How fast the power falls with the frequency, in doubly logarithmic terms."""
    power = torch.fft.rfft(sound.double()).abs().square()[1:]
    bands = torch.stack([power[2**k - 1 : 2 ** (k + 1) - 1].mean().log2() for k in range(3, 12)])
    place = torch.arange(len(bands), dtype=torch.float64)
    place = place - place.mean()
    return -float((bands * place).sum() / place.square().sum())


@pytest.mark.parametrize("wanted", [0.0, 1.0, 2.0])
def test_noise_is_white_to_brown(wanted):
    assert slope(coloured_noise(16000, seeded_generator(0, 0), wanted)) == pytest.approx(wanted, abs=0.25)


def test_voices_have_resonances_and_chirps_move():
    speech, noise, other, chirp = sounds(4, 16000, seeded_generator(3, 0))
    assert not torch.allclose(speech, other)

    def peak(sound: torch.Tensor) -> float:
        spectrum = torch.fft.rfft(sound).abs()
        return float(spectrum.max() / spectrum.mean())

    assert peak(speech) > 10
    begin, end = (int(torch.fft.rfft(part).abs().argmax()) for part in (chirp[:1600], chirp[-1600:]))
    assert begin != end
    assert torch.isfinite(noise).all()


@pytest.mark.parametrize("bins", [80, 128])
def test_spectrograms_are_those_of_whisper(bins):
    import transformers

    sound = sounds(2, 480000, seeded_generator(0, 0))
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    quiet = [0.1 * one for one in sound.numpy()]
    wanted = extractor(quiet, sampling_rate=16000, return_tensors="pt").input_features
    assert torch.allclose(log_mel(sound, bins), wanted, atol=1e-4)


def test_whisper_hears_sounds_and_says_something_else(made):
    subject = subject_of(made("whisper"))
    probes = make_probes(subject, 8, 0)
    heard = joined(probes, "input_features")
    assert heard.shape[1:] == (subject.settings["num_mel_bins"], 2 * subject.settings["max_source_positions"])
    assert (joined(probes, "decoder_input_ids")[:, 0] == subject.settings["decoder_start_token_id"]).all()
    assert probes.about.startswith("8 synthetic sounds; 8 sequences of random frequent tokens")


def test_images_of_two_models_of_one_architecture_are_the_same(made):
    first, second = (shown(made("vit", seed)) for seed in (1, 2))
    assert torch.equal(joined(first, "pixel_values"), joined(second, "pixel_values"))
    assert VIT["image_size"] == joined(first, "pixel_values").shape[-1]


def test_large_inputs_need_fewer_probes(made):
    """Four patches or tokens for each sample are plenty."""
    model = Model.open(made("vit-classifier"))
    subject = ProbedModel(model, build(model))
    tokens = tokens_of_a_probe(subject)
    rows, columns = patch_grid(subject)
    assert tokens == 1 + rows * columns
    assert enough_probes(subject, 320, samples=5120) == min(320, 32 * -(-(4 * 5120) // (32 * tokens)))
    assert enough_probes(subject, 320, samples=tokens * 8) == 32, "whole batches"
    assert enough_probes(subject, 20, samples=5120) == 20, "never more than were asked for"
