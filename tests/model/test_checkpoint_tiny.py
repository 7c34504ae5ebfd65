"""The tiny checkpoint: stock diffusers runs it, every path in it matters, and its prompt template has 129 tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from diffusers import Kandinsky6TI2VAPipeline
from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va as stock
from PIL import Image

from diptych.errors import CheckpointError
from diptych.model.checkpoint import Checkpoint
from diptych.model.template import PREFIX_TOKENS, PROMPT_TEMPLATE, TEMPLATE_PREFIX
from diptych.model.tiny import write_tiny
from diptych.model.vocabulary import QWEN_SPECIAL, clip_tokenizer, qwen_tokenizer

PROMPTS = ["a red ball", "a small dog is singing by the sea at night, and a bell rings"]


@pytest.fixture(scope="module")
def pipe(tiny_base):
    pipe = Kandinsky6TI2VAPipeline.from_pretrained(tiny_base)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def distilled_pipe(tiny_distilled):
    pipe = Kandinsky6TI2VAPipeline.from_pretrained(tiny_distilled)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def run(pipe, guidance, **asked):
    return pipe(
        PROMPTS[0],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
        **asked,
    )


@pytest.mark.parametrize("with_image", [False, True], ids=["T2VA", "I2VA"])
@pytest.mark.parametrize("kind", ["base", "distilled"])
def test_stock_diffusers_runs_it(kind, with_image, request, picture):
    pipe = request.getfixturevalue("pipe" if kind == "base" else "distilled_pipe")
    made = run(pipe, 5.0 if kind == "base" else 1.0, image=picture if with_image else None)
    frames, sound = made.frames[0], made.audio[0]
    assert frames.shape == (5, 32, 48, 3)
    assert frames.std() > 0.1 and np.mean((frames > 0) & (frames < 1)) > 0.8, "neither flat nor mostly clipped"
    assert sound.shape == (9 * 1024,), "5 frames at 24 a second are 8.97 latents of 1,024 samples"
    assert 0.02 < sound.std() < 0.5 and np.mean(np.abs(sound) < 1) > 0.99, "neither silent nor saturated"


@pytest.fixture(scope="module")
def velocity(pipe):
    """One forward with parts of it changed; returns both velocities."""
    draw = torch.Generator().manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(1, 3, 6, 8, 33, generator=draw),
        "audio_hidden_states": torch.randn(1, 11, 40, generator=draw),
        "encoder_hidden_states": torch.randn(1, 7, 48, generator=draw),
        "pooled_projections": torch.randn(1, 24, generator=draw),
        "timestep": torch.tensor([700.0]),
    }

    def forward(**changed):
        with torch.no_grad():
            return pipe.transformer(**inputs | changed, return_dict=False)

    return inputs, forward


CHANGES = {
    "video": {"hidden_states": 0.0},
    "audio": {"audio_hidden_states": 0.0},
    "text": {"encoder_hidden_states": 0.0},
    "pooled text": {"pooled_projections": 0.0},
    "time": {"timestep": 0.9},
}


@pytest.mark.parametrize("what", CHANGES)
def test_both_velocities_depend_on_every_input(velocity, what):
    inputs, forward = velocity
    changed = {name: inputs[name] * factor for name, factor in CHANGES[what].items()}
    for before, after in zip(forward(), forward(**changed), strict=True):
        assert (after - before).std() > 0.1 * before.std()


def test_the_token_type_matters(velocity):
    _, forward = velocity
    plain, typed = forward()[0], forward(visual_token_type_ids=torch.tensor([[0, 0, 1]]))[0]
    assert (typed - plain).std() > 0.1 * plain.std()


def test_every_tensor_of_the_transformer_matters(pipe, velocity):
    """The gradient of a random mixture of the outputs reaches every tensor."""
    inputs, _ = velocity
    model = pipe.transformer
    outputs = model(**inputs, visual_token_type_ids=torch.tensor([[0, 0, 1]]), return_dict=False)
    draw = torch.Generator().manual_seed(3)
    mixture = sum((out * torch.randn(out.shape, generator=draw)).mean() for out in outputs)
    gradients = torch.autograd.grad(mixture, list(model.parameters()))
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert gradient.norm() * parameter.norm() > 1e-5, name  # rounding would be near 1e-8


def test_the_template_is_that_of_diffusers_byte_for_byte():
    assert PROMPT_TEMPLATE == stock._PROMPT_TEMPLATE
    digest = hashlib.sha256(PROMPT_TEMPLATE.encode()).hexdigest()
    assert digest == "09efacd0c7584e236b605dfa1d8b76e87051f5d4ca99f79243e46cbec993c3bc"
    assert PREFIX_TOKENS == stock._QWEN_CROP_START == 129


def test_the_processor_cuts_129_tokens_before_the_prompt(pipe):
    tokenizer = pipe.tokenizer.tokenizer
    assert len(tokenizer(TEMPLATE_PREFIX)["input_ids"]) == 129
    for prompt in [*PROMPTS, "ünïcode — 12 + 3!", "promt scren dynamism postprocessing"]:
        ids = pipe.tokenizer(text=[PROMPT_TEMPLATE.format(prompt)])["input_ids"][0]
        assert tokenizer.decode(ids[129:]) == prompt + "<|im_end|>"


def test_longer_prompts_have_more_tokens(pipe):
    lengths = [len(pipe.tokenizer(text=[PROMPT_TEMPLATE.format(p)])["input_ids"][0]) for p in PROMPTS]
    assert lengths == [129 + 3 + 1, 129 + 17 + 1]


def test_words_of_the_list_are_one_token_each():
    words = ["banana", "Banane", "ban", "dynamisms", "other", "mother", "the", "smother"]
    text, clip = qwen_tokenizer(words), clip_tokenizer(words)
    for word in words:  # "dynamisms": only the four split words themselves stay split
        assert len(text.tokenize(word)) == len(text.tokenize(" " + word)) == 1, word
        assert len(clip.tokenize(word)) == 1, word
    assert text.decode(text("banananas 漢字")["input_ids"]) == "banananas 漢字", "and any other text can be spelt"
    assert len({text.convert_tokens_to_ids(token) for token in QWEN_SPECIAL}) == len(QWEN_SPECIAL)


def test_a_word_list_cannot_move_the_129(pipe):
    assert len(qwen_tokenizer(["promt", "scren", "dynamism", "postprocessing"])(TEMPLATE_PREFIX)["input_ids"]) == 129


def test_the_chat_template_serves_prompt_expansion(pipe):
    turn = [{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": "hi"}]}]
    assert pipe.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompt_expansion_runs_on_an_image(pipe, picture):
    torch.manual_seed(0)
    text = pipe.expand_prompts("a bell", pipe.tokenizer, pipe.text_encoder, "cpu", image=picture, max_sequence_length=4)
    assert isinstance(text, str)


def digests(folder):
    return {f.relative_to(folder): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()}


def test_same_seed_same_bytes_and_the_global_generator_is_left_alone(tiny_base, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again, other = write_tiny(tmp_path / "again"), write_tiny(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert digests(again) == digests(tiny_base)
    assert Checkpoint.open(other).fingerprint != Checkpoint.open(again).fingerprint
    assert sum(f.stat().st_size for f in again.rglob("*") if f.is_file()) < 20e6


@pytest.mark.parametrize("distilled", [False, True], ids=["base", "distilled"])
def test_released_dtypes(tmp_path, distilled):
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "tiny", distilled, dtypes="released"))
    stored = {t.name: str(t.dtype)[6:] for t in checkpoint["transformer"].tensors.values()}
    assert stored["video_time_embeddings.timestep_embedder.linear_1.weight"] == "float32"
    assert stored["visual_transformer_blocks.0.va_modulation.out_layer.weight"] == (
        "bfloat16" if distilled else "float32"
    )
    assert stored["visual_transformer_blocks.0.va_cross_attention.to_query.weight"] == "bfloat16"
    assert set(checkpoint["text_encoder"].dtypes) == {"bfloat16"}
    assert set(checkpoint["vae"].dtypes) == set(checkpoint["text_encoder_2"].dtypes) == {"float32"}
    assert len(checkpoint["audio_vae"].tensors) == 59 + 667, "a second copy of the vocoder"


def test_what_is_in_the_way_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is in the way"):
        write_tiny(tmp_path)
    with pytest.raises(CheckpointError, match="is in the way"):
        write_tiny(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unwritable_folder_is_told_in_one_sentence():
    with pytest.raises(CheckpointError, match=r"^/proc/diptych/tiny cannot be written: "):
        write_tiny("/proc/diptych/tiny")
