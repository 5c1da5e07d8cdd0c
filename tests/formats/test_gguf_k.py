"""GGUF in mixtures of K-quants, and importance matrices: types and blocks are llama.cpp's."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import needs
import numpy as np
import pytest
from conversions import files_of, quiet
from gguf_models import read_by_gguf_py, write_model
from k_quants import encoded

from streamload.checkpoint.open import open_checkpoint
from streamload.cli import main
from streamload.conversion import convert as conversion
from streamload.conversion.blocks import Way
from streamload.errors import CheckpointError
from streamload.formats import imatrix as imatrix_file
from streamload.formats.gguf.mixture import MIXTURES, Mixer
from streamload.formats.imatrix import read_imatrix

Array = np.ndarray[Any, np.dtype[Any]]

#: By family: what gives matrices of whole blocks of 256, and of others.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    },
    "qwen2": {
        **{"hidden_size": 288, "intermediate_size": 512, "num_hidden_layers": 5},
        **{"num_attention_heads": 6, "head_dim": 48, "tie_word_embeddings": True},
    },
    "gpt2": {"n_embd": 256, "n_layer": 3},
}
#: SHA-256 of the types that ``llama_quant_compute_types`` of llama-cpp-python 0.3.36 gave for the
#: models of `test_types_are_those_recorded`.
RECORDED = "28d6e8cc0015fb63d5c447dc491251f5c13c9912c7983ea101af2c800990e62a"


def models() -> Any:
    """Family, layers, groups of keys, widths, and whether the head is the embedding."""
    widths = ((4096, 11008), (896, 4864), (576, 1536), (100, 300), (96, 128))
    yield from itertools.product(
        ("llama", "qwen3", "gpt2"), (1, 2, 5, 12, 22, 32, 48, 80), (8, 64), widths, (False, True)
    )


def columns_of(family: str, layers: int, widths: tuple[int, int], tied: bool) -> dict[str, int]:
    """The columns of a model's matrices, by GGUF's names."""
    attention = ["attn_qkv"] if family == "gpt2" else ["attn_q", "attn_k", "attn_v", "ffn_gate"]
    names = ["token_embd", *["output"] * (not tied)]
    for layer in range(layers):
        names += (f"blk.{layer}.{m}" for m in (*attention, "attn_output", "ffn_up", "ffn_down"))
    return {f"{name}.weight": widths["ffn_down" in name] for name in names}


def types_text(mixture: str) -> str:
    """The types of all matrices of all models in a mixture."""
    out = []
    for family, layers, groups, widths, tied in models():
        columns = columns_of(family, layers, widths, tied)
        heads = {"num_attention_heads": 64, "num_key_value_heads": groups}
        mixer = Mixer(columns, {"model_type": family, **heads})
        out += (f"{name} {mixer.kind(name, n, mixture).name}" for name, n in columns.items())
    return "\n".join(out).lower()


def test_types_are_those_recorded() -> None:
    """By kind of matrix, layer, width of rows, and whether the head is the embedding."""
    texts = "\n".join(map(types_text, MIXTURES))
    assert hashlib.sha256(texts.encode()).hexdigest() == RECORDED


def test_types_of_a_model() -> None:
    columns = columns_of("llama", 32, (4096, 11008), False)
    mixer = Mixer(columns, {"model_type": "llama"})
    of = {name: mixer.kind(name, n, "q4_k_m").name for name, n in columns.items()}
    assert (of["output.weight"], of["token_embd.weight"]) == ("Q6_K", "Q4_K")
    wide = [layer for layer in range(32) if of[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    assert wide == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [of[f"blk.{layer}.attn_v.weight"] for layer in wide] == ["Q6_K"] * len(wide)
    large = columns_of("qwen2", 80, (8192, 29568), False)
    shared = Mixer(large, {"model_type": "qwen2", "num_attention_heads": 64})
    found = [shared.kind(f"blk.40.attn_{m}.weight", 8192, "q4_k_s").name for m in "vk"]
    assert found == ["Q5_K", "Q4_K"]


def plain(source: Path, folder: Path) -> dict[str, tuple[str, tuple[int, ...], Array]]:
    """A model's tensors in GGUF as float32, by GGUF's names, with their types."""
    quiet(source, folder, to="gguf", dtype="float32")
    _, tensors = read_by_gguf_py(folder / "model.gguf")
    return {n: (k, s, np.frombuffer(raw, "<f4").reshape(s)) for n, (k, s, raw) in tensors.items()}


def importance_of(tensors: Mapping[str, tuple[str, tuple[int, ...], Array]]) -> dict[str, Array]:
    """Sums for the columns of each matrix of the layers."""
    rng = np.random.RandomState(3)
    names = [n for n, (_, shape, _) in tensors.items() if len(shape) > 1 and n.startswith("blk")]
    return {n: (rng.rand(tensors[n][1][-1]) ** 4 * 1000).astype(np.float32) for n in names}


def write_entries(path: Path, sums: Mapping[str, Array], calls: int = 7) -> Path:
    """The older form of an importance matrix."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(sums)))
        for name, values in sums.items():
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, values.size))
            file.write(values.tobytes())
        file.write(struct.pack("<ii", 10, 5) + b"a.txt")
    return path


def write_gguf(path: Path, sums: Mapping[str, Array], counts: Any = ((7,),)) -> Path:
    """The form of an importance matrix that llama-imatrix writes, by gguf-py."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["a.txt"])
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values.reshape(len(counts), -1))
        writer.add_tensor(f"{name}.counts", np.array(counts, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "mixture"),
    [
        pytest.param("llama", "q4_k_s", marks=pytest.mark.slow),
        pytest.param("qwen2", "q5_k_m", marks=pytest.mark.slow),
        ("gpt2", "q4_k_m"),
    ],
)
def test_blocks_of_a_model(family: str, mixture: str, tmp_path: Path) -> None:
    """Each tensor is its matrix in its type; both forms of importance give the same file."""
    source = write_model(tmp_path / "in", family, **SHAPES[family])
    tensors = plain(source, tmp_path / "f32")
    sums = importance_of(tensors)
    given = {
        "dat": write_entries(tmp_path / "a.dat", sums),
        "gguf": write_gguf(tmp_path / "a.gguf", sums),
    }
    for form, imatrix in (("none", None), *given.items()):
        options: Any = {"to": "gguf", "quant": mixture, "imatrix": imatrix}
        report = quiet(source, tmp_path / form, **options, verify=True)
        metadata, found = read_by_gguf_py(tmp_path / form / "model.gguf")
        assert metadata["general.file_type"] == MIXTURES[mixture].file_type
        matrices = [n for n, (_, s, _) in tensors.items() if len(s) > 1 and "position" not in n]
        for name in matrices:
            kind, _, raw = found[name]
            x = tensors[name][2]
            weights = sums[name] / np.float32(7) if imatrix and name in sums else None
            assert encoded(kind.lower(), x, weights, "auto") == raw, name
        lacking = [f"lacks {len(matrices) - len(sums)} of" in note for note in report.plan.notes]
        assert any(lacking) == (imatrix is not None)
    first, second = (read_by_gguf_py(tmp_path / form / "model.gguf") for form in given)
    assert first == second != read_by_gguf_py(tmp_path / "none" / "model.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("family", SHAPES)
def test_files_equal_llama_cpps(family: str, tmp_path: Path) -> None:
    llama_cpp = needs.runtime("llama_cpp")
    source = write_model(tmp_path / "in", family, **SHAPES[family])
    sums = importance_of(plain(source, tmp_path / "f32"))
    imatrix = write_entries(tmp_path / "a.dat", sums, calls=1)

    kind = llama_cpp.llama_model_imatrix_data
    floats = ctypes.POINTER(ctypes.c_float)
    entries = (kind * (len(sums) + 1))()
    for entry, (name, values) in zip(entries, sums.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(floats)
    for (mixture, made), weighted in itertools.product(MIXTURES.items(), (False, True)):
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = made.file_type, 2
        if weighted:
            parameters.imatrix = ctypes.cast(entries, ctypes.POINTER(kind))
        paths = (str(tmp_path / "f32/model.gguf").encode(), str(tmp_path / "b.gguf").encode())
        assert not llama_cpp.llama_model_quantize(*paths, ctypes.byref(parameters))
        out = tmp_path / f"{mixture}-{weighted}"
        quiet(source, out, to="gguf", quant=mixture, imatrix=imatrix if weighted else None)
        metadata, found = read_by_gguf_py(out / "model.gguf")
        theirs, expected = read_by_gguf_py(tmp_path / "b.gguf")
        assert found == expected, mixture
        assert metadata["general.file_type"] == theirs["general.file_type"]


def test_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any length, by any number of threads; another importance is no resumption."""
    source = write_model(tmp_path / "in", "qwen2", **SHAPES["qwen2"], num_key_value_heads=6)
    sums = importance_of(plain(source, tmp_path / "f32"))
    imatrix = write_entries(tmp_path / "a.dat", sums)
    options: Any = {"to": "gguf", "quant": "q4_k_m", "imatrix": imatrix}
    quiet(source, tmp_path / "whole", **options)
    for threads, nbytes in ((1, 2**14), (4, 2**13)):
        way = Way(threads, block_nbytes=nbytes, behind=1)
        monkeypatch.setattr(conversion, "choose_way", lambda *_, way=way, **__: way)
        quiet(source, tmp_path / f"{threads}", **options)
        assert (
            files_of(tmp_path / f"{threads}")["model.gguf"]
            == files_of(tmp_path / "whole")["model.gguf"]
        )
    assert not quiet(source, tmp_path / "1", **options, resume=True).read_nbytes
    write_entries(imatrix, sums, calls=8)
    with pytest.raises(CheckpointError, match="overwrite"):
        quiet(source, tmp_path / "1", **options, resume=True)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """``streamload convert ... --to gguf --quant q6_k --imatrix FILE``."""
    source = write_model(tmp_path / "in", "gpt2", **SHAPES["gpt2"], tokenizer=False)
    sums = importance_of(plain(source, tmp_path / "f32"))
    imatrix = write_gguf(tmp_path / "a.gguf", sums)
    arguments = ["--to", "gguf", "--quant", "q6_k", "--imatrix", str(imatrix)]
    monkeypatch.setattr(
        sys, "argv", ["streamload", "convert", str(source), str(tmp_path / "out"), *arguments]
    )
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code, capsys.readouterr()
    assert "the importance matrix lacks 1 of 13 quantised tensors" in capsys.readouterr().out
    kinds = {stored.kind for stored in open_checkpoint(tmp_path / "out").stored.values()}
    assert kinds == {"q6_k"}


def test_experts_have_counts_of_their_own(tmp_path: Path) -> None:
    """An expert that saw no token weighs all columns alike; counts are whole numbers."""
    sums = np.arange(1, 9, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_up_exps.weight": sums}, [[2.2], [0]])
    (found,) = read_imatrix(path).values()
    assert found.read().tolist() == [[0.5, 1, 1.5, 2], [1, 1, 1, 1]]
    path = write_entries(tmp_path / "a.dat", {"a": sums}, calls=0)
    assert read_imatrix(path)["a"].read().tolist() == [sums.tolist()]
    path = write_entries(tmp_path / "a.dat", {"a": sums}, calls=-1)
    with pytest.raises(CheckpointError, match=r"invalid number of calls.*found -1"):
        read_imatrix(path)["a"].read()
    for value in (-1, np.nan, np.inf):
        path = write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_up_exps.weight": sums}, [[2.2], [value]])
        with pytest.raises(CheckpointError, match=rf"invalid count.*found {value}"):
            next(iter(read_imatrix(path).values())).read()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no K-quant": (None, {"quant": "q8_0"}, "imatrix weighs quant q4_k_s or"),
    "no GGUF": (None, {"quant": "nf4", "to": "safetensors"}, 'those of to="gguf"'),
    "columns": (
        lambda sums: {n: s[:-32] for n, s in sums.items()},
        {},
        r"attn_q.*other weights than the model: expected one of each column .*\[256, 256\]",
    ),
    "NaN": (
        lambda sums: {n: s * np.float32(np.nan) for n, s in sums.items()},
        {},
        r"a\.dat: tensor 'blk.*invalid weight.*at least 0, found nan",
    ),
    "infinite": (
        lambda sums: {n: s + np.float32(np.inf) for n, s in sums.items()},
        {},
        r"a\.dat: tensor 'blk.*at least 0, found inf",
    ),
    "negative": (
        lambda sums: {n: np.append(s[:-1], np.float32(-8)) for n, s in sums.items()},
        {},
        r"a\.dat: tensor 'blk.*leave imatrix= out.*at least 0, found -",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_importance_of_it_is_one_error(case: str, tmp_path: Path) -> None:
    change, options, said = REFUSED[case]
    shapes = SHAPES["llama"] | {"num_hidden_layers": 1}
    source = write_model(tmp_path / "in", "llama", **shapes)
    sums = importance_of(plain(source, tmp_path / "f32"))
    path = write_entries(tmp_path / "a.dat", change(sums) if change else sums)
    given: Any = {"to": "gguf", "quant": "q4_k_m", "imatrix": path} | options
    with pytest.raises(ValueError, match=said):
        quiet(source, tmp_path / "out", **given)
    if "leave imatrix= out" in said:
        quiet(source, tmp_path / "out", **given | {"imatrix": None})


@pytest.mark.parametrize("times", [2.0**100, 2.0**117, 2.0**-70])
def test_importance_of_any_magnitude(tmp_path: Path, times: float) -> None:
    """Searches square it: it is scaled first, and the file is that of the usual magnitude."""
    source = write_model(tmp_path / "in", "llama", **SHAPES["llama"] | {"num_hidden_layers": 1})
    sums = importance_of(plain(source, tmp_path / "f32"))
    files = []
    for name, factor in (("usual", 1.0), ("far", times)):
        scaled = {n: s * np.float32(factor) for n, s in sums.items()}
        imatrix = write_entries(tmp_path / f"{name}.dat", scaled, calls=1)
        quiet(source, tmp_path / name, to="gguf", quant="q4_k_m", imatrix=imatrix)
        files.append(read_by_gguf_py(tmp_path / name / "model.gguf"))
    assert files[0] == files[1]


def test_weights_of_zero_alone_are_equal_weights(tmp_path: Path) -> None:
    """As those of matrices that the text did not reach: their codes were all zero."""
    source = write_model(tmp_path / "in", "llama", **SHAPES["llama"] | {"num_hidden_layers": 1})
    sums = importance_of(plain(source, tmp_path / "f32"))
    files = []
    for value in (0.0, 1.0):
        alike = {name: np.full_like(each, value) for name, each in sums.items()}
        imatrix = write_entries(tmp_path / f"{value}.dat", alike, calls=1)
        quiet(source, tmp_path / f"{value}", to="gguf", quant="q4_k_m", imatrix=imatrix)
        files.append(read_by_gguf_py(tmp_path / f"{value}" / "model.gguf"))
    assert files[0] == files[1]


def test_what_was_quantized_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that decode to NaN or to nothing are one error that names tensor and matrix."""
    source = write_model(tmp_path / "in", "llama", **SHAPES["llama"] | {"num_hidden_layers": 1})
    sums = importance_of(plain(source, tmp_path / "f32"))
    monkeypatch.setattr(imatrix_file, "_FAR", 200)  # no weights are scaled
    for value in (3e38, 1e36):
        alike = {name: np.full_like(each, value) for name, each in sums.items()}
        imatrix = write_entries(tmp_path / "a.dat", alike, calls=1)
        said = r"model\.layers.*do not decode.*a\.dat has no such weights: leave it"
        with pytest.raises(CheckpointError, match=said):
            quiet(source, tmp_path / f"{value}", to="gguf", quant="q4_k_m", imatrix=imatrix)
        assert [each.name for each in (tmp_path / f"{value}").iterdir()] == [".streamload"]


def test_hostile_files(tmp_path: Path) -> None:
    """Cut and changed files of both forms: one of our errors each, or an importance."""
    sums = {f"blk.{i}.attn_q.weight": np.ones(32, np.float32) for i in range(3)}
    forms = write_entries(tmp_path / "a.dat", sums), write_gguf(tmp_path / "b.gguf", sums)
    chance, refused = random.Random(1), 0
    for index in range(400):
        raw = bytearray(forms[index % 2].read_bytes())
        if index % 4 < 2:
            del raw[chance.randrange(len(raw)) :]
        for _ in range(chance.randrange(4)):
            at = chance.randrange(min(len(raw), 160)) if raw else 0
            raw[at : at + 4] = chance.choice(
                (b"\xff\xff\xff\x7f", b"\xff" * 4, bytes(4), b"\x01\0\0\0")
            )
        path = tmp_path / "changed"
        path.write_bytes(raw)
        try:
            for each in read_imatrix(path).values():
                assert each.read().dtype == np.float32
        except CheckpointError:
            refused += 1
    assert 200 < refused < 400
