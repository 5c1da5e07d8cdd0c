"""The sections quant and quality: how fast weights are quantised, and what a model loses by it."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import streamload
from bench_parts.section import NotHereError, Options, Section, in_turns
from streamload.codecs.parts import QuantCounts
from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import BF16
from streamload.planning.quant_policy import coded

_SENTENCES = 1000
_BATCH = 50
_SHAPE = (4096, 4096)

# --- speed ----------------------------------------------------------------------------------------


def quant(options: Options) -> Section:
    """GB/s of bfloat16 that one core quantises, beside bitsandbytes and gguf-py."""
    if options.run:
        try:
            from bench_parts.products_section import products
        except ImportError as error:
            raise NotHereError(str(error)) from error
        return products(options)
    section = Section(
        "quant",
        f"GB/s of bfloat16, one core, {' x '.join(map(str, _SHAPE))}, medians of {options.runs} in "
        "turn with the library's, and by CPU time (user and system) the best of them; what is lost "
        "is counted in the same pass",
    )
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    try:
        rng = np.random.default_rng(0)
        wide = rng.standard_normal(_SHAPE, np.float32)
        data = memoryview(bytearray((wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()))
        for name in SCHEMES:
            made = SCHEMES[name].of(_SHAPE, BF16)
            out = memoryview(bytearray(made.parts[0].nbytes))

            def encode(made: Any = made, out: memoryview = out) -> None:
                encoder = made.encoder(BF16)
                encoder.encode(data, out, 0)
                encoder.finish()

            theirs = _libraries(name, data)
            jobs: dict[str, Callable[[], object]] = {"streamload": encode}
            if theirs is not None:
                jobs["library"] = theirs
            (rate, best), *other = _rates(jobs, options.runs, data.nbytes)
            row: dict[str, Any] = {"format": name}
            row |= {"streamload": round(rate, 2), "by CPU time": round(best, 2)}
            for known, by_cpu in other:
                row |= {"library": round(known, 3), "its CPU time": round(by_cpu, 3)}
                row["times"] = round(rate / known, 1)
            section.rows.append(row)
    finally:
        os.sched_setaffinity(0, affinity)
    by_name = {row["format"]: row for row in section.rows}
    section.target("nf4, GB/s", by_name["nf4"]["streamload"], 1.0)
    section.target("int8, GB/s", by_name["int8"]["streamload"], 3.0)
    if "times" in by_name["q8_0"]:
        section.target("q8_0, times gguf-py", by_name["q8_0"]["times"], 5.0)
    return section


def _rates(
    jobs: Mapping[str, Callable[[], object]], runs: int, nbytes: int
) -> Iterator[tuple[float, float]]:
    """GB/s of each of some jobs, run in turn: the median by the clock, the best by CPU time."""

    def timed(job: Callable[[], object]) -> tuple[float, float]:
        begun, used = perf_counter(), process_time()
        job()
        return perf_counter() - begun, process_time() - used

    found = in_turns({name: partial(timed, job) for name, job in jobs.items()}, runs + 1)
    for _, *mine in found.values():  # the first compiles
        seconds, cpu = zip(*mine, strict=True)
        yield nbytes / 1e9 / median(seconds), nbytes / 1e9 / min(cpu)


def _libraries(name: str, data: memoryview) -> Callable[[], object] | None:
    """The same by the library that the format is of, where it is installed."""
    try:
        if name in ("q8_0", "q4_0"):
            quants = importlib.import_module("gguf.quants")
            kind = importlib.import_module("gguf").GGMLQuantizationType[name.upper()]
            wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            return lambda: quants.quantize(wide.reshape(_SHAPE), kind)
        if name in ("nf4", "fp4", "bitsandbytes-int8"):
            functional = importlib.import_module("bitsandbytes.functional")
            torch = importlib.import_module("torch")
            torch.set_num_threads(1)
            weight = torch.frombuffer(data, dtype=torch.bfloat16).reshape(_SHAPE)
            if name == "bitsandbytes-int8":
                return lambda: functional.int8_vectorwise_quant(weight.half())
            return lambda: functional.quantize_4bit(weight, blocksize=64, quant_type=name)
    except ImportError:
        pass
    return None


# --- quality --------------------------------------------------------------------------------------


def quality(options: Options) -> Section:
    """A trained model with its weights quantised, beside the full one."""
    section = Section(
        "quality",
        f"all-MiniLM-L6-v2 on torch's CPU; cosine of the embeddings of {_SENTENCES} sentences (the "
        "first ones of Python's own docstrings) with those of the full model; weights of its "
        "layers alone are quantised; error: root mean square, of the weights' own",
    )
    path = _minilm()
    texts = list(_sentences())
    full, whole_nbytes = _embeddings(path, texts, None)
    for name in SCHEMES:
        found, nbytes, error = _quantized(path, texts, name)
        cosines = (full * found).sum(axis=1)
        section.rows.append(
            {
                "format": name,
                "MB of layers": round(nbytes / 1e6, 2),
                "of float32": f"{nbytes / whole_nbytes:.1%}",
                "error": f"{error:.3%}",
                "cosine, mean": round(float(cosines.mean()), 5),
                "least": round(float(cosines.min()), 5),
                "same nearest": f"{_same_nearest(full, found):.1%}",
            }
        )
    return section


def _minilm() -> Path:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    try:
        found = importlib.import_module("minilm").folder()
    except OSError as error:
        raise NotHereError(str(error)) from error
    assert isinstance(found, Path)
    return found


def _sentences() -> Iterator[str]:
    """First sentences of docstrings of the standard library, each once, in the order of files."""
    seen: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 30 <= len(text) <= 200:
                    seen.setdefault(text)
    yield from sorted(list(seen)[:_SENTENCES], key=len)  # alike in length: little padding


def _embeddings(
    path: Path, texts: list[str], changed: dict[str, Any] | None
) -> tuple[np.ndarray[Any, Any], int]:
    """Normalised mean embeddings, and the bytes of the weights of layers, in float32."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(path / "tokenizer.json")
    )
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    state = model.state_dict()
    nbytes = sum(t.nbytes for n, t in state.items() if ".layer." in n and t.ndim == 2)
    if changed is not None:
        replaced = {name: torch.tensor(array) for name, array in changed.items()}
        _, unexpected = model.load_state_dict(replaced, strict=False)
        assert not unexpected, unexpected
    out = []
    with torch.no_grad():
        for at in range(0, len(texts), _BATCH):
            encoded = tokenizer.encode_batch(texts[at : at + _BATCH])
            ids = torch.tensor([e.ids for e in encoded])
            mask = torch.tensor([e.attention_mask for e in encoded])
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[:, :, None].float()
            mean = (hidden * weights).sum(1) / weights.sum(1)
            out.append(torch.nn.functional.normalize(mean).numpy())
    return np.concatenate(out), nbytes


def _quantized(path: Path, texts: list[str], name: str) -> tuple[np.ndarray[Any, Any], int, float]:
    """The same with quantised weights: embeddings, bytes of all parts, and the error."""
    report = streamload.load_state_dict(None, path, device="host", quant=name, progress=False)
    changed, nbytes = {}, 0
    for p in report.plan.placements:
        if p.kind.coding is None:
            continue
        nbytes += p.kind.nbytes
        if not p.kind.coding.part:
            made = coded(p.kind.coding, p.kind.src)
            parts = {part.suffix: report.state_dict[part.name(p.name)] for part in made.parts}
            changed[p.name] = importlib.import_module("quant_bounds").elements_of(made, parts)
    error = sum(report.errors.values(), QuantCounts()).relative
    return _embeddings(path, texts, changed)[0], nbytes, error


def _same_nearest(full: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """Share of sentences whose nearest other one stays the same."""
    nearest = []
    for each in (full, found):
        similar = each @ each.T
        np.fill_diagonal(similar, -1)
        nearest.append(similar.argmax(axis=1))
    return float((nearest[0] == nearest[1]).mean())


QUANT_SECTIONS: dict[str, Callable[[Options], Section]] = {"quant": quant, "quality": quality}
