"""Passes of an offloaded model that have more tokens than the plan left room for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import offloading_models as models
import pytest
import torch
from torch import nn

import streamload
from streamload.errors import OffloadError
from streamload.offloading.model import tokens_of
from streamload.transformers import from_pretrained

IDS = models.IDS  # two sequences of 9 tokens


def _offloaded(path: Path, budget: str = "9.1MB", **given: Any) -> Any:
    return from_pretrained(
        path, device="cpu", dtype="float32", budget=budget, offload=True, **given
    )


def _generated(model: Any, ids: torch.Tensor = IDS, new: int = 4, **given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asked = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        model.generate(ids, **asked, **given)
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@pytest.mark.parametrize("budget", ["9.1MB", "60MB"])
def test_a_cache_beyond_tokens_is_warned_of_once_and_reported(llama: Path, budget: str) -> None:
    """Whether layers stream or all of the model stays; the prompt itself had room."""
    model = _offloaded(llama, budget, tokens=18)
    offloaded = model.streamload_offload
    assert bool(offloaded.plan.residency.streams) == (budget == "9.1MB")
    with torch.no_grad():
        model(IDS)
    assert not offloaded.report.overrun
    assert "beyond the budget" not in str(offloaded.report)
    (said,) = _generated(model)
    assert "a KV cache of 20 tokens, and the plan has room for 18" in said
    assert "tokens=20 or more" in said
    assert not _generated(model)
    # 9 of the prompt and 3 generated: the last is given and not computed with
    assert offloaded.report.overrun == "a KV cache of 24 tokens, and the plan has room for 18"
    assert "beyond the budget: a KV cache of 24 tokens" in str(offloaded.report)


def test_a_pass_beyond_tokens_raises_before_it_computes(llama: Path) -> None:
    """Under ``on_overrun="error"``; what has room runs before and after."""
    model = _offloaded(llama, tokens=8, on_overrun="error")
    offloaded = model.streamload_offload
    with torch.no_grad():
        expected = model(IDS[:, :4]).logits
        with pytest.raises(OffloadError, match=r"a pass of 18 tokens.*room for 8.*tokens=18"):
            model(IDS)
        assert offloaded.report.passes == 1
        assert torch.equal(model(IDS[:, :4]).logits, expected)
    with pytest.raises(OffloadError, match=r"a KV cache of 10 tokens.*room for 8"):
        model.generate(IDS[:, :4], attention_mask=torch.ones(2, 4), max_new_tokens=4)
    assert not offloaded.report.overrun  # none was run


def test_what_has_room_is_not_warned_of(llama: Path) -> None:
    assert not _generated(_offloaded(llama, tokens=24))
    assert _generated(_offloaded(llama, tokens=23))
    assert not _generated(_offloaded(llama, tokens=18, context=12, batch=2))
    assert _generated(_offloaded(llama, tokens=18, context=11, batch=2))
    assert _generated(_offloaded(llama, tokens=18, context=12))  # of one sequence
    model = _offloaded(llama, tokens=18)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", RuntimeWarning)
        model(IDS, use_cache=False)
        model(inputs_embeds=model.get_input_embeddings()(IDS), use_cache=False)
    assert not _generated(_offloaded(llama))  # nothing says for how many there is room


def test_a_cache_of_a_fixed_size_counts_with_what_it_allocates(llama: Path) -> None:
    model = _offloaded(llama, tokens=30)
    assert not _generated(model, new=2)
    said = _generated(model, new=2, cache_implementation="static", max_length=None)
    assert not said
    with pytest.warns(RuntimeWarning, match="room for 30"):
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(IDS[:, :1], past_key_values=cache, use_cache=True)
            model(IDS[:, :1], past_key_values=cache, use_cache=True)


def test_prompts_of_an_encoder_are_counted(tmp_path: Path) -> None:
    """`generate` gives them to the encoder by itself; the decoder has a few tokens."""
    models.built("t5").save_pretrained(tmp_path)
    model = _offloaded(tmp_path, "60MB", tokens=18)
    assert not _generated(model, new=2)
    (said,) = _generated(model, IDS.repeat(1, 2), new=2)
    assert "a pass of 36 tokens, and the plan has room for 18" in said


@pytest.mark.parametrize("budget", ["9MB", "60MB"])
def test_an_encoder_that_is_called_alone_is_counted(tmp_path: Path, budget: str) -> None:
    models.built("t5").save_pretrained(tmp_path)
    model = _offloaded(tmp_path, budget, tokens=18, on_overrun="error")
    assert bool(model.streamload_offload.plan.residency.streams) == (budget == "9MB")
    encoder = model.get_encoder()
    with torch.no_grad():
        encoder(IDS)
        with pytest.raises(OffloadError, match=r"a pass of 36 tokens.*room for 18"):
            encoder(input_ids=IDS.repeat(1, 2))
    model.streamload_offload.close()


def test_a_module_of_an_own_is_counted_by_its_first_argument(tmp_path: Path) -> None:
    """Integers are tokens; states of three axes are so many as their rows."""

    def is_ids(value: Any) -> bool:
        return not value.is_floating_point()

    ids, states = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 8)
    assert tokens_of({"x": ids}, is_ids) == (10, 10)
    assert tokens_of({"x": states}, is_ids) == (10, 10)
    assert tokens_of({"image": torch.zeros(1, 3, 8, 8)}, is_ids) == (0, 0)
    assert tokens_of({"input_ids": ids, "decoder_input_ids": ids[:, :2]}, is_ids) == (10, 4)
    assert tokens_of({"input_ids": ids, "use_cache": False}, is_ids) == (10, 0)
    past = [(torch.zeros(2, 4, 7, 8),) * 2]
    assert tokens_of({"input_ids": ids[:, :1], "past_key_values": past}, is_ids) == (2, 16)
    assert tokens_of({}, is_ids) == (0, 0)


def test_an_on_overrun_that_is_invalid_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_overrun is one of warn, error, not 'raise'"):
        streamload.offload(nn.Linear(2, 2), tmp_path, on_overrun="raise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_overrun says how a model is offloaded"):
        from_pretrained(llama, device="cpu", on_overrun="error")
