"""`streamload.diffusers`: pipelines that draw what diffusers' own loading draws."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hub_server import COMMIT, Hub, hub

torch = needs.module("torch")
needs.module("transformers")
diffusers = needs.module("diffusers")

__all__ = ["hub"]

import diffusion  # noqa: E402
import safetensors.torch as st  # noqa: E402
from diffusion import PIPELINES, image, models, saved  # noqa: E402

import streamload  # noqa: E402
from streamload.devices.torch.quantized import Coded, make_dense  # noqa: E402
from streamload.errors import (  # noqa: E402
    CheckpointError,
    PlanInfeasibleError,
    ShardNotFoundError,
    StateDictMismatchError,
)


def ours(path: Any, **arguments: Any) -> Any:
    return streamload.diffusers.from_pretrained(path, device="cpu", progress=False, **arguments)


def raw(tensor: Any) -> bytes:
    flat: bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return flat


def bits(pipeline: Any) -> dict[str, tuple[Any, bytes]]:
    return {
        f"{part}.{name}": (tensor.dtype, raw(tensor))
        for part, model in models(pipeline).items()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def test_a_pipeline_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Files of components that it names are downloaded; and those of a model of it alone."""
    folder = saved(tmp_path / "a", "Stable Diffusion")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    others = (
        *("unet/diffusion_pytorch_model.bin", "picture.png", "vae_decoder/model.onnx"),
        *("unet/openvino/openvino_model.bin", "other/diffusion_pytorch_model.safetensors"),
        "other/config.json",
    )
    hub.add("me/pipe", {**files, **dict.fromkeys(others, b"x")})
    with pytest.raises(CheckpointError, match="write fetch='cache'"):
        ours("me/pipe", fetch="stream")
    assert bits(ours("me/pipe")) == bits(ours(folder))
    snapshot = tmp_path / "home" / "hub" / "models--me--pipe" / "snapshots" / COMMIT
    there = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.*")}
    assert there == files.keys()
    hub.add("me/vae", {f"v/{n[4:]}": data for n, data in files.items() if n.startswith("vae/")})
    assert raw(ours("me/vae", subfolder="v").decoder.conv_in.weight) == raw(
        ours(folder / "vae").decoder.conv_in.weight
    )


def test_patterns_of_dtypes(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Stable Diffusion")
    patterns = {"*attn*": "float32", "text_enc*proj.bias": "float32", "*": "float16"}
    found = ours(folder, dtype=patterns)
    for model in models(found).values():
        for name, parameter in model.named_parameters():
            kept = "attn" in name or (model is found.text_encoder and name.endswith("proj.bias"))
            assert parameter.dtype == (torch.float32 if kept else torch.float16), name
    for slip in ("vea.*", "unet.nothing", "*nrom*", "vae.*attn*"):
        with pytest.raises(
            ValueError, match="^" + re.escape(f"dtype: no tensor's name matches {slip!r}")
        ):
            ours(folder, dtype={slip: "float32", "*": "float16"})
    ours(folder, dtype={"vae": torch.float32, "default": torch.float16}, vae=found.vae)
    alone = ours(folder / "vae", dtype={"decoder.*": "float16"})
    assert alone.decoder.conv_in.weight.dtype == torch.float16
    assert alone.encoder.conv_in.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="holds one model, and no pipeline: leave vae away"):
        ours(folder / "unet", vae=None)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_draws_the_same(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name)
    found = streamload.diffusers.from_pretrained(folder, budget="12MB")
    expected = diffusers.DiffusionPipeline.from_pretrained(str(folder))
    assert type(found) is type(expected)
    assert bits(found) == bits(expected)
    for model in models(found).values():  # not loaded again by diffusers
        assert model.streamload_report is found.streamload_report
    for model in models(expected).values():
        for parameter in model.parameters():  # views on the file are not aligned: they round so
            parameter.data = parameter.data.clone()
    assert np.array_equal(image(found), image(expected))
    report = found.streamload_report
    assert len(report.plan.devices) == 1
    assert report.held_nbytes[report.plan.devices[0].device] <= 12_000_000
    assert not any(m.training for model in models(found).values() for m in model.modules())
    for key, value in expected.config.items():
        assert found.config[key] == value


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
def test_dtypes_as_diffusers_has_them(tmp_path: Path, name: str, argument: str) -> None:
    """A dtype for all, or by component: what is kept in float32 is."""
    folder = saved(tmp_path, name)
    expected = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    assert bits(ours(folder, **{argument: torch.float16})) == bits(expected)
    mixed = {"vae": torch.float32, "default": torch.float16}
    expected = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=mixed)
    assert bits(ours(folder, **{argument: mixed})) == bits(expected)
    by_pattern = ours(folder, dtype={"vae.*": "float32", "*": "float16"})
    assert bits(by_pattern) == bits(expected)


def test_one_budget_for_all(tmp_path: Path) -> None:
    """What fits each alone and not together is refused before anything is read."""
    folder = saved(tmp_path, "SDXL")
    report = ours(folder).streamload_report
    with pytest.raises(PlanInfeasibleError) as caught:
        ours(folder, budget=report.resident_nbytes * 0.9)
    assert caught.value.needed_nbytes >= report.resident_nbytes
    assert any(name.startswith(("unet.", "vae.")) for name, _ in caught.value.largest)


def test_variants(tmp_path: Path) -> None:
    """The files of a variant, and the plain ones of a model that has none; as they are stored."""
    folder = saved(tmp_path, "Stable Diffusion")
    half = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    half.save_pretrained(folder, variant="fp16")
    (folder / "vae" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    found = ours(folder, variant="fp16")
    assert {model.dtype for model in (found.unet, found.text_encoder)} == {torch.float16}
    assert found.vae.dtype == torch.float32
    plain = ours(folder)
    assert {model.dtype for model in models(plain).values()} == {torch.float32}
    given = {"variant": "fp16", "torch_dtype": torch.float16}
    expected = diffusers.DiffusionPipeline.from_pretrained(folder, **given)
    assert bits(ours(folder, **given)) == bits(expected)
    with pytest.raises(ShardNotFoundError, match="bf16"):
        ours(folder, variant="bf16")


def test_weights_that_stay_in_their_files(tmp_path: Path) -> None:
    """``residence="mapped"`` reaches all models: nothing is read, and the image is the same."""
    folder = saved(tmp_path, "Stable Diffusion")
    found = ours(folder, residence="auto")
    assert found.streamload_report.plan.resident_nbytes < ours(folder).streamload_report.read_nbytes
    assert np.allclose(image(found), image(ours(folder)), atol=1e-5)


def test_components_that_are_given(tmp_path: Path) -> None:
    """A model of one's own, or none, in the place of a component, which is not read then."""
    folder = saved(tmp_path, "SDXL")
    mine = diffusion.vae()
    found = ours(folder, vae=mine, text_encoder_2=None, tokenizer_2=None)
    assert found.vae is mine
    assert found.text_encoder_2 is None
    names = found.streamload_report.plan.placements.names
    assert {name.partition(".")[0] for name in names} == {"unet", "text_encoder"}
    image_to_image = ours(folder, pipeline_class=diffusers.StableDiffusionXLImg2ImgPipeline)
    assert type(image_to_image) is diffusers.StableDiffusionXLImg2ImgPipeline


def test_one_model_by_its_folder(tmp_path: Path) -> None:
    """A component comes back alone; and it loads into a model that is there."""
    folder = saved(tmp_path, "Stable Diffusion")
    expected = diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    alone = ours(folder, subfolder="unet")
    assert type(alone) is type(expected)
    filled = diffusers.UNet2DConditionModel.from_config(expected.config)
    streamload.load_state_dict(filled, folder / "unet")
    for found in (alone, ours(folder / "unet"), filled):
        state = found.state_dict()
        assert all(torch.equal(state[k], tensor) for k, tensor in expected.state_dict().items())
    with pytest.raises(ShardNotFoundError, match=r"streamload\.diffusers\.from_pretrained"):
        streamload.load_state_dict(filled, folder)


def test_names_of_older_versions(tmp_path: Path) -> None:
    """Attention of an old VAE is renamed as diffusers does it."""
    folder = saved(tmp_path, "Stable Diffusion")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    new = ("to_q", "to_k", "to_v", "to_out.0")
    old = dict(zip(new, ("query", "key", "value", "proj_attn"), strict=True))

    def renamed(name: str) -> str:
        part = next((p for p in new if f".{p}." in name and "mid_block" in name), None)
        return name if part is None else name.replace(part, old[part])

    tensors = st.load_file(path)
    assert any(renamed(name) != name for name in tensors)
    st.save_file({renamed(name): t.clone() for name, t in tensors.items()}, path)
    expected = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert bits(ours(folder)) == bits(expected)
    own = diffusers.AutoencoderKL.from_config(expected.vae.config)
    with pytest.raises(StateDictMismatchError) as caught:
        streamload.load_state_dict(own, folder / "vae")
    alone = eval(caught.value.instead, {"streamload": streamload}).state_dict()
    assert all(torch.equal(alone[k], t) for k, t in expected.vae.state_dict().items())


def test_what_cannot_be_streamed(tmp_path: Path) -> None:
    """Names that do not match, no pipeline, and models of others are clear errors."""
    folder = saved(tmp_path / "in", "Stable Diffusion")
    with pytest.raises(CheckpointError, match="is no pipeline of diffusers"):
        ours(tmp_path)
    with pytest.raises(ValueError, match='device="cuda:0"'):
        streamload.diffusers.from_pretrained(folder, device=["cpu", "cuda:0"])
    with pytest.raises(TypeError, match="budgte"):
        ours(folder, budgte="3GB")
    broken = shutil.copytree(folder, tmp_path / "broken")
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = st.load_file(path)
    lost = tensors.pop("conv_in.bias")
    st.save_file(tensors | {"extra": lost}, path)
    with pytest.raises(StateDictMismatchError) as caught:
        ours(broken)
    assert (caught.value.missing, caught.value.unexpected) == (("conv_in.bias",), ("extra",))
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = ["elsewhere", "Model"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"neither of diffusers.*unet= with.*elsewhere\.Mo"):
        ours(folder)


_QUANTS: list[Any] = [
    "nf4",
    "int8",
    {"transformer": "q8_0", "unet": "q8_0", "text_encoder*": "int8"},
]


@pytest.mark.parametrize("name", PIPELINES)
def test_quantized_pipelines_draw_as_their_dequantized_weights(tmp_path: Path, name: str) -> None:
    """Under one budget; by format, or by component, whose others stay as they are."""
    folder = saved(tmp_path, name)
    whole = ours(folder).streamload_report.resident_nbytes
    for quant in _QUANTS:
        if isinstance(quant, dict):
            parts = [path.name for path in folder.iterdir()]
            quant = {part: f for part, f in quant.items() if "*" in part or part in parts}
        found = ours(folder, quant=quant)
        report = found.streamload_report
        assert report.errors and report.resident_nbytes < whole
        quantized = {each.partition(".")[0] for each in report.errors}
        assert {"text_encoder"} < quantized
        assert ("vae" in quantized) == (isinstance(quant, str) and name not in ("Wan",))
        drawn = image(found, height=16, width=16)
        (device,) = report.plan.devices
        budget = device.needed_nbytes + device.reserve_nbytes
        ours(folder, quant=quant, budget=budget)
        with pytest.raises(PlanInfeasibleError, match=r"needs .* but the budget"):
            ours(folder, quant=quant, budget=budget // 2)
        for model in models(found).values():
            make_dense(model)
        assert np.abs(image(found, height=16, width=16) - drawn).max() < 1e-4


def test_weights_that_stay_as_they_are(tmp_path: Path) -> None:
    """Convolutions, norms, what diffusers keeps in float32, shapes that a format cannot hold."""
    folder = saved(tmp_path, "Wan")
    found = ours(folder, quant={"transformer": "nf4"}, dtype="float16")
    held = {name for name, m in found.transformer.named_modules() if isinstance(m, Coded)}
    assert held == {
        name
        for name, module in found.transformer.named_modules()
        if name.startswith("blocks.") and isinstance(module, torch.nn.Linear)
    }
    block = found.transformer.blocks[0]
    assert block.attn1.to_q.weight.dtype == torch.float16  # dequantised so
    assert block.norm2.weight.dtype == torch.float32
    found = ours(folder, quant={"transformer.*to_q.weight": "int8", "default": None})
    assert isinstance(found.transformer.blocks[0].attn1.to_q, Coded)
    assert not isinstance(found.transformer.blocks[0].attn1.to_k, Coded)
    notes = ours(folder, quant={"transformer": "q8_0"}).streamload_report.notes
    assert any("no format asked holds their shapes: transformer.blocks.*" in note for note in notes)
    with pytest.raises(ValueError, match=r"^quant: no tensor's name matches 'unet'"):
        ours(folder, quant={"unet": "nf4"})
    with pytest.raises(ValueError, match="leave quant= out"):
        ours(folder, quant="stored")
    automatic = ours(folder, quant="auto", budget=200_000).streamload_report
    assert any(note.startswith('quant="auto" took') for note in automatic.notes)
    alone = ours(folder / "transformer", quant={"blocks.0.*": "int8"})
    assert isinstance(alone.blocks[0].attn1.to_q, Coded)
    assert type(alone.blocks[1].attn1.to_q) is torch.nn.Linear


def test_options_of_other_loads_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Stable Diffusion")
    for name, value in (("strict", False), ("tokens", 5), ("layers", "*")):
        with pytest.raises(ValueError, match=f"^{name} is no option here: leave it out$"):
            ours(folder, **{name: value})
    for name, instead in (
        ("load_in_4bit", 'write quant="nf4"'),
        ("offload_folder", "write offload=True"),
        ("quantization_config", 'write quant="nf4"'),
    ):
        with pytest.raises(ValueError, match=f"^{name} has no counterpart here: .*{instead}"):
            ours(folder, **{name: "x"})
    ours(folder, quant=None, load_in_8bit=False)
