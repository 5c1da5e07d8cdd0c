"""Single files of diffusion models: what comes of them is what diffusers' own loading gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hub_server import Hub, hub

torch = needs.module("torch")
transformers = needs.module("transformers")
diffusers = needs.module("diffusers")
gguf = needs.module("gguf")

__all__ = ["hub"]

import diffusion  # noqa: E402
import safetensors.torch as st  # noqa: E402
import single_files as files  # noqa: E402
from bench_parts.boxed_section import boxed  # noqa: E402
from boxes import Boxes  # noqa: E402
from diffusers.loaders import single_file_model  # noqa: E402
from diffusers.quantizers.gguf import utils as theirs_of_gguf  # noqa: E402
from gguf_files import random_blocks, write  # noqa: E402
from remote_server import serve  # noqa: E402

import streamload  # noqa: E402
from streamload.bench.processes import call  # noqa: E402
from streamload.devices.torch.quantized import Coded, make_dense  # noqa: E402
from streamload.errors import CheckpointError, StateDictMismatchError  # noqa: E402

PROJECTED = transformers.CLIPTextModelWithProjection


def ours(path: Any, **arguments: Any) -> Any:
    return streamload.diffusers.from_pretrained(path, device="cpu", progress=False, **arguments)


def random(model: Any) -> Any:
    """A model with random norms and biases too, which would be ones and zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def stable_diffusion() -> tuple[Any, files.State]:
    pipe = diffusion.stable_diffusion()
    text = files.text(random(pipe.text_encoder), "cond_stage_model.transformer.")
    return pipe, files.unet(random(pipe.unet)) | files.vae(random(pipe.vae)) | text


def sdxl() -> tuple[Any, files.State]:
    pipe = diffusion.sdxl()
    pipe.register_modules(text_encoder_2=random(diffusion.clip(PROJECTED, 64)))
    one, two = (f"conditioner.embedders.{number}." for number in range(2))
    text = files.text(random(pipe.text_encoder), f"{one}transformer.")
    text |= files.open_clip(pipe.text_encoder_2, f"{two}model.")
    return pipe, files.unet(random(pipe.unet)) | files.vae(random(pipe.vae)) | text


def sd3() -> tuple[Any, files.State]:
    pipe = diffusion.sd3()
    pipe.register_modules(text_encoder_2=random(diffusion.clip(PROJECTED, 64)))
    state = files.sd3(random(pipe.transformer)) | files.vae(random(pipe.vae))
    names = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}
    for name, part in names.items():
        encoder = getattr(pipe, name)
        state |= files.text(random(encoder), f"text_encoders.{part}.transformer.")
    return pipe, state


def saved(folder: Path, made: tuple[Any, files.State]) -> tuple[Path, Path]:
    """Write a single file, and a pipeline's folder without weights; return both paths."""
    pipe, state = made
    pipe.save_pretrained(folder / "pipe")
    for path in (folder / "pipe").rglob("*.safetensors"):
        path.unlink()
    file = folder / "model.safetensors"
    st.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, file)
    return file, folder / "pipe"


def states(pipe: Any) -> dict[str, Any]:
    models = diffusion.models(pipe).items()
    return {f"{n}.{key}": t for n, model in models for key, t in model.state_dict().items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes a tiny transformer of Flux; diffusers converts its files."""

    def make(width: int, **config: Any) -> Any:
        entry = files.flux_of_width(width)
        known = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
        monkeypatch.setitem(known, "FluxTransformer2DModel", entry)
        sizes = {"patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1}
        sizes |= {"joint_attention_dim": width, "pooled_projection_dim": width}
        sizes |= {"attention_head_dim": width // 2, "num_attention_heads": 2}
        model = diffusers.FluxTransformer2DModel(**sizes | config, guidance_embeds=True)
        return random(model).eval()

    return make


# --- files of pipelines ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [stable_diffusion, sdxl, sd3])
def test_a_file_is_the_pipeline_that_diffusers_makes_of_it(
    tmp_path: Path, make: Callable[[], tuple[Any, files.State]]
) -> None:
    file, config = saved(tmp_path, make())
    found = ours(file, config=config, budget="20MB")
    expected = type(found).from_single_file(str(file), config=str(config))
    assert_same(states(found), states(expected))
    kinds = [{n: type(c) for n, c in pipe.components.items()} for pipe in (found, expected)]
    assert kinds[0] == kinds[1]
    assert not any(
        m.training for model in diffusion.models(found).values() for m in model.modules()
    )
    plan = found.streamload_report.plan
    assert {name.partition(".")[0] for name in plan.placements.names} == {
        *diffusion.models(expected)
    }
    if make is stable_diffusion:
        assert np.array_equal(diffusion.image(found), diffusion.image(expected))


def test_a_file_of_a_server(tmp_path: Path) -> None:
    """Its rows are read by ranges, and nothing is written to this machine."""
    file, config = saved(tmp_path, sd3())
    with serve(tmp_path) as site:
        found = ours(site.url + file.name, config=config)
    assert_same(states(found), states(ours(file, config=config)))


def test_options_hold_as_for_folders(tmp_path: Path) -> None:
    """Dtypes and formats by component; and layers of a file stream, with the same image."""
    made = stable_diffusion()
    file, config = saved(tmp_path, made)
    found = ours(file, config=config, dtype={"vae.*": "float32", "*": "float16"})
    assert found.vae.dtype == torch.float32
    assert found.unet.dtype == found.text_encoder.dtype == torch.float16
    resident = ours(file, config=config)
    half = resident.streamload_report.resident_nbytes // 2
    offloaded = ours(file, config=config, budget=half, offload=True)
    assert np.array_equal(diffusion.image(offloaded), diffusion.image(resident))
    offloaded.streamload_offload.close()
    made[0].save_pretrained(tmp_path / "whole")
    quant = {"unet": "int8", "text_encoder": "nf4"}
    both = [ours(file, config=config, quant=quant), ours(tmp_path / "whole", quant=quant)]
    assert both[0].streamload_report.resident_nbytes < resident.streamload_report.resident_nbytes
    for pipe in both:
        for model in diffusion.models(pipe).values():
            make_dense(model, torch.float32)
    assert_same(*map(states, both))


@pytest.fixture
def flux(tmp_path: Path, narrow: Callable[..., Any]) -> tuple[Any, Path, Path]:
    """Flux: the pipeline, the file of its transformer, and the folder of its configuration."""
    pipe = diffusion.flux()
    pipe.register_modules(transformer=narrow(32, in_channels=4, axes_dims_rope=(4, 4, 8)))
    return (pipe, *saved(tmp_path, (pipe, files.flux(pipe.transformer))))


def test_components_that_the_file_lacks(tmp_path: Path, flux: tuple[Any, Path, Path]) -> None:
    """One model comes back alone; with the folder of the others, or with objects, as a pipeline."""
    pipe, file, config = flux
    folder = tmp_path / "whole"
    pipe.save_pretrained(folder)
    alone = ours(file, config=config)
    assert type(alone) is diffusers.FluxTransformer2DModel
    expected = type(alone).from_single_file(str(file), config=str(config / "transformer"))
    assert_same(alone.state_dict(), expected.state_dict())
    for config_of_one in (config / "transformer", dict(expected.config)):
        assert_same(ours(file, config=config_of_one).state_dict(), expected.state_dict())

    shutil.rmtree(folder / "transformer")  # it is not read
    others = {"text_encoder": pipe.text_encoder, "text_encoder_2": pipe.text_encoder_2}
    for given in (
        {"components": folder, "config": config},
        {"components": {"*": folder, "vae": pipe.vae}, "config": config},
        {"components": folder, "config": config, "vae": pipe.vae},
        {"config": config, "vae": pipe.vae, **others},
    ):
        found = ours(file, **given)
        assert type(found) is diffusers.FluxPipeline
        assert_same(states(found), states(pipe))
        assert (found.vae is pipe.vae) == ("Autoencoder" in str(given))
    with pytest.raises(CheckpointError, match=r"holds transformer, and not text_encoder_2; write"):
        ours(file, config=config, text_encoder=None, vae=None)
    with pytest.raises(ValueError, match="config is of one model, and no pipeline"):
        ours(file, config=dict(expected.config), vae=None)
    with pytest.raises(ValueError, match="config is for a single file"):
        ours(folder, config=config)


def test_a_transformer_of_wan(tmp_path: Path) -> None:
    """Names alone change, and one tensor has five axes."""
    model = random(diffusion.wan().transformer)
    model.save_config(tmp_path / "config")
    file = tmp_path / "wan.safetensors"
    st.save_file(files.wan(model), file)
    found = ours(file, config=tmp_path / "config")
    expected = type(model).from_single_file(str(file), config=str(tmp_path / "config"))
    assert_same(found.state_dict(), expected.state_dict())
    # under diffusers' own names
    st.save_file(model.state_dict(), file)
    assert_same(ours(file, config=tmp_path / "config").state_dict(), model.state_dict())


# --- configurations -------------------------------------------------------------------------------


def test_repositories(tmp_path: Path, hub: Hub, flux: tuple[Any, Path, Path]) -> None:
    """config= downloads no weights, components= those of others; without them the hub rests."""
    pipe, file, _ = flux
    folder, name = tmp_path / "whole", "black-forest-labs/FLUX.1-dev"
    pipe.save_pretrained(folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    repository = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    hub.add(name, repository | {"flux1-dev.safetensors": file.read_bytes()})

    def weights() -> set[str]:
        return {path.parent.name for path in (tmp_path / "home").rglob("*.safetensors")}

    asked = len(hub.paths())
    with pytest.raises(CheckpointError, match=f'cache .* lacks: write config="{name}" to download'):
        ours(file)
    assert len(hub.paths()) == asked
    expected = pipe.transformer.state_dict()
    assert_same(ours(file, config=name).state_dict(), expected)
    assert not weights()
    asked = len(hub.paths())
    assert_same(ours(file).state_dict(), expected)
    assert len(hub.paths()) == asked
    assert_same(states(ours(file, components=name)), states(pipe))
    assert weights() == {"text_encoder", "text_encoder_2", "vae"}
    assert_same(ours(f"hf://{name}/flux1-dev.safetensors").state_dict(), expected)


# --- what is refused ------------------------------------------------------------------------------


def test_files_that_lack_tensors_or_are_of_other_shapes(
    tmp_path: Path, narrow: Callable[..., Any]
) -> None:
    """Each error names the tensor, and nothing is loaded in its place."""
    model = narrow(32, axes_dims_rope=(4, 4, 8))
    model.save_config(tmp_path)
    whole, file = files.flux(model, "model.diffusion_model."), tmp_path / "flux.safetensors"

    def refused(state: files.State, error: Any, said: str) -> None:
        st.save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, file)
        with pytest.raises(error, match=said):
            ours(file, config=tmp_path)

    name = "model.diffusion_model.double_blocks.0.img_attn.qkv.weight"
    less = {n: t for n, t in whole.items() if n != name}
    refused(less, CheckpointError, r"not model \(the file lacks 'double_blocks\.0\.img_attn\.qkv")
    refused({**whole, name: whole[name][:-3]}, StateDictMismatchError, r"to_q\.weight")
    refused({**whole, name: whole[name][:, 1:]}, StateDictMismatchError, r"to_q\.weight")
    scaled = {**whole, name.replace("weight", "scale_weight"): torch.ones(1)}
    refused(scaled, CheckpointError, r"qkv\.scale_weight'.*is quantised")
    st.save_file({"model.embed_tokens.weight": torch.ones(4, 4)}, file)
    with pytest.raises(CheckpointError, match=r"not know what .*embed_tokens.*; write config="):
        ours(file)


def test_models_that_diffusers_does_not_read(tmp_path: Path) -> None:
    """The class is named."""
    model = diffusers.VQModel(block_out_channels=(4,), norm_num_groups=1)
    model.save_config(tmp_path)
    st.save_file(model.state_dict(), tmp_path / "vq.safetensors")
    with pytest.raises(CheckpointError, match="diffusers reads no VQModel from a single file"):
        ours(tmp_path / "vq.safetensors", config=tmp_path)


def test_a_broken_model_is_not_replaced(tmp_path: Path) -> None:
    """If one of a file's models is not converted, no other folder's takes its place."""
    made = sd3()
    file, config = saved(tmp_path, made)
    folder = tmp_path / "whole"
    made[0].save_pretrained(folder)
    state = st.load_file(file)
    del state["model.diffusion_model.context_embedder.weight"]
    st.save_file(state, file)
    for given in ({"config": config}, {"components": folder}):
        with pytest.raises(CheckpointError, match=r"not transformer \(the file lacks 'context_emb"):
            ours(file, **given)


def test_values_that_a_conversion_computes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random(diffusion.wan().transformer)
    model.save_config(tmp_path)
    st.save_file(files.wan(model), tmp_path / "wan.safetensors")
    known = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    convert = known["WanTransformer3DModel"]["checkpoint_mapping_fn"]

    def computing(checkpoint: Any, **more: Any) -> Any:
        checkpoint["head.head.weight"] = checkpoint["head.head.weight"] * 2
        return convert(checkpoint, **more)

    monkeypatch.setitem(known, "WanTransformer3DModel", {"checkpoint_mapping_fn": computing})
    with pytest.raises(CheckpointError, match=r"mul of head\.head\.weight computes values"):
        ours(tmp_path / "wan.safetensors", config=tmp_path)


# --- GGUF -----------------------------------------------------------------------------------------


KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16")


@pytest.fixture
def packed(tmp_path: Path, narrow: Callable[..., Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A GGUF of Flux as ComfyUI-GGUF writes them, and the values of its tensors."""
    model = narrow(256, axes_dims_rope=(16, 56, 56))
    model.save_config(tmp_path)
    tensors, types, exact = {}, {}, {}
    for number, (name, tensor) in enumerate(files.flux(model).items()):
        array = tensor.detach().numpy()
        tensors[name] = exact[name] = array
        if array.ndim == 1:
            continue
        kind = KINDS[number % len(KINDS)]
        kind = "Q8_0" if array.shape[-1] % 256 and kind.endswith("K") else kind
        number, types[name] = gguf.GGMLQuantizationType[kind], kind
        if kind.endswith("_K"):
            tensors[name] = random_blocks(kind.lower(), *array.shape, seed=len(types))
        else:
            tensors[name] = gguf.quants.quantize(array, number)
        exact[name] = gguf.quants.dequantize(tensors[name], number)
    assert {*types.values()} == {*KINDS}
    raw = {
        name: np.ascontiguousarray(a).view(np.uint8) if name in types else a
        for name, a in tensors.items()
    }
    write(tmp_path / "flux.gguf", raw, types, architecture="flux")
    st.save_file(
        {n: torch.from_numpy(a.copy()) for n, a in exact.items()}, tmp_path / "flux.safetensors"
    )
    yield tmp_path / "flux.gguf", exact


def test_a_gguf_is_what_gguf_py_and_diffusers_read(packed: tuple[Path, dict[str, Any]]) -> None:
    """Blocks become floats, or stay: gguf-py's numbers bit for bit, diffusers' up to float16's."""
    path, _ = packed
    config = {"config": path.parent}
    exact = ours(path.with_suffix(".safetensors"), **config).state_dict()
    assert_same(ours(path, dtype="float32", **config).state_dict(), exact)
    model = ours(path, quant="stored", dtype="float32", **config)
    blocks = [name for name, module in model.named_modules() if isinstance(module, Coded)]
    assert any(name.endswith(("to_k", "proj_mlp")) for name in blocks)  # rows of a tensor
    resident = model.streamload_report.resident_nbytes
    assert resident < 1.5 * path.stat().st_size
    make_dense(model, torch.float32)
    assert_same(model.state_dict(), exact)
    half = ours(path, **config)
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.float16}

    quantized = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    theirs = diffusers.FluxTransformer2DModel.from_single_file(
        str(path), quantization_config=quantized, torch_dtype=torch.float32, config=str(path.parent)
    ).state_dict()
    assert theirs.keys() == exact.keys()
    for name, tensor in theirs.items():
        found = theirs_of_gguf.dequantize_gguf_tensor(tensor).float()
        torch.testing.assert_close(found, exact[name], rtol=2e-3, atol=2e-4, msg=name)


def test_a_gguf_of_a_unet(tmp_path: Path) -> None:
    """Its names have no prefix, and rows of 256 become convolutions again."""
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32}
    model = random(diffusion.unet(**sizes, norm_num_groups=2, attention_head_dim=8))
    model.save_config(tmp_path)
    prefix, stored, types, more = "model.diffusion_model.", {}, {}, []
    exact = {}
    for name, tensor in files.unet(model).items():
        array = exact[name] = tensor.detach().numpy()
        name, original = name.removeprefix(prefix), name
        if array.ndim > 1 and array.size >= 512 and array.size % 256 == 0:
            more.append(("add_array", (f"comfy.gguf.orig_shape.{name}", array.shape)))
            rows, types[name] = array.reshape(-1, 256), "Q8_0"
            blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
            exact[original] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            exact[original] = exact[original].reshape(array.shape)
            array = rows
        stored[name] = array
    assert any(len(shape) == 4 for _, (_, shape) in more)
    write(tmp_path / "unet.gguf", stored, types, architecture="sd1", more=more)
    file = tmp_path / "unet.safetensors"
    st.save_file({name: torch.from_numpy(array.copy()) for name, array in exact.items()}, file)
    expected = type(model).from_single_file(str(file), config=str(tmp_path))
    found = ours(tmp_path / "unet.gguf", config=tmp_path, dtype="float32")
    assert_same(found.state_dict(), expected.state_dict())


@pytest.mark.slow
def test_memory_beside_that_of_diffusers(tmp_path: Path, cgroup: Boxes) -> None:
    """A GGUF, and a cast: less than diffusers takes, which copies rows that it cuts; equal bits."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_config(tmp_path)
    state = {name: tensor.detach() for name, tensor in files.flux(model).items()}
    st.save_file(state, tmp_path / "flux.safetensors")
    types = {name: "Q8_0" for name, tensor in state.items() if tensor.dim() > 1}
    blocks = {name: random_blocks("q8_0", *state[name].shape) for name in types}
    floats = {name: tensor.float().numpy() for name, tensor in state.items() if name not in types}
    write(tmp_path / "flux.gguf", blocks | floats, types, architecture="flux")
    del model, state, blocks

    def run(name: str, **options: Any) -> dict[str, Any]:
        arguments = {"path": str(tmp_path / name), "config": str(tmp_path), **options}
        found = boxed(cgroup, call("single_file_job:Job", **arguments))
        assert (found["outcome"], found["why"]) == ("loaded", ""), found
        return found

    for name, options in (
        ("flux.safetensors", {"dtype": "float16"}),
        ("flux.gguf", {"dtype": "bfloat16", "quant": "stored"}),
    ):
        mine, theirs = run(name, theirs=False, **options), run(name, theirs=True, **options)
        least = (tmp_path / name).stat().st_size
        assert 0.99 * least < mine["taken_nbytes"] < least + 80_000_000, mine
        assert mine["taken_nbytes"] < theirs["taken_nbytes"], theirs
        if "quant" not in options:
            assert mine["said"]["bits"] == theirs["said"]["bits"]
