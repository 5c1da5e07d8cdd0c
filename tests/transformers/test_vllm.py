"""vLLM's load format "streamload": the same tokens from any location, and less memory.

Stand-ins of vLLM's classes take its place where it is not installed; the tests marked slow need it,
and streamload installed beside it (``pip install -e .``), not in a venv with torchvision.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import needs
import pytest
import range_server
from boxes import Boxes
from gguf_models import write_model
from hub_server import COMMIT, LATER, Hub, hub, serve_hub
from make_checkpoint import make_checkpoint, shape_of_size

import streamload
from streamload.core.dtypes import parse_dtype
from streamload.errors import CheckpointError

torch = needs.module("torch")
needs.module("httpx2")

__all__ = ["hub"]

JOB = Path(__file__).parents[1] / "support" / "vllm_job.py"
MODULES = ("config", "config.load", "engine", "engine.arg_utils", "envs", "logger")
LOADER = "model_executor.model_loader"


def llama(folder: Path, **changes: Any) -> Path:
    """A model; vLLM's kernels for other heads want AMX where the CPU names it."""
    folder.mkdir()
    changes = {"head_dim": 80, "architectures": ["LlamaForCausalLM"]} | changes
    return write_model(folder, "llama", **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def gguf(source: Path, out: Path) -> Path:
    streamload.convert(source, out, to="gguf", quant="q8_0")
    return out / "model.gguf"


# --- stand-ins ------------------------------------------------------------------------------------


@dataclass
class EngineArgs:
    """As much of vLLM's as the plugin looks at."""

    model: str
    load_format: str = "streamload"
    revision: str | None = None
    served_model_name: Any = None
    hf_config_path: str | None = None
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)

    def create_engine_config(self) -> Any:
        return self.create_model_config()

    def create_model_config(self) -> Any:
        names = {"model": self.model, "revision": self.revision, "quantization": None}
        return types.SimpleNamespace(**names, dtype=torch.bfloat16)


class BaseModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    """Raises, as vLLM's does, for parameters that were not loaded."""

    def track_weights_loading(self, model: Any, loaded: set[str]) -> None:
        if lacking := dict(model.named_parameters()).keys() - loaded:
            raise ValueError(f"not initialized: {lacking}")


class Model(torch.nn.Module):
    """Parameters of some names; notes the most tensors that were alive at once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = {name.replace(".", "_"): name for name in shapes}
        for name, shape in shapes.items():
            empty = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(empty))

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            with torch.no_grad():
                self.get_parameter(name.replace(".", "_")).copy_(tensor)
            loaded.add(name.replace(".", "_"))
        return loaded

    def tensors(self) -> dict[str, Any]:
        return {name: self.get_parameter(own).detach() for own, name in self.names.items()}


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """Stand-ins for vLLM, in which the plugin has registered; the load formats by name."""
    made = {name: types.ModuleType(f"vllm.{name}") for name in (*MODULES, LOADER)}
    made["model_executor"] = types.ModuleType("vllm.model_executor")
    found: dict[str, type] = {}
    made["config"].ModelConfig = types.SimpleNamespace
    made["config.load"].LoadConfig = types.SimpleNamespace
    args = type("EngineArgs", (EngineArgs,), {})  # register() changes its methods
    made["engine.arg_utils"].EngineArgs = args
    made["envs"].VLLM_ASSETS_CACHE = str(tmp_path / "assets")
    made["logger"].init_logger = importlib.import_module("logging").getLogger
    made[LOADER].BaseModelLoader = BaseModelLoader
    made[LOADER].DefaultModelLoader = DefaultModelLoader
    made[LOADER].register_model_loader = lambda name: lambda kind: found.setdefault(name, kind)
    monkeypatch.setitem(sys.modules, "vllm", vllm := types.ModuleType("vllm"))
    vllm.envs = made["envs"]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.delitem(sys.modules, "streamload.vllm", raising=False)
    plugin = importlib.import_module("streamload.vllm")
    plugin.register()
    plugin.register()
    assert set(found) == {"streamload"}
    yield {**found, "args": args}
    sys.modules.pop("streamload.vllm", None)


def loaded(
    loaders: dict[str, type],
    path: Path | str,
    revision: str | None = None,
    like: Path | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load into a model like a folder's, as vLLM does; returns the engine's arguments and it."""
    args = loaders["args"](str(path), revision=revision, model_loader_extra_config=options)
    config = args.create_engine_config()
    given = types.SimpleNamespace(model_loader_extra_config=args.model_loader_extra_config)
    loader = loaders["streamload"](given)
    loader.download_model(config)
    source = streamload.iterate(like or path, device="cpu", dtype="bfloat16")
    model = Model({name: tensor.shape for name, tensor in source})
    loader.load_weights(model, config)
    return args, model


def test_every_tensor_arrives(loaders: dict[str, type], tmp_path: Path) -> None:
    """A folder that vLLM reads stays as it is; each parameter has the bits of the checkpoint."""
    folder = llama(tmp_path / "m")
    args, model = loaded(loaders, folder)
    assert (args.model, args.served_model_name) == (str(folder), None)
    for name, tensor in streamload.iterate(folder, device="cpu", dtype="checkpoint"):
        assert torch.equal(model.tensors()[name], tensor), name


def test_a_gguf_file_gets_a_folder(loaders: dict[str, type], tmp_path: Path) -> None:
    """Its own configuration and tokenizer are written, and its blocks become the model's dtype."""
    path = gguf(llama(tmp_path / "m"), tmp_path / "g")
    args, model = loaded(loaders, path)
    folder = Path(args.model)
    assert folder.parent == tmp_path / "assets" / "streamload"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {each.name for each in folder.iterdir()} == names
    assert args.served_model_name == [str(path)]
    for name, tensor in streamload.iterate(path, device="cpu", dtype="bfloat16"):
        assert torch.equal(model.tensors()[name], tensor), name
    again, _ = loaded(loaders, path)
    assert again.model == args.model and len(list(folder.parent.iterdir())) == 1


def test_a_url_gets_a_folder(loaders: dict[str, type], tmp_path: Path) -> None:
    source = llama(tmp_path / "m", tie_word_embeddings=True)
    folder = llama(tmp_path / "n")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    served = range_server.start(tmp_path, ("127.0.0.1", 0))
    try:
        args, model = loaded(loaders, f"{served.url}n/")
        expected = dict(streamload.iterate(folder, device="cpu", dtype="checkpoint"))
    finally:
        served.close()
    assert json.loads(Path(args.model, "config.json").read_text())["tie_word_embeddings"] is False
    assert all(torch.equal(model.tensors()[name], one) for name, one in expected.items())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("path", "revision"),
    [
        *(("hf://me/tiny", COMMIT), ("hf://me/tiny", "old"), (f"hf://me/tiny@{COMMIT}", LATER)),
        *((f"me/tiny@{COMMIT}", None), ("me/tiny", "old")),
    ],
)
def test_a_repository_at_its_revision(
    loaders: dict[str, type], hub: Hub, tmp_path: Path, path: str, revision: str, cached: bool
) -> None:
    """Its configuration, tokenizer and weights are of one commit; no file is downloaded."""
    huggingface_hub = needs.module("huggingface_hub")
    folder, other = llama(tmp_path / "m"), llama(tmp_path / "n", vocab_size=96)
    for commit, each in ((COMMIT, folder), (LATER, other)):
        hub.add("me/tiny", files_of(each), commit)
    hub.repos["me/tiny"].refs["old"] = COMMIT
    for name in ("config.json", "model.safetensors") if cached else ():
        huggingface_hub.hf_hub_download("me/tiny", name, revision=COMMIT)
    before = set((tmp_path / "home").rglob("*"))
    args, model = loaded(loaders, path, revision, folder)
    for name, tensor in streamload.iterate(folder, device="cpu", dtype="checkpoint"):
        assert torch.equal(model.tensors()[name], tensor), name
    assert set((tmp_path / "home").rglob("*")) == before
    if path == "me/tiny":  # vLLM itself reads the rest
        assert (args.model, args.served_model_name) == (path, None)
        return
    made = Path(args.model)
    names = {each.name for each in folder.iterdir()} - {"model.safetensors"}
    assert {each.name for each in made.iterdir()} == names >= {"tokenizer.json"}
    sizes = [
        json.loads((each / "config.json").read_text())["vocab_size"] for each in (folder, made)
    ]
    assert sizes[0] == sizes[1] != 96
    assert args.served_model_name == [path]
    (location,) = args.model_loader_extra_config["locations"].values()
    assert COMMIT in location


def test_what_is_shown(
    loaders: dict[str, type], tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """The name is the text that was given; no user, password and query is in it or in a log."""
    llama(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    (gguf(tmp_path / "m", tmp_path / "g")).rename("model.gguf")
    args, _ = loaded(loaders, "model.gguf")
    assert args.served_model_name == ["model.gguf"]
    lora = "https://me:se-cret@host/lora/"
    served = range_server.start(tmp_path, ("127.0.0.1", 0))
    caplog.set_level("INFO")
    try:
        with pytest.raises(CheckpointError):
            loaded(loaders, f"{served.url}m/?signature=se-cret", adapters=[lora, [f"{lora}?x", 2]])
        args = loaders["args"](f"{served.url}m/?signature=se-cret")
        args.create_model_config()
    finally:
        served.close()
    assert args.served_model_name == [f"{served.url}m/?..."]
    assert "Streaming http" in caplog.text and "se-cret" not in caplog.text


def test_processes_that_start_together(loaders: dict[str, type], tmp_path: Path) -> None:
    """API servers that write the folder at the same time all get it, whole."""
    path = gguf(llama(tmp_path / "m"), tmp_path / "g")
    made = [loaders["args"](str(path)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda args: args.create_model_config(), made))
    (folder,) = {Path(args.model) for args in made}
    assert list(folder.parent.iterdir()) == [folder] and len(list(folder.iterdir())) == 3


def test_what_is_left_to_vllm(loaders: dict[str, type], tmp_path: Path) -> None:
    """Repositories of the hub, and other load formats, are vLLM's to find."""
    for name, load_format in (("org/name", "streamload"), (str(tmp_path / "no.gguf"), "auto")):
        args = loaders["args"](name, load_format=load_format)
        args.create_engine_config()
        assert (args.model, args.model_loader_extra_config) == (name, {})


def test_errors(loaders: dict[str, type], tmp_path: Path) -> None:
    """Nothing there, no configuration, an unknown option, a parameter without a tensor."""
    with pytest.raises(CheckpointError, match=r"no\.gguf"):
        loaders["args"](str(tmp_path / "no.gguf")).create_engine_config()
    folder = llama(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"needs a configuration.*--hf-config-path"):
        loaders["args"](str(folder)).create_engine_config()
    assert not (tmp_path / "assets").exists()
    args = loaders["args"](str(folder), hf_config_path="elsewhere")
    args.create_engine_config()
    assert args.model_loader_extra_config == {"locations": {args.model: str(folder)}}
    given = types.SimpleNamespace(model_loader_extra_config={"quant": "nf4", "reader": "pread"})
    with pytest.raises(ValueError, match=r"unknown in .*: quant; known: adapters, .*reader"):
        loaders["streamload"](given)
    given = types.SimpleNamespace(model_loader_extra_config=args.model_loader_extra_config)
    shapes = {n: t.shape for n, t in streamload.iterate(folder, device="cpu", dtype="checkpoint")}
    with pytest.raises(ValueError, match=r"not initialized: .'other'"):
        loaders["streamload"](given).load_weights(
            Model(shapes | {"other": (2,)}), args.create_model_config()
        )


def test_streamload_does_not_import_vllm() -> None:
    code = "import streamload, sys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- vLLM itself ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm() -> None:
    needs.module("vllm", needed=False)
    if "streamload" not in {each.name for each in entry_points(group="vllm.general_plugins")}:
        pytest.skip("streamload is not installed beside vllm")


def environment_of(tmp_path: Path, hub: Hub | None = None) -> dict[str, str]:
    """With a cache of its own, and a network: offline, vLLM takes URLs for repositories."""
    found = dict(os.environ) if hub is None else hub.environment(tmp_path / "home")
    return found | {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}


def job(tmp_path: Path, *arguments: object, hub: Hub | None = None) -> list[Any]:
    environment = environment_of(tmp_path, hub)
    argv = [sys.executable, str(JOB), *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_tokens_of_the_default_loader(tmp_path: Path) -> None:
    """A folder, a file, a URL and a repository give its tokens, and so does a GGUF file."""
    folder = llama(tmp_path / "m")
    path = gguf(folder, tmp_path / "g")
    streamload.convert(path, tmp_path / "plain", dtype="bfloat16")
    other = llama(tmp_path / "n", hidden_size=64)
    served = range_server.start(tmp_path, ("127.0.0.1", 0))
    try:
        url, name = f"{served.url}m/", "hf://me/tiny"
        ours = [str(each) for each in (folder, folder / "model.safetensors", url)]
        cases = [("auto", str(folder)), *(("streamload", each) for each in ours)]
        cases += [("streamload", name, COMMIT), ("auto", str(tmp_path / "plain"))]
        # vLLM's CPU engine does not start again in a process that has compiled a decoder
        cases.append(("streamload", f"{served.url}g/model.gguf"))
        with serve_hub() as hub:
            for commit, each in ((COMMIT, folder), (LATER, other)):
                hub.add(
                    "me/tiny", {file.name: file.read_bytes() for file in each.iterdir()}, commit
                )
            *found, plain, of_gguf = job(tmp_path, "tokens", json.dumps(cases), hub=hub)
    finally:
        served.close()
    assert len(found) == 5 and all(each[:3] == found[0][:3] for each in found)
    assert [each[3] for each in found[2:]] == [str(folder / "model.safetensors"), url, name]
    assert of_gguf[:3] == plain[:3] and plain[1] != found[0][1]


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_vllm_serve(tmp_path: Path) -> None:
    """``vllm serve PATH --load-format streamload``, with the engine in a process of its own."""
    path = gguf(llama(tmp_path / "m"), tmp_path / "g")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, str(JOB), "serve", str(path)]
    argv += ["--load-format", "streamload", "--dtype", "bfloat16", "--enforce-eager"]
    argv += ["--max-model-len", "32", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--model-loader-extra-config", '{"reader": "pread"}']
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log, env=environment_of(tmp_path))
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 400
            while server.poll() is None and time.monotonic() < until:
                with suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                time.sleep(1)
            asked = {"model": str(path), "prompt": [5, 9, 20, 33], "max_tokens": 12}
            body = json.dumps(asked | {"temperature": 0, "ignore_eos": True}).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["text"]
        except OSError as error:
            pytest.fail(f"{error}: {(tmp_path / 'log').read_text()[-3000:]}")
        finally:
            server.terminate()
            server.wait(60)
    ((_, _, expected, _),) = job(tmp_path, "tokens", json.dumps([("streamload", str(path))]))
    assert text == expected
    assert "'reader': 'pread'" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_memory_in_a_limited_pod(tmp_path: Path, cgroup: Boxes) -> None:
    """Where file and model do not fit together, nothing of the file stays in the page cache."""
    folder = tmp_path / "m"
    make_checkpoint(folder, shape_of_size(600_000_000, parse_dtype("bfloat16")), dtype="bfloat16")
    os.sync()
    found = {}
    for load_format in ("auto", "streamload"):
        argv = [sys.executable, str(JOB), "memory", load_format, str(folder)]
        done = cgroup.run(argv, 1_700_000_000)
        assert done.outcome == "done", done.stderr[-3000:]
        found[load_format] = done.said
    beyond_nbytes, cold, cached = found["streamload"]
    assert cold == 0 and beyond_nbytes < 150_000_000 and cached < 0.02, found
    assert found["auto"][2] > 0.9, found
