"""Tokenizers built from a list of words, in the classes and file formats of the released checkpoints.

Byte-level BPE can spell any text, so a small vocabulary is a complete one; each listed word becomes one token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

from diptych.model.template import CLIP_TOKENS, PREFIX_TOKENS, TEMPLATE_PREFIX

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, Qwen2Tokenizer

QWEN_SPECIAL = tuple(
    f"<|{name}|>"
    for name in (
        *("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end"),
        *("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"),
    )
)
QWEN_TOKENS = 131_072

# The released vocabulary spells these four words of the template in two tokens each; so its 125 words and signs are
# 129 tokens.
_SPLIT_IN_TWO = ((" prom", "t"), (" sc", "ren"), (" dynam", "ism"), (" post", "processing"))

_CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class BytePairs:
    """Merges added word by word, so that every word added is one token and stays one.

    A merge added later ranks behind all merges that an earlier word needs, so it never gets in their way.
    `end` closes the last symbol of a word (CLIP's `</w>`).
    """

    def __init__(self, end: str = "") -> None:
        self._end = end
        self._rank: dict[tuple[str, str], int] = {}
        self._apart: set[tuple[str, str]] = set()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokens = dict.fromkeys(alphabet + ([symbol + end for symbol in alphabet] if end else []))

    def add(self, word: str) -> None:
        """Make `word` one token, unless it is one that `add_split` keeps in two."""
        self._merge_all([*_symbols(word)[:-1], _symbols(word)[-1] + self._end])

    def add_split(self, left: str, right: str) -> None:
        """Make `left` and `right` one token each, that no later word joins. For the first words of a vocabulary."""
        halves = [self._merge_all(_symbols(half)) for half in (left, right)]
        pieces = self._apply(_symbols(left + right))
        assert pieces == halves, (pieces, halves)
        self._apart.add((pieces[0], pieces[1]))

    @property
    def merges(self) -> list[tuple[str, str]]:
        return list(self._rank)

    def vocab(self, special: Sequence[str]) -> dict[str, int]:
        """Token to id: the bytes, then the merges, then the special tokens."""
        return {token: i for i, token in enumerate([*self._tokens, *special])}

    def _merge_all(self, symbols: list[str]) -> str:
        pieces = self._apply(symbols)
        while free := [pair for pair in pairwise(pieces) if pair not in self._apart]:
            self._rank[free[0]] = len(self._rank)
            self._tokens.setdefault("".join(free[0]))
            pieces = self._apply(symbols)
        return pieces[0]

    def _apply(self, symbols: list[str]) -> list[str]:
        """Merge as BPE does: always the pair of lowest rank, everywhere it stands."""
        while pairs := [pair for pair in pairwise(symbols) if pair in self._rank]:
            pair = min(pairs, key=self._rank.__getitem__)
            joined: list[str] = []
            for symbol in symbols:
                if joined and (joined[-1], symbol) == pair:
                    joined[-1] += symbol
                else:
                    joined.append(symbol)
            symbols = joined
        return symbols


def qwen_tokenizer(words: Iterable[str]) -> Qwen2Tokenizer:
    """A tokenizer of Qwen2.5-VL's kind in which each of `words` is one token, alone and after a space.

    The prompt template in front of the user's text is 129 tokens, as in the released vocabulary.
    """
    from transformers import Qwen2Tokenizer

    pairs = BytePairs()
    for left, right in _SPLIT_IN_TWO:
        pairs.add_split(left, right)
    split = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    for piece in re.split(r"<\|im_\w+\|>", TEMPLATE_PREFIX):
        for symbols, (start, stop) in split.pre_tokenize_str(piece) if piece else ():
            assert symbols
            pairs.add(piece[start:stop])
    for word in dict.fromkeys(words):
        pairs.add(word)
        pairs.add(" " + word)
    tokenizer = Qwen2Tokenizer(
        vocab=pairs.vocab(QWEN_SPECIAL),
        merges=pairs.merges,
        additional_special_tokens=list(QWEN_SPECIAL),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="right",
        model_max_length=QWEN_TOKENS,
    )
    prefix = tokenizer(TEMPLATE_PREFIX)["input_ids"]
    assert len(prefix) == PREFIX_TOKENS, f"the template prefix has {len(prefix)} tokens"
    return tokenizer


def clip_tokenizer(words: Iterable[str]) -> CLIPTokenizer:
    """A tokenizer of CLIP's kind (77 positions, lower case) in which each of `words` is one token."""
    from transformers import CLIPTokenizer

    pairs = BytePairs(end="</w>")
    for word in dict.fromkeys(word.lower() for word in words):
        pairs.add(word)
    # The end token must have the highest id: CLIP finds the pooled position by it.
    vocab = pairs.vocab(("<|startoftext|>", "<|endoftext|>"))
    return CLIPTokenizer(vocab=vocab, merges=pairs.merges, model_max_length=CLIP_TOKENS)


def save_processor(tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write `tokenizer` as a `Qwen2_5_VLProcessor` folder.

    The image parts are written as JSON, because their classes need torchvision and Diptych does not.
    """
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}
    config.write_text(json.dumps(values, indent=2))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    pixels: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }
    image = pixels | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
    }
    video = pixels | {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 100_352, "longest_edge": 602_112},
        "do_sample_frames": False,
        "min_frames": 4,
        "max_frames": 768,
    }
    processor = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": image, "video_processor": video}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _symbols(word: str) -> list[str]:
    """The byte-level symbols of a word: a space is `Ġ`, and so on."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
    return list("".join(symbols for symbols, _ in whole))
