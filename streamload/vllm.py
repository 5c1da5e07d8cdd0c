"""vLLM's load format "streamload": ``vllm serve PATH --load-format streamload``.

vLLM calls `register` in each of its processes (entry point ``vllm.general_plugins``). It reads
config.json and the tokenizer from a folder: those of any other PATH, such as a GGUF file or a URL,
are first written to vLLM's cache. Tried with vLLM 0.32 on the CPU.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.model_loader import (
    BaseModelLoader,
    DefaultModelLoader,
    register_model_loader,
)

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.conversion.companions import CONFIG, content_of, files_beside
from streamload.conversion.disk import writing_to
from streamload.core.location import Url, is_url, without_secrets
from streamload.errors import CheckpointError
from streamload.files.folder import locate
from streamload.files.hub import revised
from streamload.files.page_cache import MARGIN_NBYTES, free_host_nbytes
from streamload.loading.iterate import iterate

_FORMAT = "streamload"
_OPENING = frozenset({"key", "variant"})  # options of `open_checkpoint`
# vLLM itself quantizes, and JSON has no functions
_KNOWN = _OPENING | inspect.signature(iterate).parameters.keys() - {"path", "quant", "transform"}
#: Key that `_localize` adds to the extra config: the location of the weights by model folder.
_LOCATIONS = "locations"

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)  # of the hub

_logger = init_logger(f"vllm.{_FORMAT}")  # vLLM shows only loggers of its own


@functools.cache
def register() -> None:
    """Add the load format to vLLM, and accept any location of a checkpoint as PATH."""
    register_model_loader(_FORMAT)(StreamloadModelLoader)
    for name in ("create_engine_config", "create_model_config"):
        setattr(EngineArgs, name, _localized(getattr(EngineArgs, name)))


class StreamloadModelLoader(BaseModelLoader):
    """Streams a checkpoint tensor by tensor into a model that vLLM has built.

    ``--model-loader-extra-config`` takes options of `streamload.iterate` and
    `streamload.open_checkpoint` as JSON: ``{"reader": "pread"}``.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        """Read the options; raises ValueError for an unknown one."""
        super().__init__(load_config)
        self._options = dict(load_config.model_loader_extra_config)
        self._locations: Mapping[str, str] = self._options.pop(_LOCATIONS, {})
        if unknown := sorted(self._options.keys() - _KNOWN):
            raise ValueError(
                f"unknown in --model-loader-extra-config: {', '.join(unknown)}; "
                f"known: {', '.join(sorted(_KNOWN))}"
            )

    def download_model(self, model_config: ModelConfig) -> None:
        """Check that the checkpoint can be opened; no weights are read."""
        self._open(model_config)

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill the parameters of a model; raises ValueError if the checkpoint lacks some."""
        start = time.perf_counter()
        loaded = model.load_weights(self._weights(model, model_config))
        _logger.info("Streaming weights took %.2f seconds", time.perf_counter() - start)
        if loaded is not None and model_config.quantization is None:
            DefaultModelLoader(LoadConfig()).track_weights_loading(model, loaded)

    def _open(self, model_config: ModelConfig) -> Checkpoint:
        location = self._locations.get(model_config.model, model_config.model)
        return _opened(revised(location, model_config.revision), self._options)

    def _weights(self, model: Any, model_config: ModelConfig) -> Iterator[tuple[str, Any]]:
        checkpoint, parameters = self._open(model_config), list(model.parameters())
        device = next((str(each.device) for each in parameters if each.is_cuda), "cpu")
        # vLLM casts floats, and reads quantized weights as they are stored, GGUF's blocks excepted
        dtype = str(model_config.dtype).removeprefix("torch.")
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype if checkpoint.stored else "checkpoint",
            "page_cache": _page_cache(checkpoint, parameters if device == "cpu" else []),
            "fetch": "stream",
        }
        options |= {name: value for name, value in self._options.items() if name not in _OPENING}
        shown = {name: without_secrets(str(value)) for name, value in options.items()}
        _logger.info("Streaming %s by %s", checkpoint.path, shown)
        return iterate(checkpoint, **options)


def _page_cache(checkpoint: Checkpoint, to_fill: list[Any]) -> str:
    """Return "drop" if memory is short for both the page cache and the parameters."""
    # "auto" of `iterate` counts only the tensors that it reads together
    free = free_host_nbytes()
    needed = checkpoint.nbytes + sum(each.nbytes for each in to_fill) + MARGIN_NBYTES
    return "drop" if free is not None and free < needed else "auto"


def _opened(location: str | os.PathLike[str], options: Mapping[str, Any]) -> Checkpoint:
    return open_checkpoint(location, **{k: v for k, v in options.items() if k in _OPENING})


def _localized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of EngineArgs that calls `_localize` first if the format is streamload's."""

    @functools.wraps(function)
    def entrance(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if self.load_format == _FORMAT:
            _localize(self)
        return function(self, *args, **kwargs)

    return entrance


def _localize(args: EngineArgs) -> None:
    """Replace PATH by a folder with config.json and tokenizer, unless vLLM can read PATH itself.

    vLLM reads folders with config.json, and repositories of the hub.
    """
    given, extra = str(args.model), args.model_loader_extra_config
    if given in extra.get(_LOCATIONS, ()) or os.path.isfile(os.path.join(given, CONFIG)):
        return
    if _REPOSITORY.fullmatch(given) and not os.path.exists(given):
        return
    found = locate(revised(given, args.revision)).found  # of the hub at a commit
    checkpoint = _opened(found, extra)
    files = {name: content_of(file) for name, file in files_beside(checkpoint)[0].items()}
    if CONFIG in files:
        files[CONFIG] = _untied(checkpoint, files[CONFIG])
    elif args.hf_config_path is None:
        raise CheckpointError(
            found,
            "vLLM needs a configuration",
            f"{CONFIG} beside it, or --hf-config-path FOLDER --tokenizer FOLDER",
            "neither",
        )
    location = found.href if isinstance(found, Url) else os.path.abspath(found)
    args.model = str(_kept(location, files))
    shown = str(Url.parse(given)) if is_url(given) else given
    args.served_model_name = args.served_model_name or [shown]
    args.model_loader_extra_config = {**extra, _LOCATIONS: {args.model: location}}


def _untied(checkpoint: Checkpoint, config: bytes) -> bytes:
    """Return config.json that unties a stored head, which vLLM would leave out.

    Source: ``maybe_untie_word_embeddings`` in vllm/config/model.py, which reads local files alone.
    """
    if not any(name.endswith("lm_head.weight") for name in checkpoint.tensors):
        return config
    document = json.loads(config)
    for section in (document, document.get("text_config")):
        if isinstance(section, dict):
            section["tie_word_embeddings"] = False
    return json.dumps(document, indent=2).encode()


def _kept(location: str, files: Mapping[str, bytes]) -> Path:
    """Return a folder of these files: always the same, as keys of vLLM's caches hold its path."""
    digest = hashlib.sha256(location.encode())
    for name, data in sorted(files.items()):
        digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
    folder = Path(envs.VLLM_ASSETS_CACHE, _FORMAT, digest.hexdigest()[:16])
    with writing_to(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as above:
            made = Path(above, folder.name)
            made.mkdir()
            for name, data in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_bytes(data)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else an earlier process made it
                    raise
    return folder
