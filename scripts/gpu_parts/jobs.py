"""Processes of ``scripts/gpu``: checkpoints, what plain torch computes of them, and the rows.

Each function returns a function of laps (`streamload.bench.processes.call`). A lap runs a step and
returns figures of it. ``{"end": True}`` is the last.
"""

from __future__ import annotations

import faulthandler
import gc
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

Steps = Iterator[dict[str, Any]]
Lap = Callable[[], dict[str, Any]]

#: Of quantized weights, how many times as far from float32 of the same weights as plain torch in
#: bfloat16: logits, whose errors grow from layer to layer, and each row of each layer's product.
#: `tests/house/test_gpu.py` shows that they tell a wrong scale or row.
LOGITS_TIMES, ROWS_TIMES = 2.0, 3.0
_IMAGE_TOLERANCE = 0.05  # |found - expected| / |expected - its mean|: convolutions may differ
PASSES = 5
_IDLE_S = 3.0
_TOKENS = 8  # generated
_PROMPT = 16  # tokens, where a pass has more than one
_GAP = 0.25  # of the logits' deviation, that a generated token may be below the most likely


def laps(steps: Steps, trace: str = "") -> Lap:
    """Return a function that runs the next step.

    With ``trace``, a file for errors and crashes, the first step is taken at once: the imports.
    """

    def lap() -> dict[str, Any]:
        try:
            return next(steps, {"end": True})
        except BaseException:
            if trace:
                Path(trace).write_text(traceback.format_exc())
            raise

    if trace:
        faulthandler.enable(open(trace, "w"))  # noqa: SIM115  (until the process ends)
        lap()
    return lap


# --- checkpoints ----------------------------------------------------------------------------------


def write_llamas(folder: str, nbytes: int, shards: list[int]) -> Lap:
    """Write a Llama as so many files each; 0 bytes: Llama-3-8B's shape."""

    def steps() -> Steps:
        from make_checkpoint import PRESETS, make_checkpoint, shape_of_size

        from streamload.core.dtypes import BF16

        shape = PRESETS["llama-3-8b"]
        if nbytes:
            shape = replace(shape_of_size(nbytes, BF16), kv_heads=2)  # two ranks divide them
        for count in shards:
            out = Path(folder, f"llama-{count}")
            make_checkpoint(out, shape, shards=count)
            yield {"made": str(out)}

    return laps(steps())


def write_nf4(folder: str, shards: list[int]) -> Lap:
    """Convert the Llamas to nf4, as about so many files each."""

    def steps() -> Steps:
        from streamload import convert

        warnings.simplefilter("ignore")
        for count in shards:
            path, out = (Path(folder, f"{name}-{count}") for name in ("llama", "llama-nf4"))
            nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            # a third of the bytes is left, most of them the embedding's and the head's
            most: Any = "1TB" if count == 1 else nbytes // (3 * count)
            convert(path, out, quant="nf4", max_shard_size=most, progress=False)
            yield {"made": str(out)}

    return laps(steps())


def write_others(folder: str, nbytes: int, scale: float, shards: list[int]) -> Lap:
    """Write a mixture of experts and a pipeline of diffusers, as so many files each.

    ``nbytes`` of the mixture, or 0: a tiny one. ``scale`` of the pipeline, as of Flux.
    """

    def steps() -> Steps:
        import importlib.util

        from bench_parts.diffusers_jobs import write
        from bench_parts.offload_jobs import write_mixture

        tiny = {"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 64}
        tiny |= {"num_hidden_layers": 3, "head_dim": 32, "num_attention_heads": 4}
        tiny |= {"num_experts": 8, "num_experts_per_tok": 2}
        for count in shards:
            out = Path(folder, f"mixture-{count}")
            write_mixture(out, nbytes, count, **({} if nbytes else tiny))
            yield {"made": str(out)}
        for count in shards if importlib.util.find_spec("diffusers") else ():
            out = Path(folder, f"pipeline-{count}")
            write(out, scale, lambda text: None, count)
            yield {"made": str(out)}

    return laps(steps())


# --- what plain torch computes --------------------------------------------------------------------


def ids_of(vocabulary: int, count: int, device: str) -> Any:
    """Return tokens of shape (1, count), the same for each count."""
    import torch

    made = torch.Generator().manual_seed(count)
    return torch.randint(0, vocabulary, (1, count), generator=made).to(device)


def logits_of(model: Any, ids: Any) -> Any:
    """Return the logits of a pass without a cache."""
    import torch

    with torch.no_grad():
        return model(ids, use_cache=False).logits


def _generated(model: Any, ids: Any) -> Any:
    import torch

    given = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False}
    given |= {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **given)


def _prompt(count: int) -> int:
    return min(count, _PROMPT)


def _plain(path: str, device: str, dtype: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a model of transformers with the files' tensors, each through ``change``."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt", device=device) as reader:
            for name in reader.keys():  # noqa: SIM118  (it is no dict)
                state[name] = change(name, reader.get_tensor(name)).to(dtype)
    model.load_state_dict(state, assign=True, strict=True)
    return _with_frequencies(model.eval(), device)


def _with_frequencies(model: Any, device: str) -> Any:
    """Compute a model's frequencies by the CPU, in float32: they are in no file."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model


def _as_stored(name: str, weight: Any) -> Any:
    return weight


def _is_quantized(name: str, weight: Any) -> bool:
    return weight.ndim == 2 and ".layers." in name


def nf4(name: str, weight: Any) -> Any:
    """Return the weight of a layer as nf4 has it: 16 quantiles of the normal, blocks of 64."""
    import torch

    if not _is_quantized(name, weight):
        return weight
    table = torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        device=weight.device,
    )  # QLoRA (arXiv 2305.14314), appendix E
    blocks = weight.float().reshape(-1, 64)
    most = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks / most, (table[1:] + table[:-1]) / 2)
    return (table[codes] * most).reshape(weight.shape)


def int8(name: str, weight: Any) -> Any:
    """Return the weight of a layer as 8 bits have it, with a scale for each row."""
    if not _is_quantized(name, weight):
        return weight
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round() * scale


_CHANGES = {"bfloat16": _as_stored, "nf4": nf4, "int8": int8}


def expect_llama(path: str, device: str, out: str, kinds: Sequence[str] = tuple(_CHANGES)) -> Lap:
    """Save logits and tokens of a Llama and its roundings, to ``out``-bfloat16.pt and so on."""

    def steps() -> Steps:
        for kind in kinds:
            yield _expect(path, device, kind, f"{out}-{kind}.pt", (1, 128))

    return laps(steps())


def expect_mixture(path: str, device: str, out: str) -> Lap:
    """Save logits and tokens of a mixture."""

    def steps() -> Steps:
        yield _expect(path, device, "bfloat16", f"{out}-bfloat16.pt", (128,))

    return laps(steps())


def _expect(path: str, device: str, kind: str, out: str, counts: tuple[int, ...]) -> dict[str, Any]:
    import torch

    gc.collect()  # the model before
    exact = kind == "bfloat16"
    model = _plain(path, device, torch.bfloat16 if exact else torch.float32, _CHANGES[kind])
    vocabulary = model.config.vocab_size
    found: dict[str, Any] = {"vocabulary": vocabulary}
    for count in counts:
        found[f"logits {count}"] = logits_of(model, ids_of(vocabulary, count, device)).cpu()
    if exact:
        for count in counts:
            ids = ids_of(vocabulary, count, device)
            found[f"tokens {count}"] = _generated(model, ids[:, : _prompt(count)]).tolist()
    else:
        layers = [name for name, each in model.named_parameters() if _is_quantized(name, each)]
        ids = ids_of(vocabulary, _PROMPT, device)
        found["products"] = products(model, [n.removesuffix(".weight") for n in layers], ids)
        # `to` rounds in place
        model = _with_frequencies(model.to(torch.bfloat16), device)
        rounded = products(model, list(found["products"]), ids)
        found["rows error"] = max(
            float(rows_error(rounded[name], each).max()) for name, each in found["products"].items()
        )
        for count in counts:
            rounded = logits_of(model, ids_of(vocabulary, count, device))
            found[f"error {count}"] = difference(rounded, found[f"logits {count}"], 0.0)[1]
    torch.save(found, out)
    return {"made": out}


def products(model: Any, names: Sequence[str], ids: Any) -> dict[str, Any]:
    """Return the products of a model's layers with inputs that are the same for each model.

    All are taken in one pass, so that layers stream as ever.
    """
    import torch

    found: dict[str, Any] = {}
    hooks = []
    for at, name in enumerate(names):

        def replaced(layer: Any, given: tuple[Any, ...], at: int = at) -> tuple[Any, ...]:
            made = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(at))
            return (made.bfloat16().to(given[0].device, given[0].dtype), *given[1:])

        def kept(layer: Any, given: Any, out: Any, name: str = name) -> None:
            found[name] = out.float().cpu()

        layer = model.get_submodule(name)
        hooks += [layer.register_forward_pre_hook(replaced), layer.register_forward_hook(kept)]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return found


def rows_error(found: Any, expected: Any) -> Any:
    """Return |found - expected| / |expected| of the products of each row of a weight."""
    apart = (found - expected).flatten(0, -2).norm(dim=0)
    return apart / expected.flatten(0, -2).norm(dim=0)


def unlike(found: Mapping[str, Any], expected: Mapping[str, Any], most: float) -> str:
    """Return which layer's product is farther from the expected one than ``most``; "" if none."""
    for name, each in expected.items():
        if name not in found or found[name].shape != each.shape:
            return f"{name}: no product of the shape {tuple(each.shape)}"
        error = rows_error(found[name], each)
        if not (error <= most).all():
            row = int(error.nan_to_num(float("inf")).argmax())
            return f"{name}: row {row} differs by {error[row]:.2g}, at most {most:.2g} expected"
    return ""


def expect_pipeline(path: str, device: str, out: str) -> Lap:
    """Save an image of a pipeline that diffusers loads."""

    def steps() -> Steps:
        import torch
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(path, torch_dtype=torch.bfloat16).to(device)
        torch.save(_image(pipe), f"{out}.pt")
        yield {"made": f"{out}.pt"}

    return laps(steps())


def _image(pipe: Any) -> Any:
    import torch
    from bench_parts.diffusers_jobs import PROMPT

    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2}
    given |= {"generator": torch.Generator("cpu").manual_seed(7), "max_sequence_length": 64}
    return pipe(PROMPT, output_type="pt", **given).images.float().cpu()


# --- rows -----------------------------------------------------------------------------------------


class Devices:
    """Devices of torch, and what its allocator counts."""

    def __init__(self, names: str | Sequence[str]) -> None:
        import torch

        self.names = [names] if isinstance(names, str) else list(names)
        self._on_cuda = [name for name in self.names if name.startswith("cuda")]
        for name in self.names:
            made = torch.zeros(64, 64, device=name)
            _ = made @ made  # cuBLAS's workspace
        self.finish()
        self._base_nbytes = {n: torch.cuda.memory_allocated(n) for n in self._on_cuda}
        self._base_used = {n: self._used_nbytes(n) for n in self._on_cuda}
        for name in self._on_cuda:
            torch.cuda.reset_peak_memory_stats(name)

    def finish(self) -> None:
        """Wait until the devices have computed all."""
        import torch

        for name in self._on_cuda:
            torch.cuda.synchronize(name)

    def left_nbytes(self) -> int:
        """Return the bytes above those of the start now, of all devices."""
        import torch

        return sum(torch.cuda.memory_allocated(n) - b for n, b in self._base_nbytes.items())

    def peaks(self) -> dict[str, int]:
        """Return the most bytes above those of the start, by device."""
        import torch

        return {n: torch.cuda.max_memory_allocated(n) - b for n, b in self._base_nbytes.items()}

    @staticmethod
    def _used_nbytes(name: str) -> int:
        import torch

        free, total = torch.cuda.mem_get_info(name)
        return int(total - free)

    def driver_nbytes(self) -> int:
        """Return the bytes above those of the start now, by the driver, of the fullest device."""
        return max((self._used_nbytes(n) - b for n, b in self._base_used.items()), default=0)

    def peak_nbytes(self) -> int:
        """Return the most bytes above those of the start, of the fullest device."""
        return max(self.peaks().values(), default=0)

    def over(self, budget: Any) -> str:
        """Return which device holds more than its budget, by device or of each; "" if none."""
        given = budget if isinstance(budget, dict) else dict.fromkeys(self.names, budget)
        return "; ".join(
            f"{peak} of {given[name]} bytes of {name}"
            for name, peak in self.peaks().items()
            if given.get(name) is not None and peak > given[name]
        )

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return what a call returns, and its seconds to the end of what the device computes."""
        begun = time.perf_counter()
        found = work()
        self.finish()
        return found, time.perf_counter() - begun


def passes(on: Devices, work: Callable[[], Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what the first pass returns, and the last of `PASSES` more, each with its facts."""
    for step, times in (("first pass", 1), ("pass", PASSES)):
        took = []
        for _ in range(times):
            found, seconds = on.timed(work)
            took.append(seconds)
        said = {"step": step, "seconds": median(took), "device_nbytes": on.peak_nbytes()}
        yield found, said


def difference(found: Any, expected: Any, most: float) -> tuple[str, float]:
    """Return what is wrong ("" if nothing), and |found - expected| / |expected - mean|.

    That may be up to ``most``; 0: all is equal.
    """
    import torch

    found = found.cpu()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}", float("inf")
    if torch.equal(found, expected):  # not if there is a NaN
        return "", 0.0
    apart = (found.float() - expected.float()).norm()
    error = float(apart / (expected.float() - expected.float().mean()).norm())
    if not most:
        count = int((found != expected).sum())
        return f"{count} of {found.numel()} differ, by {error:.2g}", error
    return ("" if error <= most else f"differs by {error:.2g}, at most {most:.2g} expected"), error


def load(
    path: str, device: str | list[str], trace: str, budget: dict[str, int] | None = None
) -> Lap:
    """Load a state dict, twice, and compare each tensor with what safetensors reads.

    Over several devices, each has its budget.
    """

    def steps() -> Steps:
        from streamload import load_state_dict

        yield {}
        on = Devices(device)
        given: dict[str, Any] = {"device": device, "budget": budget, "progress": False}
        state: dict[str, Any] = {}
        for name in ("load", "load again"):
            state.clear()

            def loaded() -> Any:
                return load_state_dict(None, path, dtype="checkpoint", **given).state_dict

            found, seconds = on.timed(loaded)
            state.update(found)
            del found
            yield {"step": name, "seconds": seconds}
        said = {"step": "check", "device_nbytes": on.peak_nbytes()}
        wrong = [on.over(budget)] if budget else [""]
        wrong += unequal(path, state)
        yield said | {"wrong": ", ".join([each for each in wrong if each][:5])}

    return laps(steps(), trace)


def unequal(
    path: str, state: Mapping[str, Any], slices: Mapping[str, Any] | None = None
) -> list[str]:
    """Return which tensors differ from those that safetensors reads.

    With ``slices``, those of a rank by name, others of the files may be on other ranks.
    """
    import torch
    from safetensors import safe_open

    names, wrong = set(), []
    first = str(next(iter(state.values())).device) if state else "cpu"
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt", device=first) as reader:
            names.update(reader.keys())
            for name in state.keys() & set(reader.keys()):
                tensor, expected = state[name], reader.get_tensor(name)
                if slices and name in slices:
                    parts = [
                        expected.narrow(at.axis, at.start, at.stop - at.start)
                        for at in slices[name]
                    ]
                    expected = torch.cat(parts, slices[name][0].axis)
                if not torch.equal(tensor, expected.to(tensor.device)):
                    wrong.append(name)
    if state.keys() - names or (slices is None and names - state.keys()):
        wrong.append(f"{len(state)} tensors, expected {len(names)}")
    return wrong


def model(
    path: str,
    device: str,
    trace: str,
    expected: str,
    count: int,
    exact: bool,
    budget: int | None = None,
    options: dict[str, Any] | None = None,
    whose: str = "streamload",
) -> Lap:
    """Open a model of transformers, compare passes and generated tokens with those expected.

    Args:
        path: the checkpoint.
        device: of torch.
        trace: a file for errors.
        expected: the file of `expect_llama`.
        count: tokens of a pass.
        exact: whether logits and tokens equal those expected; else they are near those of float32:
            see `LOGITS_TIMES` and `ROWS_TIMES`.
        budget: bytes of the device for an offloaded model; 0: the least that works; None: the whole
            model stays there.
        options: others of ``from_pretrained``, such as several devices with a budget each.
        whose: ``from_pretrained`` of "streamload" or of "transformers".
    """

    def steps() -> Steps:
        import torch
        import transformers.generation

        import streamload.transformers

        yield {}
        on = Devices((options or {}).get("device", device))
        wanted = torch.load(expected)
        ids = ids_of(wanted["vocabulary"], count, device)
        given: dict[str, Any] = {"device": device, "progress": False, **(options or {})}
        from_pretrained: Callable[..., Any] = streamload.transformers.from_pretrained
        if whose == "transformers":
            from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
            # each device's number, and its bytes
            each = {int(name[5:]): n for name, n in given.get("budget", {}).items() if name[5:]}
            given = {"dtype": torch.bfloat16, "device_map": "auto" if each else device}
            given |= {"max_memory": each} if each else {}
        if budget is not None:
            given |= {"offload": True, "tokens": count}
            given["budget"] = budget or least(lambda n: from_pretrained(path, **given, budget=n))
        opened, seconds = on.timed(lambda: [from_pretrained(path, **given)])
        yield {"step": "open", "seconds": seconds}
        most = 0.0 if exact else LOGITS_TIMES * wanted[f"error {count}"]

        def compared(step: str, times: int = 1) -> dict[str, Any]:
            took, wrong, error = [], "", 0.0
            for _ in range(times):
                found, seconds = on.timed(lambda: logits_of(opened[0], ids))
                why, apart = difference(found, wanted[f"logits {count}"], most)
                wrong, error = wrong or why, max(error, apart)
                took.append(seconds)
            said = {"step": step, "seconds": median(took), "wrong": wrong, "error": error}
            return said | {"most_error": most, "device_nbytes": on.peak_nbytes()}

        yield compared("first pass")
        yield compared("pass", PASSES)
        if "budget" in given:
            wrong = on.over(given["budget"])
            if budget is not None and not opened[0].streamload_offload.report.read_nbytes:
                wrong = wrong or "no weight streams: the budget holds all"
            yield {"step": "budget", "wrong": wrong, "driver_nbytes": on.driver_nbytes()}
        time.sleep(_IDLE_S)
        yield compared("idle pass")
        prompt = ids[:, : _prompt(count)]
        tokens, seconds = on.timed(lambda: _generated(opened[0], prompt))
        wrong = ""
        if exact and tokens.tolist() != wanted[f"tokens {count}"]:
            wrong = f"tokens {tokens.tolist()}, expected {wanted[f'tokens {count}']}"
        if not exact:
            wrong = _unlikely(logits_of(opened[0], tokens)[0], tokens[0], prompt.shape[1])
        yield {"step": "generate", "seconds": seconds, "wrong": wrong}
        yield compared("last pass")
        if not exact:
            ids, most_rows = ids_of(wanted["vocabulary"], _PROMPT, device), wanted["rows error"]
            found = products(opened[0], list(wanted["products"]), ids)
            wrong = unlike(found, wanted["products"], ROWS_TIMES * most_rows)
            yield {"step": "products", "wrong": wrong}
        if budget is not None:
            opened[0].streamload_offload.close()
        opened.clear()
        left_nbytes = on.left_nbytes()
        gc.collect()
        yield {
            "step": "close",
            "left_nbytes": left_nbytes,
            "left_after_gc_nbytes": on.left_nbytes(),
        }

    return laps(steps(), trace)


def _unlikely(logits: Any, tokens: Any, first: int) -> str:
    """Return which token from ``first`` on is far from the most likely one; "" if none is."""
    for at in range(first, len(tokens)):
        row = logits[at - 1].float()
        gap = float((row.max() - row[tokens[at]]) / row.std())
        if not gap <= _GAP:
            return f"token {at} is {gap:.2g} deviations below the most likely"
    return ""


def least(make: Callable[[int], Any]) -> int:
    """Return the least budget, in about a MiB, with which ``make(budget)`` works."""
    from streamload.errors import PlanInfeasibleError

    budget = 2**20
    while True:
        try:
            made = make(budget)
        except PlanInfeasibleError as error:
            budget += max(error.needed_nbytes - error.budget_nbytes, 1)
        else:
            made.streamload_offload.close()
            return budget


def pipeline(path: str, device: str, trace: str, expected: str) -> Lap:
    """Open a pipeline of diffusers under the least budget, and compare images with diffusers'."""

    def steps() -> Steps:
        import torch

        from streamload.diffusers import from_pretrained

        yield {}
        wanted = torch.load(expected)
        on = Devices(device)
        given: dict[str, Any] = {"device": device, "progress": False, "offload": True}
        budget = least(lambda n: from_pretrained(path, **given, budget=n))
        gc.collect()
        pipe, seconds = on.timed(lambda: from_pretrained(path, **given, budget=budget))
        yield {"step": "open", "seconds": seconds}
        for step in ("first pass", "pass", "idle pass"):
            if step == "idle pass":
                time.sleep(_IDLE_S)
            found, seconds = on.timed(lambda: _image(pipe))
            why, apart = difference(found, wanted, _IMAGE_TOLERANCE)
            yield {
                **{"step": step, "seconds": seconds, "wrong": why, "error": apart},
                "device_nbytes": on.peak_nbytes(),
            }
        pipe.streamload_offload.close()

    return laps(steps(), trace)


def versions() -> Lap:
    """Return the device's name, its driver, and versions of packages."""

    def lap() -> dict[str, Any]:
        import torch

        from streamload.bench.machine import facts

        found: dict[str, Any] = {"versions": facts(), "cuda": torch.version.cuda}
        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name(0)
            ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            with suppress(OSError):
                found["driver"] = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        return found

    return lap
