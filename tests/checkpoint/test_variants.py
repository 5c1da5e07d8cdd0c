"""Two variants of a checkpoint in one folder: the one without a suffix, or the one asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors_files import write_safetensors

from streamload.checkpoint.open import (
    Checkpoint,
    is_of_variant,
    open_checkpoint,
    varied,
    without_variants,
)
from streamload.errors import HeaderError, ShardNotFoundError

#: Files of a folder: those without a variant, then those of variant fp16.
FOLDERS = {
    "single": (("model.safetensors",), ("model.fp16.safetensors",)),
    "diffusers": (
        ("diffusion_pytorch_model.safetensors",),
        ("diffusion_pytorch_model.fp16.safetensors",),
    ),
    "shards": (
        ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"),
        ("m-00001-of-00002.fp16.safetensors", "m-00002-of-00002.fp16.safetensors"),
    ),
    "older": (
        ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"),
        ("m.fp16-00001-of-00002.safetensors", "m.fp16-00002-of-00002.safetensors"),
    ),
    "fewer": (
        ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"),
        ("m.fp16.safetensors",),
    ),
}


def write(folder: Path, names: tuple[str, ...], code: str = "F32") -> None:
    nbytes = {"F32": 4, "F16": 2}[code]
    tensors = {name: (code, (1,), bytes(nbytes)) for name in "ab"}
    for number, name in enumerate(names):
        mine = tensors if len(names) == 1 else {"ab"[number]: tensors["ab"[number]]}
        write_safetensors(folder / name, mine)


def files(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(header.path.name for header in checkpoint.shards)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_two_variants(tmp_path: Path, kind: str) -> None:
    """Without a variant, the files without one; with it, those that have it."""
    own, fp16 = FOLDERS[kind]
    write(tmp_path, own)
    write(tmp_path, fp16, "F16")
    assert files(open_checkpoint(tmp_path)) == own
    assert files(open_checkpoint(tmp_path, variant="fp16")) == fp16
    assert files(open_checkpoint(tmp_path / fp16[0], variant="fp16")) == fp16[:1]
    with pytest.raises(ShardNotFoundError, match=r"no file of variant 'bf16'.*\*\.bf16\.saf"):
        open_checkpoint(tmp_path, variant="bf16")
    with pytest.raises(ShardNotFoundError, match="is not of variant 'fp16'"):
        open_checkpoint(tmp_path / own[0], variant="fp16")


def test_an_index_of_a_variant(tmp_path: Path) -> None:
    """It is read where the variant is asked for, and by its own name."""
    own, fp16 = FOLDERS["shards"]
    for names, index in ((own, "index"), (fp16, "index.fp16")):
        write(tmp_path, names)
        document = {"weight_map": dict(zip("ab", names, strict=True))}
        (tmp_path / f"model.safetensors.{index}.json").write_text(json.dumps(document))
    assert files(open_checkpoint(tmp_path)) == own
    assert files(open_checkpoint(tmp_path, variant="fp16")) == fp16
    (tmp_path / fp16[1]).unlink()
    with pytest.raises(ShardNotFoundError, match="shards are missing"):
        open_checkpoint(tmp_path, variant="fp16")
    assert files(open_checkpoint(tmp_path)) == own


def test_variants_without_a_plain_one(tmp_path: Path) -> None:
    """One alone is the checkpoint; of several, the error says what to write."""
    write(tmp_path, ("m.fp16.safetensors",), "F16")
    assert files(open_checkpoint(tmp_path)) == ("m.fp16.safetensors",)
    write(tmp_path, ("m.ema.safetensors",))
    with pytest.raises(HeaderError, match=r'several variants.*variant="ema".*variant="fp16"'):
        open_checkpoint(tmp_path)


def test_other_tensors_under_the_name_of_a_variant(tmp_path: Path) -> None:
    """They are neither a variant nor a part: the files are opened one by one."""
    write_safetensors(tmp_path / "m.safetensors", {"a": ("U8", (1,), b"x")})
    write_safetensors(tmp_path / "m.vision.safetensors", {"b": ("U8", (1,), b"x")})
    with pytest.raises(HeaderError, match=r"several checkpoints.*m\.vision"):
        open_checkpoint(tmp_path)
    assert list(open_checkpoint(tmp_path / "m.safetensors").tensors) == ["a"]


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    """Its root holds no weights: the error names its folders, and what loads all of them."""
    (tmp_path / "model_index.json").write_text("{}")
    write(tmp_path / "unet", FOLDERS["diffusers"][0])
    with pytest.raises(ShardNotFoundError, match=r"streamload\.diffusers.*unet"):
        open_checkpoint(tmp_path)
    assert list(open_checkpoint(tmp_path / "unet").tensors) == ["a", "b"]


def test_names() -> None:
    """How transformers and diffusers name files of variants."""
    assert varied("model.safetensors", "fp16") == "model.fp16.safetensors"
    assert varied("model.safetensors.index.json", "x") == "model.safetensors.index.x.json"
    assert varied("model.safetensors", None) == "model.safetensors"
    assert is_of_variant("model.fp16-00001-of-00002.safetensors", "fp16")
    assert not is_of_variant("model.fp16.safetensors", "16")
    assert without_variants(["a.safetensors", "b.x.safetensors"]) == [
        "a.safetensors",
        "b.x.safetensors",
    ]
