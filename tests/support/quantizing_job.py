"""A process that quantises a checkpoint of 16 bits on the way into a model of transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from streamload.bench.processes import proc_nbytes

#: What each way quantises to, and whose load it is.
WAYS = {
    "transformers, nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "transformers, int8": {"load_in_8bit": True},
    "streamload, int8": {"load_in_8bit": True},
}


def load(path: str, way: str) -> Callable[[], dict[str, Any]]:
    import torch
    import transformers

    from streamload.transformers import from_pretrained

    torch.set_num_threads(2)

    def lap() -> dict[str, Any]:
        options: dict[str, Any] = {}
        if way in WAYS:
            config = transformers.BitsAndBytesConfig(**WAYS[way])
            options["quantization_config"] = config
        else:
            options["quant"] = way.removeprefix("quant, ")
        if way.startswith("transformers"):
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
        else:
            model = from_pretrained(path, device="cpu", progress=False, **options)
        gc.collect()
        held = proc_nbytes("/proc/self/status")
        report = getattr(model, "streamload_report", None)
        return {
            "rss_peak_nbytes": held["VmHWM"],
            "anon_nbytes": held["RssAnon"],
            "resident_nbytes": report.resident_nbytes if report else 0,
        }

    return lap
