"""Models of tinygrad's repository as docs/models.md lists them.

``STREAMLOAD_TINYGRAD`` names a folder with the repository, whose ``extra/`` and ``examples/`` are
in no wheel; its tinygrad is not used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

pytestmark = pytest.mark.slow
needs.module("tinygrad")
torch = needs.module("torch")
transformers = needs.module("transformers")

from models_page import rows  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from tinygrad import Context, Tensor, nn  # noqa: E402
from transformers_helpers import AUDIO, GROUPED, MODELS, SMALL  # noqa: E402

import streamload  # noqa: E402
from streamload.errors import StateDictMismatchError  # noqa: E402

IDS = [[5, 17, 3, 42, 8]]
#: What the models' files import for sounds, pictures and words, and loading needs nothing of.
OF_OTHERS = ("cv2", "librosa", "sentencepiece", "PIL", "PIL.Image")


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models' files can be imported, behind the tinygrad that is installed."""
    folder = os.environ.get("STREAMLOAD_TINYGRAD", "")
    if not (Path(folder) / "extra" / "models").is_dir():
        pytest.skip("STREAMLOAD_TINYGRAD names no folder with tinygrad's repository")
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    for name in OF_OTHERS:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            empty = types.ModuleType(name)
            empty.__spec__ = importlib.machinery.ModuleSpec(name, None)
            empty.SentencePieceProcessor = empty.Image = object  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, empty)
    with Context(DEV="CPU"):
        yield


def of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def noise(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape, np.float32))


def text(ids: Any = IDS) -> Tensor:
    return Tensor(ids)


def llama(**others: Any) -> Any:
    sizes: dict[str, Any] = {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}
    sizes |= {"n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": 96, "max_context": 16, "jit": False}
    return of("extra.models.llama", "Transformer")(**sizes | others)


def mixture(module: str, *sizes: int) -> Any:
    return functools.partial(of(module, "MixtureFeedForward"), *sizes)


def gpt2(model: Any) -> Tensor:
    """The logits, of which the model itself keeps the last."""
    length = len(IDS[0])
    x = model.wte(text()) + model.wpe(Tensor.arange(length).reshape(1, -1))
    mask = Tensor.full((1, 1, length, length), float("-inf")).triu(1)
    return model.lm_head(
        model.ln_f(functools.reduce(lambda h, block: block(h, 0, mask), model.h, x))
    )


def clip() -> Any:
    """The text encoder of Stable Diffusion, with one layer of its twelve."""
    closed = of("extra.models.clip", "Closed")
    model = closed.ClipTextModel(None)
    model.text_model.encoder = closed.ClipEncoder(1)
    return model


def t5() -> Any:
    config = of("extra.models.t5", "T5Config")
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    return of("extra.models.t5", "T5EncoderModel")(config(**sizes, num_heads=4))


def whisper() -> Any:
    sizes = {f"n_{kind}_{what}": n for kind in ("audio", "text") for what, n in
             (("ctx", 16), ("state", 32), ("head", 4), ("layer", 2))}  # fmt: skip
    return of("examples.whisper", "Whisper")({"n_mels": 8, "n_vocab": 96, **sizes})


def unet() -> Any:
    return of("extra.models.unet", "UNetModel")(
        **{"adm_in_ch": None, "in_ch": 4, "out_ch": 4, "model_ch": 32, "num_res_blocks": 1},
        **{"attention_resolutions": [2], "channel_mult": [1, 2], "transformer_depth": [1, 1]},
        **{"ctx_dim": 32, "n_heads": 4},
    )


def autoencoder() -> Any:
    sizes = {"ch": 32, "in_ch": 3, "out_ch": 3, "z_ch": 4, "num_res_blocks": 1, "resolution": 32}
    return of("examples.sdxl", "FirstStageModel")(**sizes, ch_mult=[1, 2])


def resnet(size: int, *classes: int) -> Any:
    return of("extra.models.resnet", "ResNet")(size, *classes)


@dataclass(frozen=True)
class Own:
    """A model whose checkpoints have its own names, after a prefix."""

    make: Callable[[], Any]
    run: Callable[[Any], Tensor]
    prefix: str = ""


@dataclass(frozen=True)
class Theirs:
    """A model that computes what one of transformers does, from a checkpoint of that one."""

    make: Callable[[], Any]
    run: Callable[[Any], Tensor]
    source: Callable[[], Any]
    expected: Callable[[Any], Any]


def of_transformers(name: str, sizes: dict[str, Any]) -> Callable[[], Any]:
    model_class = getattr(transformers, name)
    return lambda: model_class(model_class.config_class(**sizes))


def ids(found: Any = IDS) -> Any:
    return torch.tensor(found)


RMS = {**GROUPED, "rms_norm_eps": 1e-6}
T5 = MODELS["t5"][2] | {"feed_forward_proj": "gated-gelu"}
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 1}
NAN = float("nan")  # the temperature for which tinygrad's Llama returns logits

#: By the names of docs/models.md.
MODELS_OF_TINYGRAD: dict[str, Own | Theirs] = {
    "Llama": Theirs(
        llama,
        lambda m: m(text(), 0, NAN),
        of_transformers("LlamaForCausalLM", RMS),
        lambda m: m(ids()).logits,
    ),
    "Mixtral": Theirs(
        lambda: llama(feed_forward=mixture("examples.mixtral", 4)),
        lambda m: m(text([[5]]), 0, NAN),
        of_transformers("MixtralForCausalLM", {**MODELS["mixtral"][2], "rms_norm_eps": 1e-6}),
        lambda m: m(ids([[5]])).logits,
    ),
    "OLMoE": Theirs(
        lambda: llama(n_kv_heads=4, qk_norm=1e-6, feed_forward=mixture("examples.olmoe", 4, 2)),
        lambda m: m(text([[5]]), 0, NAN),
        of_transformers(
            "OlmoeForCausalLM",
            {**RMS, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
        ),
        lambda m: m(ids([[5]])).logits,
    ),
    "GPT-2": Theirs(
        lambda: of("examples.gpt2", "Transformer")(32, 4, 2, 1e-5, 96, max_seq_len=64),
        gpt2,
        of_transformers("GPT2LMHeadModel", MODELS["gpt2"][2]),
        lambda m: m(ids()).logits,
    ),
    "Mamba": Theirs(
        lambda: of("examples.mamba", "Mamba")(32, 2, 96),
        lambda m: m(text()),
        of_transformers(
            "MambaForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
        ),
        lambda m: m(ids()).logits,
    ),
    "BERT for questions": Theirs(
        lambda: of("extra.models.bert", "BertForQuestionAnswering")(32, 48, 64, 4, 2, 2, 96, 0, 0),
        lambda m: m(text(), Tensor.ones(1, 5), Tensor.zeros(1, 5, dtype="int32")).squeeze(-1),
        of_transformers("BertForQuestionAnswering", SMALL),
        lambda m: torch.cat([m(ids()).start_logits, m(ids()).end_logits]),
    ),
    "BERT for training": Theirs(
        lambda: of("extra.models.bert", "BertForPretraining")(32, 48, 64, 4, 2, 2, 96, 0, 0),
        lambda m: m(text(), Tensor.ones(1, 5), Tensor([[1, 3]]), Tensor.zeros(1, 5, dtype="int32"))[
            0
        ],
        of_transformers("BertForPreTraining", SMALL),
        lambda m: m(ids()).prediction_logits[:, [1, 3]],
    ),
    "T5 encoder": Theirs(
        t5,
        lambda m: m(text()),
        of_transformers("T5EncoderModel", T5),
        lambda m: m(ids()).last_hidden_state,
    ),
    "CLIP text encoder": Theirs(
        clip,
        lambda m: m.text_model(text([list(range(77))])),
        of_transformers("CLIPTextModel", {**CLIP, "num_attention_heads": 12, "vocab_size": 49408}),
        lambda m: m(ids([list(range(77))])).last_hidden_state,
    ),
    "Whisper": Theirs(
        whisper,
        lambda m: m.decoder(text(), 0, m.encoder(noise(1, 8, 32))),
        of_transformers("WhisperForConditionalGeneration", AUDIO),
        lambda m: m(torch.from_numpy(noise(1, 8, 32).numpy()), decoder_input_ids=ids()).logits,
    ),
    "Stable Diffusion's UNet": Own(
        unet,
        lambda m: m(noise(1, 4, 8, 8), Tensor([3]), noise(1, 5, 32)),
        prefix="model.diffusion_model.",
    ),
    "SDXL's autoencoder": Own(
        autoencoder, lambda m: m.decode(noise(1, 4, 8, 8)), prefix="first_stage_model."
    ),
    "ResNet": Own(lambda: resnet(18, 10), lambda m: m(noise(1, 3, 32, 32))),
    "EfficientNet": Own(
        lambda: of("extra.models.efficientnet", "EfficientNet")(0, 10),
        lambda m: m.forward(noise(1, 3, 32, 32)),
    ),
    "ConvNeXt": Own(
        lambda: of("extra.models.convnext", "ConvNeXt")(num_classes=10, depths=[1], dims=[8]),
        lambda m: m(noise(1, 3, 32, 32)),
    ),
    "ViT": Own(
        lambda: of("extra.models.vit", "ViT")(2, 48, 3), lambda m: m.forward(noise(1, 3, 224, 224))
    ),
    "RetinaNet": Own(
        lambda: of("extra.models.retinanet", "RetinaNet")(resnet(50), num_classes=4),
        lambda m: m(noise(1, 3, 64, 64)),
    ),
    "RNN-T": Own(
        lambda: of("extra.models.rnnt", "RNNT")(8, 29, 32, 16, 16),
        lambda m: m.encoder(noise(6, 1, 8), None)[0],
    ),
    "YOLOv8": Own(
        lambda: of("examples.yolov8", "YOLOv8")(0.25, 2.0, 0.33, 80),
        lambda m: m.net(noise(1, 3, 64, 64))[0],
    ),
}


def load(row: Own | Theirs, path: Path, typed: str) -> Any:
    """Load as docs/models.md says: as typed, or with the line that the error says."""
    model = row.make()
    arguments: dict[str, Any] = {"progress": False}
    try:
        streamload.load_state_dict(model, path, **arguments)
    except StateDictMismatchError as error:
        (line,) = error.suggestions
        assert line.filled == line.parameters
        assert typed == f"`{line.arguments}`"
        model = row.make()
        arguments |= eval(f"dict({line.arguments})", {"streamload": streamload})
        streamload.load_state_dict(model, path, **arguments)
    else:
        assert typed == "as typed"
    return model


@pytest.mark.parametrize("name", MODELS_OF_TINYGRAD)
def test_a_model_of_tinygrad(tmp_path: Path, name: str) -> None:
    """It loads as docs/models.md says, and computes what its reference does."""
    row = MODELS_OF_TINYGRAD[name]
    typed = rows("tinygrad")[name][-1]
    if isinstance(row, Theirs):
        torch.manual_seed(1)
        source = row.source().eval()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            expected = row.expected(source).numpy()
        source.save_pretrained(tmp_path)
        result = row.run(load(row, tmp_path, typed)).numpy()
        assert result.shape == expected.shape
        assert np.abs(result - expected).max() < 2e-3 * np.abs(expected).max()
        return
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    reference = row.make()
    values = {
        name: np.asarray(rng.standard_normal(tensor.shape, np.float32) / 10)
        for name, tensor in nn.state.get_state_dict(reference).items()
    }
    values = {name: np.asarray(abs(v)) if "var" in name else v for name, v in values.items()}
    others = {"alphas_cumprod": np.ones(9, np.float32)} if row.prefix else {}
    save_file({row.prefix + name: v for name, v in values.items()} | others, path)
    nn.state.load_state_dict(reference, {k: Tensor(v) for k, v in values.items()}, verbose=False)
    model = load(row, path, typed)
    for key, tensor in nn.state.get_state_dict(model).items():
        assert tensor.numpy().tobytes() == values[key].tobytes(), key
    assert np.array_equal(row.run(model).numpy(), row.run(reference).numpy())
