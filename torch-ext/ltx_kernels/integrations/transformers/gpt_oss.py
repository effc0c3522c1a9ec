"""GPT-OSS: Llama's layer with sinks in the attention and a mixture of experts, which stays the model's.

The norms' weights are in float32, and the rotary tables hold each angle once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._decoder import CausalAttention
from .._norms import transformers_class as _class
from .llama import Options, pre_norm_layer


def _window_and_sinks(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": attention.sliding_window, "s_aux": attention.sinks}


ATTENTION = CausalAttention((_class("gpt_oss", "GptOssAttention"),), half_tables=True, options=_window_and_sinks)

ENTRIES = (ATTENTION, pre_norm_layer((_class("gpt_oss", "GptOssDecoderLayer"),), ATTENTION, None, casts=True))
