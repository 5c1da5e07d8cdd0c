"""Run tests that others wrote, with models that streamload opens.

    python tests/peers.py hub FOLDER CHECKOUT...      make tiny models for the Hub's names in them
    python tests/peers.py run MODE CHECKOUT RESULT.json -- PYTEST'S ARGUMENTS
    python tests/peers.py compare BEFORE.json AFTER.json

``run`` starts pytest in the checkout, with this file as a plugin and the Hub's cache in FOLDER
(``STREAMLOAD_PEERS_HUB``), offline. MODE "theirs" changes nothing; under the others of `MODES`,
``from_pretrained`` of transformers is streamload's, and models that a test builds from a
configuration, or as modules of its own, are saved and opened by streamload before it uses them.
With ``STREAMLOAD_PEERS_WITHIN=0.05``, tensors are close, too, where they differ by that share of
their norm: weights that are quantised again after a merge differ by more than tests allow.
``compare`` counts the tests that passed before and after, those whose models streamload opened,
and lists each that passes no more, with its error.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

#: What `from_pretrained` and `load_state_dict` get, by the mode; "offloaded" adds a budget.
MODES: Mapping[str, Mapping[str, Any]] = {
    "theirs": {},
    "plain": {},
    "mapped": {"residence": "auto"},
    "offloaded": {"offload": True},
    "int8": {"quant": "int8"},
}
_HERE = Path(__file__).resolve()

# --- models of the Hub ----------------------------------------------------------------------------

_QUOTED = re.compile(r"""["']([\w.-]+/[\w.-]+|gpt2|t5-small|bert-base-(?:un)?cased)["']""")

#: The classes of models whose names do not say them.
_CLASSES: Mapping[str, str] = {
    "opt-": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "flan-t5": "T5ForConditionalGeneration",
    "t5-": "T5ForConditionalGeneration",
    "bert-base": "BertForMaskedLM",
    "mixtral-tiny": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "falcon-mamba": "FalconMambaForCausalLM",
    "bloom": "BloomForCausalLM",
    "smol_llama": "LlamaForCausalLM",
    "tinyllama": "LlamaForCausalLM",
    "clip-text": "CLIPTextModel",
}


def class_of(name: str) -> str | None:
    """The class of transformers that a model of the Hub has, or None for an adapter and others."""
    import transformers

    last = name.rpartition("/")[2]
    if "lora" in last.lower() or "dataset" in last.lower():
        return None
    for word in re.split(r"[-_]", last):
        if re.search(r"\w(For\w+|Model|LMHeadModel)$", word) and hasattr(transformers, word):
            return word
    found = [cls for part, cls in _CLASSES.items() if part in last.lower()]
    return found[0] if found else None


def make_hub(folder: Path, checkouts: list[Path]) -> None:
    """Fill a cache of the Hub with a tiny random model for each name that the tests have."""
    import transformers
    from small_families import Family, built
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = (path.read_text() for each in checkouts for path in sorted(each.rglob("*.py")))
    names = {name for text in texts for name in _QUOTED.findall(text)}
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    for name in sorted(names):
        class_name = class_of(name)
        if class_name is None:
            continue
        at = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = at / "snapshots" / ("0" * 40)
        try:
            model = built(Family(class_name, sizes={"vocab_size": 1000, "num_labels": 2}))
        except Exception as error:  # a size that `small` does not know: its tests fail before, too
            print(f"not made: {name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        shutil.rmtree(at, ignore_errors=True)
        model.save_pretrained(snapshot)
        fast.save_pretrained(snapshot)
        (at / "refs").mkdir()
        (at / "refs" / "main").write_text("0" * 40)
        print(name, class_name)


# --- the plugin -----------------------------------------------------------------------------------

_MODE = os.environ.get("STREAMLOAD_PEERS_MODE", "theirs")
_results: dict[str, dict[str, Any]] = {}
_now: list[str] = []  # the test that runs
_offloads: list[Any] = []  # of its models


def _counted(model: Any) -> None:
    """One more model of this test was opened by streamload."""
    if _now:
        result = _results.setdefault(_now[-1], {})
        result["opened"] = result.get("opened", 0) + 1
        offload = getattr(model, "streamload_offload", None)
        if offload is not None:
            _offloads.append(offload)


def _nbytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*.safetensors"))


def _within(load: Callable[..., Any], nbytes: int) -> Any:
    """Load with what the mode says: offloaded, within half of the bytes or what is least."""
    from streamload.errors import PlanInfeasibleError

    options = dict(MODES[_MODE])
    if _MODE != "offloaded":
        return load(**options)
    for _ in range(4):
        try:
            return load(**options, budget=max(nbytes // 2, 1))
        except PlanInfeasibleError as error:
            nbytes = 2 * error.needed_nbytes
    return load(**options, budget=nbytes)


def _stream_from_pretrained() -> None:
    """Let ``from_pretrained`` be streamload's, as its `streamed` does it, for all of the tests."""
    from transformers import PreTrainedModel

    from streamload.checkpoint.open import open_checkpoint
    from streamload.transformers import streamed

    def opened(cls: Any, path: Any, *given: Any, **named: Any) -> Any:
        def load(**options: Any) -> Any:
            with streamed(device="cpu", progress=False, **options):
                return cls.from_pretrained(path, *given, **named)

        nbytes = 0
        if _MODE == "offloaded":
            nbytes = sum(t.nbytes for t in open_checkpoint(path).tensors.values())
        model = _within(load, nbytes)
        _counted(model)
        return model

    PreTrainedModel.from_pretrained = classmethod(opened)


def _reopened(model: Any, folder: Path) -> Any:
    import streamload

    model.save_pretrained(folder)

    def load(**options: Any) -> Any:
        return streamload.transformers.from_pretrained(
            folder, model_class=type(model), device="cpu", progress=False, **options
        )

    opened = _within(load, _nbytes(folder))
    _counted(opened)
    return opened.train(model.training)


def _refilled(module: Any, folder: Path) -> Any:
    from safetensors.torch import save_model

    import streamload

    if any(each.is_meta for each in module.state_dict().values()):
        return module  # built without memory: a test fills it by itself
    save_model(module, str(folder / "model.safetensors"))

    def load(*, offload: bool = False, **options: Any) -> None:
        call = streamload.offload if offload else streamload.load_state_dict
        call(module, folder, device="cpu", progress=False, **options)

    _within(load, _nbytes(folder))
    _counted(module)
    return module


_building: list[Any] = []  # a model, and those in it


def opening(cls: Any, again: Callable[[Any, Path], Any]) -> Any:
    """A class that builds what ``cls`` does, and gives what streamload makes of it."""

    class Meta(type(cls)):  # type: ignore[misc]
        opens = True

        def __call__(self, *given: Any, **named: Any) -> Any:
            with tempfile.TemporaryDirectory(dir=os.environ["STREAMLOAD_PEERS_TMP"]) as folder:
                kept = Path(folder)
                if _MODE in ("mapped", "offloaded"):  # computes on the files
                    kept = Path(tempfile.mkdtemp(dir=os.environ["STREAMLOAD_PEERS_TMP"]))
                _building.append(cls)
                try:
                    built = cls(*given, **named)
                finally:
                    _building.pop()
                return built if _building else again(built, kept)

        def __instancecheck__(self, instance: Any) -> bool:
            return isinstance(instance, cls)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return Meta(cls.__name__, (cls,), names)


def _open_what_is_built(items: list[Any]) -> None:
    """Let the classes of models that tests build be such that streamload opens."""
    import torch
    from transformers import PreTrainedModel

    seen: set[Any] = set()
    for item in items:
        cls, module = getattr(item, "cls", None), item.module
        if cls is not None and cls not in seen and hasattr(cls, "all_generative_model_classes"):
            seen.add(cls)
            _after_set_up(cls)
        if module in seen:
            continue
        seen.add(module)
        for name, value in list(vars(module).items()):
            if (
                isinstance(value, type)
                and issubclass(value, torch.nn.Module)
                and not issubclass(value, PreTrainedModel)
                and value.__module__ == module.__name__
            ):
                setattr(module, name, opening(value, _refilled))
                value.__qualname__ = f"_{name}"  # where pickles find it
                setattr(module, value.__qualname__, value)


def _after_set_up(cls: Any) -> None:
    """Replace the classes that a test builds its models of, whether set before it or computed."""
    computed = {
        name for name in _CLASSES_OF_TESTS if isinstance(getattr(cls, name, None), property)
    }
    for name in computed:
        before = getattr(cls, name)
        setattr(cls, name, property(lambda self, before=before: _all_opening(before.fget(self))))
    set_up = cls.setUp

    def and_open(self: Any) -> None:
        set_up(self)
        for name in _CLASSES_OF_TESTS - computed:
            setattr(self, name, _all_opening(getattr(self, name, None)))

    cls.setUp = and_open


_CLASSES_OF_TESTS = {"all_model_classes", "all_generative_model_classes"}


def _all_opening(classes: Any) -> tuple[Any, ...]:
    return tuple(
        each if hasattr(type(each), "opens") else _opening_model(each) for each in classes or ()
    )


@cache
def _opening_model(cls: Any) -> Any:
    return opening(cls, _reopened)


class _Known(dict[str, int]):
    """Every name of the Hub was asked for before: peft's tests go online for new ones."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 0


def _stay_offline() -> None:
    for module in list(sys.modules.values()):
        if "_HUB_MODEL_ACCESSES" in getattr(module, "__dict__", ()):
            module.__dict__["_HUB_MODEL_ACCESSES"] = _Known()


def _close_within(share: float) -> None:
    """Let ``assert torch.allclose(a, b)`` pass where a - b has at most a share of b's norm."""
    import torch

    exactly = torch.allclose

    def close(a: Any, b: Any, *given: Any, **named: Any) -> bool:
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        if exactly(a, b, *given, **named) or not line.strip().startswith("assert torch.allclose("):
            return exactly(a, b, *given, **named)
        found = float((a.double() - b.double()).norm() / b.double().norm())
        result = _results.setdefault(_now[-1], {})
        result["differs"] = max(found, result.get("differs", 0.0))
        return found <= share

    torch.allclose = close


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """All tests are known: replace what opens their models."""
    _stay_offline()
    if "STREAMLOAD_PEERS_WITHIN" in os.environ:
        _close_within(float(os.environ["STREAMLOAD_PEERS_WITHIN"]))
    if _MODE != "theirs":
        _stream_from_pretrained()
        _open_what_is_built(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Know which test opens a model."""
    _now.append(item.nodeid)
    try:
        return (yield)
    finally:
        _now.pop()
        read = sum(each.report.read_nbytes for each in _offloads)
        _offloads.clear()
        if read:
            _results[item.nodeid]["streamed_nbytes"] = read


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how a test ended: the worst of its phases."""
    result = _results.setdefault(report.nodeid, {})
    if report.when == "call" or report.outcome != "passed":
        if result.get("outcome") == "failed":
            return
        result["outcome"] = report.outcome
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            result["error"] = str(crash.message if crash else report.longrepr)[:600]
            result["where"] = str(report.longrepr)[-3000:]


def pytest_sessionfinish() -> None:
    if "STREAMLOAD_PEERS_RESULT" in os.environ:
        Path(os.environ["STREAMLOAD_PEERS_RESULT"]).write_text(json.dumps(_results, indent=1))


# --- the commands ---------------------------------------------------------------------------------


def run(mode: str, checkout: Path, result: Path, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        paths = [_HERE.parent, _HERE.parent.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "STREAMLOAD_PEERS_MODE": mode,
            "STREAMLOAD_PEERS_RESULT": str(result.resolve()),
            "STREAMLOAD_PEERS_TMP": temporary,
            "HF_HUB_OFFLINE": "1",
        }
        if "STREAMLOAD_PEERS_HUB" in os.environ:
            environment["HF_HOME"] = os.environ["STREAMLOAD_PEERS_HUB"]
        line = [sys.executable, "-m", "pytest", "-p", "peers", "-p", "no:cacheprovider", "-q"]
        return subprocess.run([*line, *arguments], cwd=checkout, env=environment).returncode


def compare(before: Path, after: Path) -> None:
    """Print the counts, and each test that passed before and does not after."""
    theirs, ours = (json.loads(path.read_text()) for path in (before, after))
    passed = {name for name, each in theirs.items() if each.get("outcome") == "passed"}
    kept = {name for name in passed if ours.get(name, {}).get("outcome") == "passed"}
    opened = {name for name, each in ours.items() if each.get("opened")}
    print(
        f"{len(theirs)} tests; {len(passed)} passed before, {len(kept)} of them after; models of "
        f"{len(opened)} tests were opened by streamload, of which {len(opened & passed)} passed "
        f"before and {len(opened & kept)} after"
    )
    if any(each.get("streamed_nbytes") for each in ours.values()):
        streamed = {name for name, each in ours.items() if each.get("streamed_nbytes")}
        print(f"weights of {len(streamed)} tests were read again as they computed")
    differing = [each["differs"] for each in ours.values() if "differs" in each]
    if differing:
        print(f"{len(differing)} tests had tensors that differ, by {max(differing):.4f} at most")
    for name in sorted(passed - kept):
        each = ours.get(name, {"error": "did not run"})
        print(f"{name}: {each.get('outcome')}: {' '.join(each.get('error', '').split())[:300]}")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "hub":
        make_hub(Path(rest[0]), [Path(each) for each in rest[1:]])
    elif command == "run":
        split = rest.index("--")
        sys.exit(run(rest[0], Path(rest[1]), Path(rest[2]), rest[split + 1 :]))
    else:
        compare(Path(rest[0]), Path(rest[1]))
