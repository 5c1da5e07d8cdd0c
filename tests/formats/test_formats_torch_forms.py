"""Files of torch.save: which of their tensors are meant, and which files are refused by name."""

from __future__ import annotations

import io
import pickle
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from safetensors_files import write_safetensors
from torch_files import archive, pickle_of, state_dict, storage, tensor, write

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.cli import main
from streamload.errors import HeaderError, PlanInfeasibleError

torch = needs.module("torch")


def filled(*shape: int) -> Any:
    """Numbers that tell every element from its neighbours."""
    return torch.arange(1.0, int(np.prod(shape)) + 1).reshape(shape)


def refused(path: Path, **arguments: Any) -> HeaderError:
    with pytest.raises(HeaderError) as raised:
        open_checkpoint(path, **arguments)
    return raised.value


# --- which dict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module", "params_ema"])
def test_the_only_dict_of_tensors_is_found(tmp_path: Path, key: str) -> None:
    path = tmp_path / "model.pth"
    torch.save({"epoch": 3, key: {"weight": filled(2)}, "hyper": {"lr": [1.0]}}, path)
    assert [*open_checkpoint(path).tensors] == ["weight"]


def test_several_dicts_need_a_key(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    value = {
        "steps": filled(2),
        "model": {"a": filled(2), "b": filled(3)},
        "ema": {"inner": {"a": filled(4)}, "decay": 0.5},
    }
    torch.save(value, path)
    error = refused(path)
    assert error.problem == "holds several dicts of tensors"
    assert error.found == "'model' (2 tensors), '.' (1 tensor), 'ema.inner' (1 tensor)"
    assert error.expected == "open_checkpoint(path, key='model'), or --key model"
    for key, names in (("model", {"a", "b"}), (".", {"steps"}), ("ema.inner", {"a"})):
        assert set(open_checkpoint(path, key=key).tensors) == names
    assert refused(path, key="ema").problem == "key 'ema' holds no tensors by name"
    found = {"a": torch.zeros(4)}
    chosen = open_checkpoint(path, key="ema.inner")
    streamload.load_state_dict(found, chosen, device="cpu", progress=False)
    assert torch.equal(found["a"], filled(4))


def test_keys_of_the_same_dict(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    weights = {"weight": filled(2), "bias": filled(3)}
    torch.save({"state_dict": weights, "state_dict_ema": weights, "a.b": {"c": weights}}, path)
    expected = open_checkpoint(path)
    for key in ("state_dict", "state_dict_ema", "a.b.c"):
        assert open_checkpoint(path, key=key).tensors == expected.tensors
    assert refused(path, key="a").problem == "key 'a' holds no tensors by name"


def test_a_key_is_for_such_files_only(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", (2,), bytes(4))})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match="is for files that torch"):
            open_checkpoint(path, key="model")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda: filled(3), "one tensor without a name"),
        (lambda: [filled(3)], "list"),
        (lambda: {"epoch": 1}, "dict"),
        (lambda: {0: filled(3)}, "dict"),
    ],
)
def test_no_tensors_by_name(tmp_path: Path, value: Any, found: str) -> None:
    """A file without a dict of tensors is no checkpoint."""
    path = tmp_path / "model.pth"
    torch.save(value(), path)
    error = refused(path)
    assert (error.problem, error.found) == ("holds no tensors by name", found)
    assert error.expected == 'torch.save(model.state_dict(), "model.pth")'


# --- refused by name ------------------------------------------------------------------------------


class _ById(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return 7 if value is Ellipsis else None


def _tar() -> bytes:
    """The tensor w in the form of torch before 0.1.10: storages, tensors and objects."""
    tensor_form = struct.pack("<iiqqq", 1, 0, 4, 1, 0)  # axes, padding, length, stride, offset
    objects = io.BytesIO()
    _ById(objects, 2).dump({"w": ...})
    storage = pickle.dumps((0, "cpu", torch.FloatStorage), 2) + struct.pack("<q4f", 4, *range(4))
    parts = {
        "storages": pickle.dumps(1, 2) + storage + pickle.dumps([], 2),
        "tensors": pickle.dumps(1, 2) + pickle.dumps((7, 0, torch.FloatTensor), 2) + tensor_form,
        "pickle": objects.getvalue(),
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _saved(value: Any, **arguments: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **arguments)
    return out.getvalue()


def _scripted() -> bytes:
    out = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), out)
    return out.getvalue().replace(b"code/__torch__", b"CODE/__torch__")


def _of_big_endian() -> bytes:
    return archive(state_dict(a=tensor())).replace(b"little", b"biggie")


def _compressed() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", state_dict(a=tensor()))
        made.writestr("archive/data/0", bytes(16))
    return out.getvalue()


def _npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    return out.getvalue()


SAVE = 'torch.save(model.state_dict(), "model.pth")'
AGAIN = 'torch.save(torch.load("model.pth", weights_only=True), "model.pth")'
OTHERS: Mapping[str, tuple[Callable[[], bytes], str, str]] = {
    "tar": (
        _tar,
        "is a tar archive, of torch.save before version 0.1.10",
        f"{AGAIN.replace('True', 'False')}, if you trust the file",
    ),
    "module": (
        lambda: _saved(torch.nn.Sequential(torch.nn.Linear(2, 2))),
        "is a pickled object, of torch.nn.modules.container.Sequential: no code is run to open a "
        "file",
        SAVE,
    ),
    "TorchScript": (
        _scripted,
        "is a TorchScript archive that does not list its parameters",
        'torch.save(torch.jit.load("model.pth").state_dict(), "model.pth")',
    ),
    "pickle": (lambda: b"\x80\x04}.", "is a pickle, which could run anything", SAVE),
    "big-endian": (_of_big_endian, "is of a machine with another byte order", f"little: {AGAIN}"),
    "compressed": (
        _compressed,
        "its entry data.pkl is compressed",
        "entries as torch.save stores them, or zip -0",
    ),
    "web page": (
        lambda: b"<!DOCTYPE html>",
        "is not a torch file",
        "the file itself: download it again",
    ),
    "npz": (_npz, "is a zip archive, but not of torch.save", "one entry data.pkl"),
    "nothing": (lambda: b"", "is not of torch.save", "a file that torch.save wrote"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", OTHERS)
def test_other_forms_are_refused_by_name(tmp_path: Path, form: str) -> None:
    made, problem, expected = OTHERS[form]
    path = write(tmp_path / "model.pth", made())
    error = refused(path)
    assert error.problem == problem
    assert str(error.expected).startswith(expected)


@pytest.mark.filterwarnings("ignore")
def test_the_call_that_is_suggested_for_a_tar_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(write(tmp_path / "old.pth", _tar()))
    exec(str(error.expected).partition(", if")[0], {"torch": torch})
    assert [*open_checkpoint("model.pth").tensors] == ["w"]
    assert torch.load("model.pth")["w"].tolist() == [0, 1, 2, 3]


UNREADABLE: Mapping[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: filled(2, 2).to_sparse(), "it is sparse"),
    "conjugated": (lambda: (filled(2) + 1j).conj(), "it is a view that is conjugated or negated"),
    "meta": (lambda: torch.empty(3, device="meta"), "it is on the meta device, and has no values"),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "unknown dtype"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_that_are_not_read(tmp_path: Path, kind: str) -> None:
    made, why = UNREADABLE[kind]
    path = tmp_path / "model.pth"
    torch.save({"good": filled(2), "other": made()}, path)
    error = refused(path)
    assert error.tensor == "other"
    assert why in error.problem
    torch.save({"model": {"good": filled(2)}, "beside": {"other": made()}}, path)
    assert [*open_checkpoint(path, key="model").tensors] == ["good"]


def test_what_is_expanded_takes_no_memory_to_open(tmp_path: Path) -> None:
    """One element that stands for a trillion opens at once, and is refused by the plan."""
    path = tmp_path / "model.pth"
    torch.save({"large": torch.zeros(1).expand(10**6, 10**6)}, path)
    assert open_checkpoint(path).nbytes == 4 * 10**12
    with pytest.raises(PlanInfeasibleError):
        streamload.load_state_dict(None, path, device="host", progress=False)


@pytest.mark.parametrize("key", ["model", "ema", "turned"])
def test_what_is_chosen_late_in_a_file_takes_no_more_memory(tmp_path: Path, key: str) -> None:
    """What is said of tensors ends where the first storage begins, whichever are chosen."""
    one, more = torch.zeros(500, 1000), torch.zeros(500, 1000)
    torch.save(
        {"model": {"w": one}, "ema": {"w": more}, "turned": {"w": one.t()}}, tmp_path / "a.pth"
    )
    (header,) = streamload.open_checkpoint(tmp_path / "a.pth", key=key).shards
    assert 0 < header.data_start < 4096


def test_plain_values_of_python_2(tmp_path: Path) -> None:
    """Strings without a prefix, as Python 2 wrote them, are names as well."""
    name = b"S'weight'\n"
    short = b"U\x04bias"
    body = b"(d" + name + tensor() + b"s" + short + tensor((2,), of=storage("0", 4)) + b"s"
    path = write(tmp_path / "model.pth", archive(pickle_of(body)))
    assert [*open_checkpoint(path).tensors] == ["bias", "weight"]


def test_inspect_and_key_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "model.pth")
    torch.save({"model": {"a": filled(2).t()}, "ema": {"b": filled(2, 3).t()}}, path)
    for arguments, code in ((["inspect", path], 1), (["inspect", path, "--key", "ema"], 0)):
        monkeypatch.setattr("sys.argv", ["streamload", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        said = capsys.readouterr()
        assert ("--key model" in said.err) == bool(code)
    assert re.search(r"b +float32 +3 x 2", said.out)
