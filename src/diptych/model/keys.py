"""The names and shapes of the transformer's tensors, written as a grammar, and older spellings of them.

Source of the names: the parameters of diffusers' `Kandinsky6Transformer3DModel`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from diptych.model.config import TransformerConfig

Shape = tuple[int, ...]


def transformer_keys(config: TransformerConfig) -> dict[str, Shape]:
    """Every tensor of a transformer with `config`, name to shape: 39 + 28 a text block + 72 a fused block."""
    return dict(_transformer(config))


def stays_as_stored(name: str) -> bool:
    """Whether a transformer tensor keeps the dtype it is stored in, whatever the working dtype.

    These are the embeddings of time, text, pooled text, video, audio and token type, and all modulations: what the
    released files hold in float32 (the distilled ones hold their modulations in bfloat16).
    """
    return any(part.endswith("_embeddings") or part.endswith("modulation") for part in name.split("."))


def current_name(name: str) -> str:
    """The current spelling of a transformer tensor that an older bundle or the authors' own code wrote.

    Whole path segments are mapped, in the block they stand in: `self_attention` is an old name in a text block and the
    current one in a fused block. A name that is current already, or unknown, comes back unchanged.
    """
    parts = name.split(".")
    if parts[0].endswith("_time_embeddings") and len(parts) == 3:
        linear = {"in_layer": "linear_1", "out_layer": "linear_2"}.get(parts[1])
        return f"{parts[0]}.timestep_embedder.{linear}.{parts[2]}" if linear else name
    if not parts[0].endswith("_transformer_blocks") or len(parts) < 4:
        return name
    if parts[0] == "visual_transformer_blocks":
        parts[2] = {"videoT": "video_dec_block", "audioT": "audio_dec_block"}.get(parts[2], parts[2])
    elif parts[2] == "self_attention":
        parts[2] = "attn"
    if parts[-3] == "feed_forward":
        parts[-2] = {"in_layer": "net.0.proj", "out_layer": "net.2"}.get(parts[-2], parts[-2])
    return ".".join(parts)


def language_model_name(name: str) -> str | None:
    """A Qwen2.5-VL tensor's name in its language model; `None` for the vision tower and the word head.

    Written before the vision tower had a name of its own: `model.*` and `visual.*`; after:
    `model.language_model.*` and `model.visual.*`.
    """
    if re.match(r"(model\.)?visual\.|lm_head\.", name):
        return None
    return re.sub(r"^model\.(language_model\.)?", "", name)


def _transformer(c: TransformerConfig) -> Iterator[tuple[str, Shape]]:
    patch = c.patch_size[0] * c.patch_size[1] * c.patch_size[2]
    yield from _linear("visual_embeddings.in_layer", c.model_dim, patch * c.visual_in)
    if c.visual_token_type_num_embeddings:
        yield "visual_token_type_embeddings.weight", (c.visual_token_type_num_embeddings, c.model_dim)
    yield from _projection("audio_embeddings", c.model_dim_a, c.in_audio_dim)
    yield from _head("out_layer", c.model_dim, c.time_dim, patch * c.out_visual_dim)
    yield from _head("audio_out_layer", c.model_dim_a, c.time_dim_a, c.out_audio_dim)
    for modality, dim, time, ff in (
        ("video", c.model_dim, c.time_dim, c.ff_dim),
        ("audio", c.model_dim_a, c.time_dim_a, c.ff_dim_a),
    ):
        yield from _linear(f"{modality}_time_embeddings.timestep_embedder.linear_1", time, dim)
        yield from _linear(f"{modality}_time_embeddings.timestep_embedder.linear_2", time, time)
        yield from _projection(f"{modality}_text_embeddings", dim, c.in_text_dim)
        yield from _projection(f"{modality}_pooled_text_embeddings", time, c.in_text_dim2)
        for i in range(c.num_text_blocks):
            block = f"{modality}_text_transformer_blocks.{i}"
            yield from _linear(f"{block}.text_modulation.out_layer", 6 * dim, time)
            yield from _attention(f"{block}.attn", dim, dim, c.head_dim)
            yield from _feed_forward(f"{block}.feed_forward", dim, ff)
    for i in range(c.num_visual_blocks):
        yield from _fused_block(f"visual_transformer_blocks.{i}", c)


def _fused_block(block: str, c: TransformerConfig) -> Iterator[tuple[str, Shape]]:
    d, da = c.model_dim, c.model_dim_a
    for modality, dim, time, ff in (("video", d, c.time_dim, c.ff_dim), ("audio", da, c.time_dim_a, c.ff_dim_a)):
        part = f"{block}.{modality}_dec_block"
        yield from _linear(f"{part}.visual_modulation.out_layer", 9 * dim, time)
        yield from _attention(f"{part}.self_attention", dim, dim, c.head_dim)
        yield from _attention(f"{part}.cross_attention", dim, dim, c.head_dim)
        yield from _feed_forward(f"{part}.feed_forward", dim, ff)
    yield from _attention(f"{block}.va_cross_attention", d, da, c.head_dim)
    yield from _attention(f"{block}.av_cross_attention", da, d, c.head_dim)
    yield from _linear(f"{block}.va_modulation.out_layer", 2 * d + da, c.time_dim)
    yield from _linear(f"{block}.av_modulation.out_layer", 2 * da + d, c.time_dim_a)


def _linear(name: str, out_dim: int, in_dim: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_dim, in_dim)
    yield f"{name}.bias", (out_dim,)


def _projection(name: str, dim: int, in_dim: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.in_layer", dim, in_dim)
    yield f"{name}.norm.weight", (dim,)
    yield f"{name}.norm.bias", (dim,)


def _head(name: str, dim: int, time_dim: int, out_dim: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.modulation.out_layer", 2 * dim, time_dim)
    yield from _linear(f"{name}.out_layer", out_dim, dim)


def _attention(name: str, dim: int, kv_dim: int, head_dim: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.to_query", dim, dim)
    yield from _linear(f"{name}.to_key", dim, kv_dim)
    yield from _linear(f"{name}.to_value", dim, kv_dim)
    yield from _linear(f"{name}.out_layer", dim, dim)
    yield f"{name}.query_norm.weight", (head_dim,)
    yield f"{name}.key_norm.weight", (head_dim,)


def _feed_forward(name: str, dim: int, ff_dim: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.net.0.proj.weight", (ff_dim, dim)
    yield f"{name}.net.2.weight", (dim, ff_dim)
