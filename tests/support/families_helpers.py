"""Helpers that `test_families` shares with other tests."""

from __future__ import annotations

from typing import Any

import needs

torch = needs.module("torch")
transformers = needs.module("transformers")

AUDIO: dict[str, Any] = {
    **{"vocab_size": 96, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2},
    **{"decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 16},
    **{"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
}
