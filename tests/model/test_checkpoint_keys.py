"""The grammar of the transformer's tensors against the stock class and the published counts and sizes."""

from __future__ import annotations

import math
import re

import pytest
import torch
from diffusers import Kandinsky6Transformer3DModel
from tests.model.checkpoint_files import as_native, as_older_bundle

from diptych.model.config import LITE, PRO, TransformerConfig
from diptych.model.keys import current_name, stays_as_stored, transformer_keys

RELEASED = {"pro": PRO, "pro-distill": PRO.distilled(), "lite": LITE, "lite-distill": LITE.distilled()}
TENSORS = {"pro": 4_471, "pro-distill": 4_471, "lite": 2_399, "lite-distill": 2_399}
PARAMETERS = {
    "pro": 30_136_326_248,
    "pro-distill": 30_139_423_760,
    "lite": 3_176_632_424,
    "lite-distill": 3_177_988_112,
}
TRANSFORMER_GB = {"pro": 69.734, "pro-distill": 60.344, "lite": 7.476, "lite-distill": 6.381}


@pytest.mark.parametrize("name", RELEASED)
def test_every_key_and_shape_is_that_of_the_stock_class(name):
    with torch.device("meta"):
        stock = Kandinsky6Transformer3DModel(**RELEASED[name].to_dict())
    assert transformer_keys(RELEASED[name]) == {key: tuple(t.shape) for key, t in stock.state_dict().items()}


@pytest.mark.parametrize("name", RELEASED)
def test_the_published_counts(name):
    keys = transformer_keys(RELEASED[name])
    assert len(keys) == TENSORS[name]
    assert sum(math.prod(shape) for shape in keys.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", RELEASED)
def test_what_stays_as_stored_explains_the_published_sizes(name):
    """Embeddings in float32, modulations in float32 or (distilled) bfloat16, all else bfloat16."""
    distilled = "distill" in name
    size = 0
    for key, shape in transformer_keys(RELEASED[name]).items():
        single = stays_as_stored(key) and not ("modulation" in key and distilled)
        size += math.prod(shape) * (4 if single else 2)
    assert size / 1e9 == pytest.approx(TRANSFORMER_GB[name], abs=0.0005)


def test_attention_feed_forward_and_heads_take_the_working_dtype():
    kept = {re.sub(r"\.\d+\.", ".i.", key) for key in transformer_keys(LITE) if stays_as_stored(key)}
    assert {key.split(".")[0] for key in kept if "modulation" not in key} == {
        *("visual_embeddings", "visual_token_type_embeddings", "audio_embeddings"),
        *(f"{m}_{kind}_embeddings" for m in ("video", "audio") for kind in ("time", "text", "pooled_text")),
    }
    assert {key.rsplit(".", 3)[1] for key in kept if "modulation" in key} == {
        *("text_modulation", "visual_modulation", "va_modulation", "av_modulation", "modulation")
    }


@pytest.mark.parametrize(("config", "renamed"), [(LITE, 184), (PRO, 344)], ids=["lite", "pro"])
def test_older_names_are_read(config: TransformerConfig, renamed: int):
    keys = list(transformer_keys(config))
    assert sum(as_older_bundle(key) != key for key in keys) == renamed, "the published count of renamed tensors"
    assert [current_name(as_older_bundle(key)) for key in keys] == keys
    assert [current_name(as_native(key)) for key in keys] == keys


def test_current_and_unknown_names_stay():
    for key in [*transformer_keys(LITE), "videoT.weight", "out_layer.in_layer.weight", "lora.self_attention.a.b"]:
        assert current_name(key) == key


def test_self_attention_is_an_old_name_in_a_text_block_only():
    fused = "visual_transformer_blocks.0.video_dec_block.self_attention.to_query.weight"
    assert current_name(fused) == fused
    assert current_name("video_text_transformer_blocks.0.self_attention.to_query.weight") == (
        "video_text_transformer_blocks.0.attn.to_query.weight"
    )
