"""Models that stream on a GPU: the values of the model loaded, under the budget of the allocator.

Skipped on machines without a CUDA device.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
hf = needs.module("transformers")

import offloading_models as models  # noqa: E402

import streamload  # noqa: E402
from streamload.core.memory import LOCKED  # noqa: E402
from streamload.errors import CheckpointError, OffloadError, PlanInfeasibleError  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402

CUDA: dict[str, Any] = {"device": "cuda:0", "dtype": "checkpoint", "progress": False}
ROUNDED = 2**21  # a segment of the allocator
LARGE = 20 * 2**20  # one of those for tensors above 1 MiB


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def least(path: Path, **options: Any) -> int:
    """Bytes of the smallest budget, with what stays free for buffers."""
    tried = 3 * 2**20  # more than stays free for buffers
    with pytest.raises(PlanInfeasibleError) as caught:
        from_pretrained(path, **CUDA, budget=tried, offload=True, **options)
    return caught.value.needed_nbytes + tried - caught.value.budget_nbytes


@pytest.mark.parametrize("name", list(models.MODELS))
def test_logits_and_generated_tokens_are_those_of_the_model_loaded(
    name: str, tmp_path: Path
) -> None:
    """Bit for bit, for 10 budgets from the least to all; a second pass, and with a cache, too."""
    models.built(name, times=8).save_pretrained(tmp_path)
    ids = models.IDS.cuda()
    resident = from_pretrained(tmp_path, **CUDA)
    expected = models.logits(resident, ids)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    asked["attention_mask"] = torch.ones_like(ids)
    first = least(tmp_path)
    everything = first + sum(p.nbytes for p in resident.parameters()) + ROUNDED + LARGE
    streamed = []
    for budget in [first + (everything - first) * n // 9 for n in range(10)]:
        model = from_pretrained(tmp_path, **CUDA, budget=budget, offload=True)
        with model.streamload_offload as offloaded:
            assert offloaded.plan.needed_nbytes <= budget
            for _ in range(2):
                assert torch.equal(models.logits(model, ids), expected), budget
            streamed.append(offloaded.report.pass_nbytes)
            if budget == first and model.can_generate():
                wanted = resident.generate(ids, **asked)
                assert torch.equal(model.generate(ids, **asked), wanted)
        del model, offloaded
    assert streamed[0] > 0 or name == "qwen3-moe"  # experts, and nothing else
    assert streamed[-1] == 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    config = hf.LlamaConfig(**sizes, **heads, max_position_embeddings=4096)
    path = tmp_path_factory.mktemp("wide")
    with torch.device("cuda"):
        hf.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("tokens", [16, 512, 2048])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_allocators_peak_is_under_the_budget(wide: Path, tokens: int, share: float) -> None:
    torch.zeros(64, 64, device="cuda") @ torch.zeros(64, 64, device="cuda")  # cuBLAS's workspace
    ids = torch.randint(0, 32000, (1, tokens), device="cuda")
    expected = models.logits(from_pretrained(wide, **CUDA), ids)
    first = least(wide, tokens=tokens)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = int(first + share * 600e6)
    model = from_pretrained(wide, **CUDA, budget=budget, offload=True, tokens=tokens)
    with model.streamload_offload as offloaded:
        plan = offloaded.plan
        weights = torch.cuda.memory_allocated() - before
        predicted = plan.needed_nbytes - plan.activation_nbytes - plan.cache_nbytes
        assert 0.98 * weights <= predicted
        for _ in range(3):
            assert torch.equal(models.logits(model, ids), expected)
        assert torch.cuda.max_memory_allocated() - before <= budget
        assert offloaded.report.pass_nbytes > 0
    before_closed = torch.cuda.memory_allocated()
    del model, offloaded
    gc.collect()
    assert torch.cuda.memory_allocated() < before_closed


def test_two_models_at_once_and_one_again_after_it_was_closed(wide: Path) -> None:
    ids = torch.randint(0, 32000, (1, 16), device="cuda")
    expected = models.logits(from_pretrained(wide, **CUDA), ids)
    gc.collect()
    torch.cuda.empty_cache()
    budget = least(wide)
    one, two = (from_pretrained(wide, **CUDA, budget=budget, offload=True) for _ in range(2))
    for _ in range(3):
        assert torch.equal(models.logits(one, ids), expected)
        assert torch.equal(models.logits(two, ids), expected)
    one.streamload_offload.close()
    assert torch.equal(models.logits(two, ids), expected)
    again = from_pretrained(wide, **CUDA, budget=budget, offload=True)
    assert torch.equal(models.logits(again, ids), expected)
    again.streamload_offload.close()
    two.streamload_offload.close()


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_experts_that_the_router_chose(kind: str, form: str, tmp_path: Path) -> None:
    sizes = {
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8},
        **{"moe_intermediate_size": 512, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    torch.manual_seed(5)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**sizes)).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    nbytes = sum(p.nbytes for p in model.parameters())
    ids = models.IDS.cuda()
    options: dict[str, Any] = {**CUDA, "experts_implementation": form}
    resident = from_pretrained(tmp_path, **options)
    assert resident.config._experts_implementation == form
    expected = models.logits(resident, ids)
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    asked["attention_mask"] = torch.ones_like(ids)
    wanted = resident.generate(ids, **asked)
    first = least(tmp_path, experts_implementation=form)
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = int(first + share * nbytes)
        model = from_pretrained(tmp_path, **options, budget=budget, offload=True)
        with model.streamload_offload as offloaded:
            for _ in range(2):
                assert torch.equal(models.logits(model, ids), expected), share
            if share == 0:
                assert offloaded.plan.residency.experts
            if share in (0.0, 0.5) and form == "eager":
                assert torch.equal(model.generate(ids, **asked), wanted), share
        del model, offloaded


def test_host_memory_keeps_layers(wide: Path) -> None:
    ids = torch.randint(0, 32000, (1, 16), device="cuda")
    expected = models.logits(from_pretrained(wide, **CUDA), ids)
    with torch.device("meta"):
        module = hf.LlamaForCausalLM(hf.AutoConfig.from_pretrained(wide)).bfloat16().eval()
    module.model.rotary_emb = type(module.model.rotary_emb)(module.config, device="cuda")
    with streamload.offload(
        module, wide, device="cuda:0", budget=least(wide), host="1GB", progress=False
    ) as offloaded:
        assert offloaded.plan.host
        for _ in range(2):
            assert torch.equal(models.logits(module, ids), expected)


def test_a_loop_over_layers_computes_under_the_budget(wide: Path) -> None:
    given = {name: value for name, value in CUDA.items() if name != "progress"}
    expected = streamload.load_state_dict(None, wide, **given).state_dict
    budget = sum(tensor.nbytes for tensor in expected.values()) * 2 // 3
    before = torch.cuda.memory_allocated()
    with streamload.stream_layers(wide, budget=budget, **given) as layers:
        assert layers.plan.residency.streams
        for _ in range(3):
            same = torch.ones((), dtype=torch.bool, device="cuda:0")
            found = set()
            for _, tensors in layers:  # nothing here waits for the device
                for name, tensor in tensors.items():
                    found.add(name)
                    same = same & (tensor == expected[name]).all()
            assert same.item()
            assert found == expected.keys()
        assert layers.report.passes == 3
        assert torch.cuda.memory_allocated() - before <= budget + ROUNDED
        del tensors, tensor, same
    gc.collect()
    assert torch.cuda.memory_allocated() - before < ROUNDED


def test_a_cuda_graph_of_a_pass_is_refused(wide: Path) -> None:
    """It would compute with whatever is in the slots; the model runs afterwards."""
    ids = models.IDS.cuda()
    model = from_pretrained(wide, **CUDA, budget=least(wide), offload=True)
    with model.streamload_offload as offloaded:
        assert offloaded.plan.residency.streams
        expected = models.logits(model, ids)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(OffloadError, match="CUDA graph"), torch.cuda.graph(graph):
            models.logits(model, ids)
        assert torch.equal(models.logits(model, ids), expected)


def test_other_threads_capture_cuda_graphs_while_layers_stream(wide: Path) -> None:
    """Copies, waits and new staging make no capture fail."""
    ids = models.IDS.cuda()
    model = from_pretrained(wide, **CUDA, budget=least(wide), offload=True)
    x = torch.ones(64, 64, device="cuda")
    with model.streamload_offload:
        for _ in range(20):
            models.logits(model, ids)  # the first layers of the next pass are copied meanwhile
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(200):
                    y = x @ x
        graph.replay()
        assert torch.equal(y, x @ x)


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_pages_that_stream_again_are_locked(wide: Path, tmp_path: Path, change: str) -> None:
    """With equal logits; a file that changes is reported, and nothing of it is used."""
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    ids = torch.randint(0, 32000, (1, 16), device="cuda")
    expected = models.logits(from_pretrained(wide, **CUDA), ids)
    model = from_pretrained(tmp_path, **CUDA, budget=least(tmp_path), offload=True)
    with model.streamload_offload as offloaded:
        streams = offloaded.report.pass_nbytes
        for _ in range(40):
            assert torch.equal(models.logits(model, ids), expected)
            if LOCKED.nbytes >= streams:
                break
            time.sleep(0.05)
        assert LOCKED.nbytes >= streams
        os.truncate(file, file.stat().st_size + (4096 if change == "longer" else -200_000_000))
        with pytest.raises(CheckpointError):
            for _ in range(20):
                assert torch.equal(models.logits(model, ids), expected)
                time.sleep(0.05)
    assert not LOCKED.nbytes
