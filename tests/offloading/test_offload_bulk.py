"""Layers that stream to a device with a compiled copy loop: what is read and copied together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import needs
import pytest

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.devices.base import BulkFailure
from streamload.errors import DeviceError

torch = needs.module("torch")
hf = needs.module("transformers")

import offloading_models as models  # noqa: E402
from bulk_stand_in import Refills, Staged, staged  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from streamload.offloading.prefetch import Reaper  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402

__all__ = ["staged"]
pytestmark = pytest.mark.usefixtures("staged")


def passes(path: Path, count: int, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    found: list[dict[str, Any]] = []
    with streamload.stream_layers(path, device="cpu", **options) as layers:
        Staged.counts.clear()
        Staged.reads.clear()
        for _ in range(count):
            found.append({})
            for _, tensors in layers:
                found[-1].update({name: each.clone() for name, each in tensors.items()})
        return found, layers.plan


def check(path: Path, found: Sequence[dict[str, Any]]) -> None:
    expected = load_file(path / "model.safetensors")
    for each in found:
        assert each.keys() == expected.keys()
        for name, tensor in each.items():
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose weights are stored as nf4, with small parts beside each."""
    path = tmp_path_factory.mktemp("made")
    models.save(models.built("llama").bfloat16(), path / "bf16")
    streamload.convert(path / "bf16", path / "nf4", quant="nf4", progress=False)
    return path / "nf4"


def test_a_layers_parts_come_by_one_read_and_few_copies(nf4: Path, staged: type[Staged]) -> None:
    """A tensor alone has neither a read nor a copy of its own; the bytes are right each time."""
    found, plan = passes(nf4, 4, budget=200_000)
    check(nf4, found)
    streamed = plan.residency.streams
    assert streamed
    assert all(".layers." in name for name in streamed)
    count = 4 * len(streamed)
    tensors = [name for name in open_checkpoint(nf4).tensors if name.startswith(f"{streamed[0]}.")]
    assert len(tensors) == 27 + 3
    assert len(staged.reads) <= 3 * count  # bitsandbytes' states are at the file's end
    assert staged.counts["copies"] <= 7 * count  # norms begin at multiples of 512


def test_what_stays_between_is_read_over(tmp_path: Path, staged: type[Staged]) -> None:
    for numel, reads in ((1000, 1), (2**18, 2)):
        tensors = {}
        for layer in range(4):
            tensors |= {f"layers.{layer}.a.weight": torch.randn(50, 100)}
            tensors |= {f"layers.{layer}.b.weight": torch.randn(numel)}
            tensors |= {f"layers.{layer}.c.weight": torch.randn(50, 100)}
        save_file(tensors, tmp_path / "model.safetensors")
        budget = 4 * 4 * numel + 100_000
        found, plan = passes(tmp_path, 3, budget=budget, stay="*.b.weight", layers="layers.*")
        check(tmp_path, found)
        assert len(plan.residency.streams) == 4
        assert 3 * 4 * reads <= len(staged.reads) <= 4 * 4 * reads  # some for the next pass
        assert {each.needed for each in staged.reads} == ({44_000} if reads == 1 else {20_000})


def test_units_of_a_layer_are_full(tmp_path: Path, staged: type[Staged]) -> None:
    tensors = {
        f"layers.{layer}.{at}.weight": torch.randn(numel)
        for layer in range(3)
        for at, numel in enumerate((100_000, 300, 700_000, 200_000))
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found, plan = passes(tmp_path, 2, budget=9_000_000, layers="layers.*", chunk_nbytes=2**19)
    check(tmp_path, found)
    assert len(plan.residency.streams) >= 2
    sizes = [each.needed for each in staged.reads]
    assert max(sizes) <= 2**19
    assert sum(size < max(sizes) * 0.8 for size in sizes) <= len(plan.residency.streams) * 4


def test_many_small_tensors_of_a_layer(tmp_path: Path, staged: type[Staged]) -> None:
    """They come by few reads, again and again, into memory that is there."""
    tensors = {
        f"layers.{layer}.{at:02}.weight": torch.randn(40 + layer)
        for layer in range(4)
        for at in range(50)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found, plan = passes(tmp_path, 3, budget=32_000, layers="layers.*")
    check(tmp_path, found)
    assert len(plan.residency.streams) >= 2
    assert len(staged.reads) <= 4 * len(plan.residency.streams)


@pytest.mark.parametrize("page_cache", ["auto", "keep", "drop"])
def test_pages_may_be_locked_where_they_stay(
    page_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were there before are not locked if the page cache is to be left alone."""
    tensors = {f"layers.{layer}.weight": torch.randn(10_000 + layer) for layer in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    run, asked = Refills.run, set[bool]()

    def noted(self: Refills, fd: int, parts: Any, locks: bool, *after: Any) -> BulkFailure | None:
        asked.add(locks)
        return run(self, fd, parts, locks, *after)

    monkeypatch.setattr(Refills, "run", noted)
    found, _ = passes(tmp_path, 2, budget=100_000, layers="layers.*", page_cache=page_cache)
    check(tmp_path, found)
    assert asked == {page_cache != "drop"}


def _moe(path: Path, form: str) -> Any:
    models.built("qwen3-moe").bfloat16().save_pretrained(path)
    return lambda **options: from_pretrained(
        path, device="cpu", progress=False, experts_implementation=form, **options
    )


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
def test_experts_that_are_there_need_no_thread(
    form: str, tmp_path: Path, staged: type[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    load: Callable[..., Any] = _moe(tmp_path, form)
    expected = models.logits(load())
    followed: list[Any] = []
    follow = Reaper.follow
    monkeypatch.setattr(Reaper, "follow", lambda self, *a: (followed.append(a), follow(self, *a)))
    model = load(budget=500_000, offload=True)
    with model.streamload_offload as offloaded:
        found = offloaded.plan.residency
        assert found.experts
        assert not found.streams
        assert torch.equal(models.logits(model), expected)
        few = models.IDS[:1, :1]
        for _ in range(3):
            models.logits(model, few)
        before = offloaded.report.hit_rate
        staged.reads.clear()
        staged.counts.clear()
        followed.clear()
        for _ in range(3):
            models.logits(model, few)
        assert offloaded.report.hit_rate > before
        assert not staged.reads
        assert staged.counts["marks"] == 3 * len(found.experts)
        assert not followed


def test_the_models_thread_reads_experts(tmp_path: Path, staged: type[Staged]) -> None:
    """All that a layer lacks by one call; after a failure the next pass tries again."""
    load: Callable[..., Any] = _moe(tmp_path, "grouped_mm")
    expected = models.logits(load())
    model = load(budget=400_000, offload=True)
    few = models.IDS[:1, :1]
    with model.streamload_offload as offloaded:
        found = offloaded.plan.residency
        assert found.experts
        assert found.cache_slots < found.experts_total // 2
        threads: set[str] = set()
        run = Refills.run

        def noted(self: Refills, *arguments: Any) -> BulkFailure | None:
            threads.add(threading.current_thread().name)
            return run(self, *arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Refills, "run", noted)
            for _ in range(9):  # other experts each time
                few = (few + 7) % 50
                models.logits(model, few)
        assert threading.current_thread().name in threads
        assert torch.equal(models.logits(model), expected)
        for refused in (1, 3):
            staged.counts["refused"] = refused
            with pytest.raises(DeviceError, match="a copy failed"):
                for at in range(60):
                    models.logits(model, models.IDS[:1, :1] + at)
            staged.counts["refused"] = 0
            assert torch.equal(models.logits(model), expected)


def test_slots_are_adjacent_where_the_file_is(nf4: Path) -> None:
    """Parts of weights follow each other in a slot; matrices of floats begin where they did."""
    with streamload.stream_layers(nf4, device="cpu", budget=200_000) as layers:
        for name, tensors in layers:
            if ".layers." not in name or name not in layers.plan.residency.streams:
                continue
            places = sorted((t.data_ptr(), t.nbytes, key) for key, t in tensors.items())
            assert all(a + n <= b for (a, n, _), (b, _, _) in pairwise(places))
            first = places[0][0]
            for at, nbytes, key in places:
                if nbytes >= 512 and "absmax" not in key and tensors[key].is_floating_point():
                    assert (at - first) % 512 == 0, key
                elif nbytes >= 512:
                    assert (at - first) % 64 == 0, key
