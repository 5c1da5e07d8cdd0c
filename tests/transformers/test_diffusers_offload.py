"""`streamload.diffusers.from_pretrained(offload=True)`: models take turns in one budget."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
needs.module("transformers")
diffusers = needs.module("diffusers")
needs.module("accelerate")

import diffusion  # noqa: E402
from diffusion import image, models, saved  # noqa: E402

import streamload  # noqa: E402
from streamload.devices.torch.tensors import STREAMED  # noqa: E402
from streamload.errors import OffloadError, PlanInfeasibleError, StreamloadError  # noqa: E402
from streamload.offloading import prefetch  # noqa: E402

#: About the least budget of each pipeline.
LEAST = {
    "Stable Diffusion": 320_000,
    "SDXL": 1_060_000,
    "SD3": 320_000,
    "Flux": 41_000,
    "Wan": 30_000,
}


def offloaded(path: Any, budget: int, **arguments: Any) -> Any:
    given = {"device": "cpu", "progress": False, "offload": True, "budget": budget}
    return streamload.diffusers.from_pretrained(path, **(given | arguments))


def resident(path: Any, **arguments: Any) -> Any:
    return streamload.diffusers.from_pretrained(path, device="cpu", progress=False, **arguments)


def small(pipeline: Any, **more: Any) -> Any:
    if isinstance(pipeline, (diffusers.FluxPipeline, diffusers.WanPipeline)):
        return image(pipeline, **more)
    return image(pipeline, height=16, width=16, **more)


def present(pipeline: Any) -> dict[str, int]:
    found = {}
    for name, model in models(pipeline).items():
        weights = [p for p in model.parameters() if not hasattr(p, STREAMED)]
        found[name] = sum(weight.nbytes for weight in weights)
    return found


@pytest.mark.parametrize("name", diffusion.PIPELINES)
def test_images_are_those_of_the_resident_pipeline(tmp_path: Path, name: str) -> None:
    """Bit for bit, at five budgets; at each step the weights in memory are below the budget."""
    folder, least = saved(tmp_path, name), LEAST[name]
    whole = resident(folder)
    expected, nbytes = small(whole), whole.streamload_report.resident_nbytes
    looked = []

    def look(pipeline: Any, step: int, at: Any, given: Any) -> Any:
        looked.append(present(pipeline))
        return given

    for budget in (least, least * 5 // 4, least * 8 // 5, (least + nbytes) // 2, 2 * nbytes):
        pipeline = offloaded(folder, budget)
        found = small(pipeline, callback_on_step_end=look)
        assert np.array_equal(found, expected), budget
        plans = pipeline.streamload_offload.plans
        assert max(plan.needed_nbytes for plan in plans.values()) <= budget
        assert sum(looked[-1].values()) <= budget
        if budget == least:
            assert any(plan.residency.streams for plan in plans.values())
            assert not looked[-1]["vae"]
        if budget > nbytes:
            assert all(looked[-1][part] for part in looked[-1] if part != "vae")
    assert np.array_equal(small(pipeline), expected)  # again
    with pytest.raises(
        PlanInfeasibleError, match=r"needs .* but the budget.*largest: \w+\."
    ) as low:
        offloaded(folder, least // 2)
    assert low.value.needed_nbytes > low.value.budget_nbytes
    with pytest.raises(PlanInfeasibleError, match=r"would fit: .*offload=True \("):
        resident(folder, budget=nbytes // 2)


@pytest.mark.parametrize("idle_s", [2.0, 0.0])
def test_streaming_goes_on_in_the_next_turn(
    tmp_path: Path, idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a model is on the device meanwhile; its threads end after ``idle_s`` seconds."""
    monkeypatch.setattr(prefetch, "_IDLE_S", idle_s)
    folder, more = tmp_path / "half", {"torch_dtype": torch.float32}
    diffusers.DiffusionPipeline.from_pretrained(
        saved(tmp_path / "a", "Flux"), torch_dtype=torch.bfloat16
    ).save_pretrained(folder)
    expected = small(resident(folder, **more))
    pipeline = offloaded(folder, LEAST["Flux"] * 2, **more)
    turns = pipeline.streamload_offload._turns
    before = {*threading.enumerate()}  # those of other tests' models end when idle
    rounds: list[Any] = []
    for _ in range(3):
        assert np.array_equal(small(pipeline), expected)
        turn = turns["transformer"]
        assert turn.plan.residency.streams and turn.plan.residency.arena_nbytes
        rounds.append(turn._rounds)
        assert not turn.is_here
        assert not turn._rounds.is_open and not len(turn._rounds.memory._memory)
    assert rounds[0] is rounds[2]
    pipeline.streamload_offload.close()
    after = {*threading.enumerate()} - before
    assert not [each for each in after if each.name.startswith("streamload")]
    with pytest.raises(StreamloadError, match="closed"):
        small(pipeline)


def test_an_error_while_a_model_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler of SIGALRM raises it: the next images are right."""
    folder = saved(tmp_path, "Flux")
    expected = small(resident(folder))
    pipeline = offloaded(folder, LEAST["Flux"])
    pause, raised = prefetch.Rounds.pause, 0

    def paused(self: prefetch.Rounds) -> None:
        nonlocal raised
        pause(self)
        raised += 1
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(prefetch.Rounds, "pause", paused)
        with pytest.raises(TimeoutError):
            small(pipeline)
    assert raised == 1
    for _ in range(2):
        assert np.array_equal(small(pipeline), expected)


def test_one_model_alone(tmp_path: Path) -> None:
    """It streams within its budget; closed, it holds nothing until it is loaded again."""
    folder = saved(tmp_path, "Stable Diffusion")
    vae = offloaded(folder / "vae", 400_000)
    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        expected = resident(folder / "vae").decode(latents).sample
    assert torch.equal(vae.decode(latents).sample, expected)
    offload = vae.streamload_offload
    assert offload.plans["model"].residency.streams
    assert "stream" in str(offload)
    assert offload.reports["model"].passes == 1
    offload.close()
    offload.close()
    with pytest.raises(Exception, match="offload was closed"):
        vae.decode(latents)
    streamload.load_state_dict(vae, folder / "vae")
    assert torch.equal(vae.decode(latents).sample, expected)


def test_parts_of_models_called_by_hand(tmp_path: Path) -> None:
    """A part that is called, or a weight that is read, begins its model's turn."""
    folder = saved(tmp_path, "Stable Diffusion")
    pipeline, whole = offloaded(folder, 400_000), resident(folder)
    small(pipeline)
    for each in (pipeline, whole):
        assert each.unet.dtype == each.text_encoder.dtype == torch.float32
        assert each.device == torch.device("cpu")
    state = torch.randn(1, 3, 32)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        for call in (
            lambda p: p.text_encoder(ids)[0],
            lambda p: p.text_encoder.final_layer_norm(state),
            lambda p: p.vae.encode(torch.ones(1, 3, 16, 16)).latent_dist.mean,
            lambda p: p.vae.decoder.up_blocks[1](torch.ones(1, 64, 8, 8)),
            lambda p: p.unet.conv_in.weight * 2,
            lambda p: p.vae.quant_conv(torch.ones(1, 8, 2, 2)),
            lambda p: p.text_encoder.encoder.layers[0].mlp.fc1.weight.clone(),
        ):
            assert torch.equal(call(pipeline), call(whole))
            assert sum(present(pipeline).values()) <= 400_000
    assert np.array_equal(small(pipeline), small(whole))


def test_what_a_pipeline_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Stable Diffusion")
    pipeline = offloaded(folder, 400_000)
    expected = small(pipeline)
    pipeline.to("cpu")
    pipeline.to(torch.float32)
    pipeline.unet.to("cpu", torch.float32)
    for name in (
        *("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"),
        *("fuse_lora", "save_pretrained"),
    ):
        with pytest.raises(OffloadError, match=f"^{name} "):
            getattr(pipeline, name)("x")
    for refused in (
        lambda: pipeline.to("meta"),
        lambda: pipeline.unet.to("meta"),
        lambda: pipeline.unet.state_dict(),
        lambda: pipeline.unet.fuse_lora(),
        lambda: pipeline.vae.enable_group_offload(torch.device("cpu")),
        lambda: pipeline.vae.to(torch.float16),  # its layers stream
        lambda: pipeline.unet.conv_in.weight.data.mul_(2),
        lambda: pipeline.unet.conv_in.weight.mul_(2),
    ):
        small(pipeline)  # the VAE has its turn then
        with pytest.raises(OffloadError, match=r"cannot be (moved|asked|changed|offloaded)"):
            refused()
    assert np.array_equal(small(pipeline), expected)
    with torch.no_grad():
        pipeline.text_encoder(torch.arange(5)[None])
        pipeline.text_encoder.final_layer_norm.weight.mul_(2)
    with pytest.raises(OffloadError, match="changed a weight"):
        pipeline.vae.decode(torch.zeros(1, 4, 4, 4))
    assert np.array_equal(small(pipeline), expected)  # that of the files
    with pytest.raises(ValueError, match="streamload convert IN OUT --quant FORMAT"):
        offloaded(folder, 400_000, quant="nf4")
    with pytest.raises(ValueError, match="write offload=True"):
        resident(folder, stay="*")
    with pytest.raises(ValueError, match=r"^stay: no tensor's name matches 'nothing'"):
        offloaded(folder, 400_000, stay="nothing")


def test_weights_that_are_asked_to_stay(tmp_path: Path) -> None:
    """By patterns with the model's name or without it."""
    folder = saved(tmp_path, "Flux")
    for pattern in ("transformer.x_embedder.*", "x_embedder.*", "trans*x_embedder.*"):
        pipeline = offloaded(folder, 60_000, stay=[pattern])
        plan = pipeline.streamload_offload.plans["transformer"]
        assert {"x_embedder", "x_embedder (stays)"} & {*plan.residency.stays}
    small(pipeline)


def test_casts_last(tmp_path: Path) -> None:
    """A model that is cast is so in later turns; SDXL casts a VAE of float16 for each image."""
    folder = tmp_path / "half"
    before = diffusers.DiffusionPipeline.from_pretrained(
        saved(tmp_path / "a", "SDXL"), torch_dtype=torch.float16
    )
    before.vae.register_to_config(force_upcast=True)
    before.save_pretrained(folder)
    expected = small(resident(folder))
    pipeline = offloaded(folder, 4_100_000)
    for _ in range(2):
        assert np.array_equal(small(pipeline), expected)
    assert pipeline.vae.dtype == torch.float16
    pipeline.vae.to(torch.float32)
    values = pipeline.vae.quant_conv.weight.detach().clone()
    pipeline.unet(torch.ones(1, 4, 8, 8).half(), 1, torch.ones(1, 7, 64).half(), **_added())
    assert not present(pipeline)["vae"]
    assert pipeline.vae.dtype == pipeline.vae.quant_conv.weight.dtype == torch.float32
    assert torch.equal(pipeline.vae.quant_conv.weight, values)
    tight = offloaded(folder, 2_200_000)
    with pytest.raises(OffloadError, match=r"^vae needs 2\.\d+ MB, and the budget has 2\.2"):
        tight.vae.to(torch.float32)
    assert tight.vae.dtype == torch.float16


def _added() -> dict[str, Any]:
    added = {"text_embeds": torch.ones(1, 32).half(), "time_ids": torch.ones(1, 6).half()}
    return {"added_cond_kwargs": added}


class _StopError(Exception):
    pass


def test_failures_in_a_step(tmp_path: Path) -> None:
    """Ctrl-C at any time, or a callback that raises: the next image is right."""
    folder = saved(tmp_path, "Stable Diffusion")
    expected = small(resident(folder))
    pipeline = offloaded(folder, 350_000)

    def raising(*arguments: Any) -> Any:
        raise _StopError

    with pytest.raises(_StopError):
        small(pipeline, callback_on_step_end=raising)
    assert np.array_equal(small(pipeline), expected)
    for seconds in (0.002, 0.01, 0.03, 0.06, 0.1):
        timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                small(pipeline)
        timer.join()
        assert sum(present(pipeline).values()) <= 350_000
        assert np.array_equal(small(pipeline), expected), seconds


def test_two_pipelines_at_once(tmp_path: Path) -> None:
    """Each in a thread, with a budget of its own; two threads in one pipeline are told apart."""
    folder = saved(tmp_path, "Stable Diffusion")
    expected = small(resident(folder))
    pipelines = [offloaded(folder, budget) for budget in (350_000, 500_000)]

    def draw(pipeline: Any) -> bool:
        return all(np.array_equal(small(pipeline), expected) for _ in range(2))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(draw, pipelines))
    pipeline, errors = pipelines[0], []

    def inside(*arguments: Any) -> None:
        with pytest.raises(OffloadError, match=r"vae needs .* while unet computes") as caught:
            pipeline.vae.decode(torch.zeros(1, 4, 4, 4))
        errors.append(caught.value)
        with pytest.raises(OffloadError, match="while unet computes"):
            pipeline.streamload_offload.close()

    handle = pipeline.unet.mid_block.register_forward_hook(inside)
    assert np.array_equal(small(pipeline), expected)
    assert len(errors) == 2
    handle.remove()


def test_a_pipeline_made_of_its_components(tmp_path: Path) -> None:
    """It shares the turns; without users both are freed at once."""
    folder = saved(tmp_path, "Stable Diffusion")
    pipeline = offloaded(folder, 900_000)
    expected = small(pipeline)
    other = diffusers.StableDiffusionPipeline(**pipeline.components, requires_safety_checker=False)
    assert np.array_equal(small(other), expected)
    assert np.array_equal(small(pipeline), expected)
    pipeline.vae.decode(torch.zeros(1, 4, 4, 4))
    gone = [weakref.ref(model) for model in models(pipeline).values()]
    weight = weakref.ref(pipeline.vae.decoder.conv_in._parameters["weight"])
    del pipeline, other
    gc.collect()  # diffusers' own cycles
    assert not any(each() for each in (*gone, weight))


def test_a_lora(tmp_path: Path) -> None:
    """It computes beside weights that stream, and can be taken off again."""
    peft = needs.runtime("peft")
    folder = saved(tmp_path / "flux", "Flux")
    made, whole = resident(folder), resident(folder)
    without = small(whole)
    torch.manual_seed(1)
    targets = ["to_q", "proj_out", "x_embedder"]  # in layers, and layers themselves
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    made.transformer.add_adapter(config)
    layers = peft.get_peft_model_state_dict(made.transformer)
    made.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    file = "pytorch_lora_weights.safetensors"
    whole.load_lora_weights(tmp_path, weight_name=file)
    expected = small(whole)
    assert not np.array_equal(expected, without)
    for budget in (60_000, 340_000):
        pipeline = offloaded(folder, budget)
        pipeline.load_lora_weights(tmp_path, weight_name=file)
        assert np.array_equal(small(pipeline), expected)
        assert np.array_equal(small(pipeline), expected)
        pipeline.unload_lora_weights()
        assert np.array_equal(small(pipeline), without)


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_components_that_are_stored_quantized(tmp_path: Path, format: str) -> None:
    """What ``convert`` made of a model loads and streams as it is stored."""
    folder = saved(tmp_path / "a", "Flux")
    other = tmp_path / "b"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("transformer"))
    streamload.convert(folder / "transformer", other / "transformer", quant=format)
    whole = resident(other)
    expected = small(whole)
    assert np.array_equal(small(resident(folder, quant={"transformer": format})), expected)
    for budget in (46_000, 100_000, 700_000):
        pipeline = offloaded(other, budget)
        assert np.array_equal(small(pipeline), expected)
    passes = [
        offloaded(path, 46_000).streamload_offload.plans["transformer"].residency.pass_nbytes
        for path in (other, folder)
    ]
    assert passes[0] < 0.6 * passes[1]
