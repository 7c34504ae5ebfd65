"""What the text encoders read: the chat text that wraps every prompt for Qwen2.5-VL, and how much of it CLIP takes.

Part of the weights, so not a byte may change.
"""

from __future__ import annotations

PROMPT_TEMPLATE = (
    "<|im_start|>system\n"
    "You are a promt engineer. Describe the video in detail.\n"
    "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.\n"
    "Describe the location of the video, main characters or objects and their action.\n"
    "Describe the dynamism of the video and presented actions.\n"
    "Name the visual style of the video: whether it is a professional footage, user generated content, "
    "some kind of animation, video game or scren content.\n"
    "Describe the visual effects, postprocessing and transitions if they are presented in the video.\n"
    "Pay attention to the order of key actions shown in the scene.<|im_end|>\n"
    "<|im_start|>user\n"
    "{}<|im_end|>"
)
"""With its spelling mistakes: the models were trained on them. `{}` is the user's prompt."""

TEMPLATE_PREFIX = PROMPT_TEMPLATE.split("{}")[0]

PREFIX_TOKENS = 129
"""Tokens of `TEMPLATE_PREFIX` in the Qwen vocabulary; they are cut off the hidden states."""

CLIP_TOKENS = 77
"""Positions of CLIP's text model: it always reads that many tokens, of the prompt as it was typed."""
