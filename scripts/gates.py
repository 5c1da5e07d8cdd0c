#!/usr/bin/env python3
"""Compare what two trees of streamload do with the same files: the gates of a change of shape.

    scripts/gates.py OLD [--count N] [--seed S] [--folder F]

OLD is a checkout of an earlier commit (`git worktree add OLD COMMIT`). Both trees make the same
drawn calls: loads, conversions, plans, splits, iterations and passes of offloaded models, on the
host, OpenCL and torch's CPU, with options of which some are refused. Compared are the bytes of what
was loaded and written, plans and reports without times and measurements, the facts of errors, the
signatures and docstrings of public functions, and every `--help`. Conversions are killed in the old
tree and continued in the new one. Exit code 1 if anything differs.

The checkpoints are made once, those in streamload's own formats by the old tree; they need
transformers and torch.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
TREE = SCRIPTS.parent
# facts that differ between two runs of one tree: times, and memory that the process has then
VARYING = re.compile(
    r"seconds|per_second|measured|process|ratio|mtime|ctime|inode|page_cache|dropped_nbytes|held_nbytes|allocators"
    r"|object_nbytes|kernel_nbytes|recovery|digest$|free_nbytes|needed_free"
)

# --- checkpoints, made by the packages that own their formats -------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "gpt2": {},
    "bert": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}


def make_sources(folder: Path) -> None:
    """Write every checkpoint of the cases to `folder`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for family, settings in FAMILIES.items():
        config = AutoConfig.for_model(family, **SIZES, **settings)
        torch.manual_seed(45)
        auto = AutoModel if family == "bert" else AutoModelForCausalLM
        model = auto.from_config(config)
        for dtype in ("float32", "bfloat16"):
            model.to(getattr(torch, dtype)).save_pretrained(folder / f"{family}-{dtype}")
        model.save_pretrained(folder / f"{family}-shards", max_shard_size="600kB")
    state = {
        "a.weight": torch.randn(96, 64),
        "a.bias": torch.randn(96),
        "b.weight": torch.randn(64, 96) * 1e5,
        "b.bias": torch.zeros(64),
    }
    for dtype in ("float64", "float16", "bfloat16", "float8_e4m3fn", "int32"):
        save_file(
            {name: value.to(getattr(torch, dtype)) for name, value in state.items()},
            folder / f"{dtype}.safetensors",
        )
    torch.save(state, folder / "state.pth")

    import streamload

    for quant in ("nf4", "int8", "fp4", "q8_0", "q4_0"):
        streamload.convert(
            folder / "llama-bfloat16", folder / f"llama-{quant}", quant=quant, progress=False
        )
    for to, name in (("gguf", "llama.gguf"), ("irpa", "llama.irpa")):
        streamload.convert(folder / "llama-bfloat16", folder / name, to=to, progress=False)
    streamload.convert(
        folder / "qwen2-bfloat16", folder / "q8.gguf", to="gguf", quant="q8_0", progress=False
    )
    streamload.convert(
        folder / "llama-bfloat16", folder / "q4k.gguf", to="gguf", quant="q4_k_m", progress=False
    )


# --- cases ----------------------------------------------------------------------------------------

LLAMAS = tuple(
    f"llama-{way}"
    for way in ("float32", "bfloat16", "shards", "nf4", "int8", "fp4", "q8_0", "q4_0")
)
SOURCES = (
    *(f"{family}-{way}" for family in FAMILIES for way in ("float32", "bfloat16", "shards")),
    *(*LLAMAS[3:], "llama.gguf", "llama.irpa", "q8.gguf", "q4k.gguf"),
    *(f"{kind}.safetensors" for kind in ("float64", "float16", "bfloat16", "float8_e4m3fn")),
    *("int32.safetensors", "state.pth", "missing.safetensors"),
)
# the tensors of these are two linear layers
SMALL = ("float64.safetensors", "float16.safetensors", "bfloat16.safetensors", "state.pth")
# each option: the default, what most calls give, and last what is refused (one draw in twelve)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": (
        None,
        "float16",
        "float32",
        "bfloat16",
        {"*weight": "float32", "*": "float16"},
        "int5",
    ),
    "quant": (None, "nf4", "int8", "q8_0", "stored", "auto", {"*mlp*": "nf4"}, "nf5"),
    "out_of_range": ("inf", "clamp", "error", "wrap"),
    "cast": ("auto", "llvm", "numpy", "device", "gpu"),
    "reader": ("auto", "pread", "direct", "mmap", "ftp"),
    "chunk_nbytes": (None, 65536, 4096, -1),
    "threads": (None, 1, 2, 0),
    "budget": ("64MB", "6MB", None, "300kB"),
    "rename": (None, {"model.norm.weight": "model.last.weight"}, {"none": "net"}),
    "strict": (True, False),
    "residence": ("memory", "mapped", "auto", "disk"),
    "device": (None, "CL", "CPU", "torch:cpu", "host", "CL:9"),
    "reserve": (0, "1MB", "much"),
    "context": (None, 16, -1),
    "tokens": (None, 1, 8, 0),
    "stay": ((), "*norm*", "*none*"),
    "select": ((), "*weight", "*none*"),
    "exclude": ((), "*bias", "*layers.1.*", "*none*"),
    "max_shard_size": (None, "500kB", 1),
    "to": ("safetensors", "gguf", "irpa", "mlc", "gguf", "pdf"),
    "runtime": (None, "candle", "mlx", "torch"),
}
LOAD = [
    *("dtype", "quant", "out_of_range", "cast"),
    *("reader", "chunk_nbytes", "threads", "budget", "rename"),
]
CONVERT = [
    *("dtype", "quant", "out_of_range", "rename"),
    *("select", "exclude", "max_shard_size", "to", "runtime"),
]
ENTRANCES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "load": ([*LOAD, "device"], SOURCES),
    "load_module": ([*LOAD, "strict", "residence"], LLAMAS),
    "load_tinygrad": ([*LOAD, "strict"], SMALL),
    "iterate": ([*LOAD, "device"], SOURCES),
    "plan": ([*LOAD, "device", "residence", "reserve", "context"], SOURCES),
    "plan_offload": ([*LOAD, "device", "tokens", "stay", "context"], LLAMAS),
    "offload": ([*LOAD, "tokens", "stay"], LLAMAS),
    "split": (["dtype", "quant", "rename", "reserve", "context"], SOURCES),
    "stream_layers": (LOAD, LLAMAS),
    "convert": (CONVERT, SOURCES),
    "verify": ([], SOURCES),
    "diff": (["dtype", "select"], SOURCES),
}
WEIGHTS = (8, 4, 2, 2, 5, 2, 2, 2, 1, 8, 1, 1)


def draw(seed: int, number: int) -> tuple[str, str, dict[str, Any]]:
    """The entrance, source and options of a case; three options at most are no defaults."""
    chance = random.Random(f"{seed}/{number}")
    entrance = chance.choices(list(ENTRANCES), WEIGHTS)[0]
    names, sources = ENTRANCES[entrance]
    options = {}
    for name in chance.sample(names, min(len(names), chance.randint(0, 3))):
        *values, refused = OPTIONS[name][1:]
        options[name] = chance.choice(values) if values and chance.random() > 1 / 12 else refused
    if "budget" in names:
        options.setdefault("budget", OPTIONS["budget"][0])
    return entrance, chance.choice(sources), options


def sha(data: Any) -> str:
    """The digest of an array's bytes, or of a text."""
    return hashlib.sha256(
        data.encode() if isinstance(data, str) else memoryview(data).cast("B")
    ).hexdigest()[:24]


def value_of(tensor: Any) -> list[Any]:
    """The dtype, shape and digest of a tensor of any framework."""
    dtype, shape = str(tensor.dtype), [int(size) for size in tensor.shape]
    if hasattr(tensor, "realize"):
        from tinygrad import dtypes

        data = tensor.flatten().bitcast(dtypes.uint8).numpy() if 0 not in shape else b""
    elif hasattr(tensor, "detach"):
        import torch

        data = (
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            if tensor.numel()
            else b""
        )
    else:
        import numpy as np

        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) if tensor.size else b""
    return [dtype, shape, sha(data)]


def stable(facts: Any, folder: str) -> Any:
    """Facts without what varies between two runs, as JSON has them."""
    if isinstance(facts, dict):
        return {
            str(name): stable(value, folder)
            for name, value in facts.items()
            if not VARYING.search(str(name))
        }
    if isinstance(facts, (list, tuple)):
        return [stable(value, folder) for value in facts]
    if isinstance(facts, (int, float, bool, type(None))):
        return facts
    text = str(facts).replace(folder, "FOLDER")
    return re.sub(r"0x[0-9a-f]{6,}|\b[\w.]+ object at\b", "OBJECT", text)


def llama() -> Any:
    """A Llama of the checkpoints' sizes, of zeros."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    model = LlamaForCausalLM(AutoConfig.for_model("llama", **SIZES, **FAMILIES["llama"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def tensors_of(state: Any) -> dict[str, Any]:
    """The dtype, shape and digest of each tensor."""
    return {name: value_of(state[name]) for name in sorted(state)}


def run(entrance: str, source: Path, options: dict[str, Any], scratch: Path) -> Any:
    """What a call gives: tensors, files, a report or a plan."""
    import streamload

    quiet: dict[str, Any] = {"progress": False}
    match entrance:
        case "load":
            report = streamload.load_state_dict(None, source, **options, **quiet)
            return {
                "tensors": tensors_of(report.state_dict),
                "report": json.loads(report.to_json()),
            }
        case "load_module":
            model = llama()
            report = streamload.load_state_dict(model, source, **options, **quiet)
            return {
                "tensors": tensors_of(dict(model.named_parameters())),
                "report": json.loads(report.to_json()),
            }
        case "load_tinygrad":
            from tinygrad import Tensor

            model = {"a": Linear(Tensor, 96, 64), "b": Linear(Tensor, 64, 96)}
            streamload.load_state_dict(model, source, **options, **quiet)
            return {
                name: [value_of(part.weight), value_of(part.bias)] for name, part in model.items()
            }
        case "iterate":
            return {
                name: value_of(tensor) for name, tensor in streamload.iterate(source, **options)
            }
        case "plan":
            return json.loads(streamload.plan(source, **options).to_json())
        case "plan_offload":
            return json.loads(streamload.plan_offload(source, **options).to_json())
        case "split":
            nodes = [streamload.Node("a", "40MB"), streamload.Node("b", "3MB")]
            return json.loads(streamload.split(source, nodes=nodes, **options).to_json())
        case "offload":
            import torch

            model = llama()
            with streamload.offload(model, source, **options, **quiet):
                outputs = [model(torch.tensor([[1, 2, 3]])).logits for _ in range(2)]
            return [value_of(output) for output in outputs]
        case "stream_layers":
            with streamload.stream_layers(source, device="CPU", **options) as layers:
                return {name: tensors_of(tensors) for name, tensors in layers}
        case "convert":
            out = (
                scratch
                / f"out{ {'gguf': '.gguf', 'irpa': '.irpa'}.get(options.get('to', ''), '') }"
            )
            written = streamload.convert(source, out, **options, **quiet)
            return {"files": files_of(out), "report": json.loads(written.to_json())}
        case "verify":
            return vars_of(streamload.verify_checkpoint(source))
        case "diff":
            other = source.with_name("llama-bfloat16")
            return vars_of(streamload.diff(source, other, **options, **quiet))
    raise AssertionError(entrance)


class Linear:
    """The two tensors of tinygrad's nn.Linear, zeros."""

    def __init__(self, tensor: Any, rows: int, columns: int) -> None:
        self.weight, self.bias = (
            tensor.zeros(rows, columns).contiguous(),
            tensor.zeros(rows).contiguous(),
        )


def files_of(out: Path) -> dict[str, Any]:
    """The digest of each file; of the journal, its facts without those of the source's files."""
    files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
    found: dict[str, Any] = {}
    for path in files:
        if path.name.endswith("streamload.json"):
            journal = json.loads(path.read_text())
            found[path.name] = {key: value for key, value in journal.items() if key != "source"}
        else:
            found[str(path.relative_to(out.parent))] = sha(path.read_bytes())
    return found


def vars_of(result: Any) -> Any:
    """The facts of a result."""
    if hasattr(result, "to_json"):
        return json.loads(result.to_json())
    names = getattr(result, "__dataclass_fields__", None) or vars(result)
    return {name: getattr(result, name) for name in names}


def outcome(call: Callable[[], Any], folder: Path) -> Any:
    """What a call gives, or the class and facts of its error."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return {"result": stable(call(), str(folder))}
        except Exception as error:
            facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}
            return {
                "error": type(error).__name__,
                "facts": stable(facts, str(folder)),
                "text": stable(str(error), str(folder)),
            }


# --- what a tree shows without files --------------------------------------------------------------


def surface() -> Iterator[tuple[str, Any]]:
    """Signatures and documentation of all that is public, and the help of every command."""
    import streamload

    for name in streamload.__all__:
        thing = getattr(streamload, name)
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            plain = [
                (each.name, each.kind.name, repr(each.default))
                for each in signature.parameters.values()
            ]
            yield f"signature {name}", [plain, sha(inspect.getdoc(thing) or "")]
        elif inspect.isclass(thing):
            yield f"class {name}", sorted(each for each in dir(thing) if not each.startswith("_"))
    for command in ("", "inspect", "plan", "load", "devices", "bench", "verify", "diff", "convert"):
        words = [sys.executable, "-m", "streamload", *command.split(), "--help"]
        done = subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}
        )
        yield f"help {command}", [done.returncode, sha(done.stdout)]


def facts_of_tree(folder: Path, seed: int, first: int, stop: int) -> dict[str, Any]:
    """The facts of the cases from `first` to `stop`, and with the first also of the surface."""
    facts: dict[str, Any] = dict(surface()) if first == 0 else {}
    warm = folder / "warm"
    outcome(
        lambda: run(
            "load", folder / "bfloat16.safetensors", {"dtype": "float16", "device": "CL"}, warm
        ),
        folder,
    )
    for number in range(first, stop):
        entrance, source, options = draw(seed, number)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        name = f"{number} {entrance} {source} {options}"
        facts[name] = outcome(lambda: run(entrance, folder / source, options, scratch), scratch)  # noqa: B023
        shutil.rmtree(scratch)
    told: dict[str, Any] = json.loads(json.dumps(facts).replace(str(folder), "FOLDER"))
    return told


# --- old beside new -------------------------------------------------------------------------------


def in_tree(tree: Path, *words: str) -> subprocess.Popen[str]:
    """Start Python with the package of a tree."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    environment = {
        **os.environ,
        **quiet,
        "PYTHONPATH": str(tree),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
    }
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        cwd=tree,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def told(tree: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The facts that a process in `tree` prints; its death is a fact, too."""
    process = in_tree(tree, str(Path(__file__).resolve()), "--folder", str(folder), *words)
    text = process.communicate()[0]
    return json.loads(text) if process.returncode == 0 else {f"died {words}": process.returncode}


def continued(old: Path, folder: Path, number: int) -> str | None:
    """Kill a conversion of the old tree and continue it in this one; say how the result differs."""
    source, scratch = folder / "mixtral-shards", Path(tempfile.mkdtemp(dir=folder))
    out, whole = scratch / "killed", scratch / "whole"
    options = (
        ["--dtype", "float16", "--max-shard-size", "500kB"] if number % 2 else ["--quant", "q8_0"]
    )
    words = ["-m", "streamload", "convert", str(source)]
    assert in_tree(TREE, *words, str(whole), *options).wait() == 0
    process = in_tree(old, *words, str(out), *options)
    pieces = len(list(whole.iterdir()))
    while process.poll() is None:
        begun = [path for path in scratch.rglob("*") if out.name in str(path) and path.is_file()]
        if len(begun) > number % pieces:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.001)
    done = process.returncode == 0
    if not done and in_tree(TREE, *words, str(out), *options, "--resume").wait() != 0:
        return f"conversion {number}, killed in the old tree, is not continued"
    a, b = ({**files_of(path)} for path in (out, whole))
    for files in (a, b):
        files.pop("streamload.json", None)
    shutil.rmtree(scratch)
    strip = [{key.split("/", 1)[-1]: value for key, value in files.items()} for files in (a, b)]
    return None if strip[0] == strip[1] else f"conversion {number} differs after it was killed"


def main() -> int:
    """Compare two trees; 1 if they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, nargs="?", help="a checkout of the earlier commit")
    parser.add_argument("--count", type=int, default=300, help="cases to draw")
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are, or are made (default: temporary)"
    )
    parser.add_argument("--facts", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.facts:
        if args.facts == "sources":
            make_sources(args.folder)
            print("{}")
        else:
            first, stop = map(int, args.facts.split(":"))
            print(json.dumps(facts_of_tree(args.folder, args.seed, first, stop)))
        return 0
    if not args.old:
        parser.error("the checkout of an earlier commit is missing")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        old = args.old.resolve()
        if not (folder / "made").exists():
            assert told(old, folder, "--facts", "sources") == {}
            (folder / "made").touch()
        differences = []
        for first in range(0, args.count, 50):
            words = ("--seed", str(args.seed), "--facts", f"{first}:{min(first + 50, args.count)}")
            before, after = told(old, folder, *words), told(TREE, folder, *words)
            for name in {**before, **after}:
                if before.get(name) != after.get(name):
                    differences.append(name)
                    print(
                        f"differs: {name}",
                        *(json.dumps(facts.get(name))[:2000] for facts in (before, after)),
                        sep="\n    ",
                    )
            right = sum("result" in fact for fact in after.values() if isinstance(fact, dict))
            print(
                f"from {first}: {len(after)} facts, {right} right; {len(differences)} differ",
                flush=True,
            )
        for number in range(6):
            if difference := continued(old, folder, number):
                differences.append(difference)
                print(difference)
    print(f"{args.count} cases, 6 conversions: {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
