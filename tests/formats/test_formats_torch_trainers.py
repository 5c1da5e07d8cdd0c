"""Checkpoints of trainers and TorchScript archives: the model's tensors by name, without a key."""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from torch_files import archive, pickle_of, tensor, text
from torch_hostile import little_memory, mutated, open_hostile
from torch_loads import check

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError, HeaderError

torch = needs.module("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def trained(kind: Callable[..., Any] = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = kind(model.parameters(), lr=1e-2)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def of_lightning() -> tuple[Any, Any]:
    model, optimizer = trained()
    score = {"monitor": "loss", "best_model_score": torch.tensor(0.5), "dirpath": "a", "kth": {}}
    return model, {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": score},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.01]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-2, "layers": (1, 2)},
    }


def of_imagenet() -> tuple[Any, Any]:
    """What the ImageNet example of torch saves: a score is a tensor beside the dict."""
    model, optimizer = trained(lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))
    return model, {
        "epoch": 9,
        "arch": "resnet18",
        "state_dict": {f"module.{n}": t for n, t in model.state_dict().items()},
        "best_acc1": torch.tensor([76.1]),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"step_size": 30, "_last_lr": [0.1]},
    }


def of_named_optimizer() -> tuple[Any, Any]:
    """Optimizers whose state is by name, nested as FSDP has it and flat."""
    model, optimizer = trained()
    state = {f"{i}": each for i, each in optimizer.state_dict()["state"].items()}
    flat = {f"state.{i}.{n}": t for i, each in state.items() for n, t in each.items()}
    nested = {"state": state, "param_groups": [{"lr": 0.1}]}
    return model, {
        "model": model.state_dict(),
        "optimizer": nested,
        "optim": {**flat, "param_groups.0.lr": 0.1},
        "rng": {"python": [1, 2]},
    }


TRAINERS: Mapping[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "Lightning": (of_lightning, ""),
    "ImageNet": (of_imagenet, "module."),
    "named optimizers": (of_named_optimizer, ""),
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_weights_are_found(tmp_path: Path, trainer: str, is_zip: bool) -> None:
    make, prefix = TRAINERS[trainer]
    model, saved = make()
    path = tmp_path / "last.ckpt"
    torch.save(saved, path, _use_new_zipfile_serialization=is_zip)
    torch.load(path, weights_only=True)
    expected = {prefix + name: value for name, value in model.state_dict().items()}
    assert set(open_checkpoint(path)) == set(expected)
    check(path, expected)


def test_several_models_need_a_key(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = {"netG": model.state_dict(), "netD": model.state_dict(), "best": torch.ones(1)}
    saved |= {"optim": {"state": {"a": torch.ones(3)}, "param_groups": []}}
    torch.save(saved, tmp_path / "gan.pt")
    with pytest.raises(HeaderError, match=r"open_checkpoint\(path, key='net.'\)") as raised:
        open_checkpoint(tmp_path / "gan.pt")
    assert "netG" in str(raised.value.found) and "netD" in str(raised.value.found)
    assert "optim" not in str(raised.value.found)
    check(open_checkpoint(tmp_path / "gan.pt", key="optim.state"), {"a": torch.ones(3)})
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    with pytest.raises(HeaderError, match="holds no tensors by name"):
        open_checkpoint(tmp_path / "adam.pt")


# --- TorchScript ----------------------------------------------------------------------------------


class Scripted(torch.nn.Module):  # type: ignore[name-defined, misc]
    """Shared modules, lists, buffers, and tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(4), self.first])
        self.conv = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1, bias=False), torch.nn.ReLU())
        self.list = torch.nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.attention = torch.nn.TransformerEncoderLayer(4, 2, 8)
        self.register_buffer("kept", torch.arange(4).reshape(2, 2).t())
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.plain = torch.ones(3)
        self.several = [torch.ones(2)]
        self.named = {"a": torch.ones(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.plain.sum() + self.several[0].sum() + self.named["a"].sum()


def _scripted(module: Any = None) -> bytes:
    out = io.BytesIO()
    torch.jit.save(torch.jit.script(module or Scripted()), out)
    return out.getvalue()


def _changed(data: bytes, name: str, change: Callable[[bytes], bytes | None]) -> bytes:
    """An archive whose entries of this name are changed, or left out for None."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as read, zipfile.ZipFile(out, "w") as made:
        for entry in read.infolist():
            raw: bytes | None = read.read(entry)
            if re.fullmatch(name, entry.filename):
                raw = change(raw or b"")
            if raw is not None:
                made.writestr(entry.filename, raw, entry.compress_type)
    return out.getvalue()


def test_parameters_of_a_script(tmp_path: Path) -> None:
    for name in ("model.pt", "model.jit"):
        path = tmp_path / name
        path.write_bytes(_scripted())
        expected = torch.jit.load(path).state_dict()
        assert set(open_checkpoint(path)) == set(expected)
        check(path, expected)


def test_a_trace(tmp_path: Path) -> None:
    """Traced modules have names as well."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
    torch.jit.save(torch.jit.trace(model, torch.ones(2, 3)), tmp_path / "model.pt")
    check(tmp_path / "model.pt", model.state_dict())


def _module(state: bytes, name: bytes = b"N") -> bytes:
    return b"c__torch__\n" + name + b"\n)\x81" + state + b"b"


def _by_hand(pickle: bytes, code: str = "") -> bytes:
    """An archive of a module N with a parameter w and its code."""
    listed = code or 'class N(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = []\n'
    data = _changed(archive(pickle_of(pickle)), "no entry", lambda raw: raw)
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as made:
        made.writestr("archive/constants.pkl", pickle_of(b")"))
        made.writestr("archive/code/__torch__.py", listed, zipfile.ZIP_DEFLATED)
    return out.getvalue()


_W = b"}" + text("w") + tensor() + b"s"
_REFUSED = "does not list its parameters"


def _twice(depth: int) -> bytes:
    """Modules that hold the one before twice: 2**depth ways."""
    body = _module(_W) + b"q\0"
    for _ in range(depth):
        body = _module(b"}(" + text("a") + body + text("b") + b"h\0u") + b"q\0"
    return body


#: By name: the file, and what the error says.
SCRIPTS: Mapping[str, tuple[bytes, str]] = {
    "no code": (_changed(_by_hand(_module(_W)), ".*py", lambda raw: None), _REFUSED),
    "code without classes": (_by_hand(_module(_W), "import os\n"), _REFUSED),
    "another class": (_by_hand(_module(_W, b"O")), _REFUSED),
    "a dict": (_by_hand(_W), _REFUSED),
    "a module without state": (_by_hand(b"c__torch__\nN\n)\x81"), _REFUSED),
    "a state that is a list": (_by_hand(_module(b"]")), _REFUSED),
    "a module's state that is a tuple": (
        _by_hand(_module(b"}(" + text("a") + _module(b")") + text("w") + tensor() + b"u")),
        _REFUSED,
    ),
    "an argument of a class": (_by_hand(b"c__torch__\nN\nN\x85\x81"), "NEWOBJ at byte"),
    "a module of modules of it": (_by_hand(_twice(40)), _REFUSED),
    "itself": (_by_hand(b"c__torch__\nN\n)\x81q\0}" + text("a" * 99) + b"h\0sb"), _REFUSED),
    "long names of many modules": (
        _by_hand(
            _module(
                b"}"
                + text("k" * 10**6)
                + _module(b"}(" + b"".join(text(str(i)) + _module(_W) for i in range(2000)) + b"u")
                + b"s"
            )
        ),
        _REFUSED,
    ),
    "no parameters": (_by_hand(_module(b"}")), "holds no tensors by name"),
    "a tensor that is no parameter": (
        _by_hand(_module(b"}" + text("v") + tensor() + b"s")),
        "holds no tensors by name",
    ),
    "a call": (_by_hand(_module(b"cos\nsystem\n)R")), "names os.system"),
    "a class outside": (_by_hand(b"ctorch.nn\nLinear\n)\x81"), "names torch.nn.Linear"),
    "a prefix of the package": (_by_hand(b"c__torch__x\nN\n)\x81"), "names __torch__x.N"),
    "code that grows": (_by_hand(_module(_W), "#" * 2**25), _REFUSED),
    "good": (_by_hand(_module(_W)), ""),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_hostile_scripts(tmp_path: Path, name: str) -> None:
    """What is not listed is refused as before, in little memory."""
    data, problem = SCRIPTS[name]
    (path := tmp_path / "model.pt").write_bytes(data)
    if not problem:
        assert [*open_checkpoint(path)] == ["w"]
        return
    # as many names and as much code as an archive may have
    most_nbytes = {"code that grows": 2**26, "a module of modules of it": 2**23, "itself": 2**25}
    most_nbytes["long names of many modules"] = 2**25
    with little_memory(most_nbytes.get(name, 2**22)), pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert problem in raised.value.problem
    assert len(str(raised.value)) < 2000


@settings(max_examples=few(900), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutated((_by_hand(_module(_W)), _by_hand(_twice(3)))), cut=st.booleans())
def test_mutated_scripts(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: bool) -> None:
    """Nothing but our errors comes out, and what opens can be read."""
    path = tmp_path_factory.getbasetemp() / "script.pt"
    path.write_bytes(data[:-1] if cut else data)
    open_hostile(path)


class Settings(dict[str, Any]):
    """A class of the trainer's own code, as hyper-parameters have them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.more = given


def test_settings_of_foreign_classes_are_not_called(tmp_path: Path) -> None:
    """Objects beside the weights are placeholders; one among the weights is refused by name."""
    model, saved = of_lightning()
    odd = {
        "args": argparse.Namespace(lr=1e-3, path=Path("a")),
        "settings": Settings(lr=1e-3),
        "score": np.float64(0.5),
        "array": np.zeros(3),
        "activation": torch.nn.ReLU,
        "names": defaultdict(list, {"a": [1]}),
    }
    for protocol in (2, 4):
        torch.save(
            {**saved, "hyper_parameters": odd, **odd}, tmp_path / "m.ckpt", pickle_protocol=protocol
        )
        check(tmp_path / "m.ckpt", model.state_dict())
    torch.save({**model.state_dict(), "config": Settings(lr=1)}, tmp_path / "flat.ckpt")
    with pytest.raises(HeaderError, match=r"names .*Settings, which is never called") as raised:
        open_checkpoint(tmp_path / "flat.ckpt")
    assert raised.value.tensor == "config"


def test_one_ranks_part_is_no_checkpoint(tmp_path: Path) -> None:
    """Files of ZeRO-3 and of Meta's tensor parallelism are refused, with what to take instead."""
    model, _ = trained()
    state = model.state_dict()
    shapes = [{name: tensor.shape for name, tensor in state.items()}]
    parts = {name: torch.empty(0) for name in state}
    zero = tmp_path / "zero"
    zero.mkdir()
    torch.save({"module": parts, "param_shapes": shapes}, zero / "zero_pp_rank_0_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, zero / "bf16_zero_pp_rank_0_optim_states.pt")
    for path in (zero, zero / "zero_pp_rank_0_model_states.pt"):
        with pytest.raises(HeaderError, match=r"ZeRO-3.*zero_to_fp32\.py"):
            open_checkpoint(path)
    torch.save({"module": state, "param_shapes": shapes}, zero / "zero_pp_rank_0_model_states.pt")
    assert {*open_checkpoint(zero).tensors} == {*state}

    for rank in range(2):
        torch.save(
            {"wq": torch.ones(2, 4), "norm": torch.ones(4)}, tmp_path / f"consolidated.0{rank}.pth"
        )
    for path in (tmp_path, tmp_path / "consolidated.00.pth", tmp_path / "consolidated.01.pth"):
        with pytest.raises(HeaderError, match=r"one rank's part.*Hugging Face's form"):
            open_checkpoint(path)
    (tmp_path / "consolidated.01.pth").unlink()
    assert {*open_checkpoint(tmp_path).tensors} == {"wq", "norm"}
