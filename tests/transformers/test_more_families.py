"""More families of transformers, as docs/models.md lists them: loaded, quantised, offloaded.

`small_families.FAMILIES` is the table. The fast suite runs a few; the others are the same tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

import streamload
from streamload.errors import StateDictMismatchError

torch = needs.module("torch")
transformers = needs.module("transformers")

from models_page import rows  # noqa: E402
from small_families import FAMILIES, INPUTS, built  # noqa: E402
from transformers_helpers import assert_same_bits, load, quiet  # noqa: E402

from streamload.devices.torch.quantized import CODED, Coded  # noqa: E402

__all__ = ["quiet"]

AS_TYPED = "as typed"
NO_MODULES = "no module that holds quantised weights"
NOTHING_TO_QUANTIZE = "nothing, as a note says"

#: In the fast suite: a shared block between state spaces, a mixture, and images with text.
FAST = ("Zamba2", "Phi-3.5 MoE", "PaliGemma")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]

#: By format, the least and the largest error of a weight, relative to its root mean square.
FORMATS = {"int8": (0.002, 0.02), "nf4": (0.05, 0.15), "q8_0": (0.002, 0.02)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, as transformers writes it; each is written once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("family")
            built(FAMILIES[name]).save_pretrained(made[name])
        return made[name]

    return make


def row(name: str) -> dict[str, str]:
    """What docs/models.md says of a family, by the column."""
    columns = ("from_pretrained", "load_state_dict", "quant", "offload")
    return dict(zip(columns, rows("More families of transformers")[name], strict=True))


def arguments(cell: str, **names: Any) -> dict[str, Any]:
    """What a cell says to add, ``stay="*.r"`` in code; nothing where it works as typed."""
    if cell == AS_TYPED:
        return {}
    given: dict[str, Any] = eval(f"dict({cell.strip('`')})", names)
    return given


def reference(name: str, path: Path) -> Any:
    return getattr(transformers, FAMILIES[name].class_name).from_pretrained(path)


def computed(name: str, model: Any) -> dict[str, Any]:
    given = INPUTS[FAMILIES[name].kind](model.config)
    with torch.no_grad():
        found = {f"forward.{i}": each for i, each in enumerate(flat(model(**given)))}
        if model.can_generate():
            prompt = {key: each for key, each in given.items() if not key.startswith("decoder_")}
            made = model.generate(
                **prompt,
                **{"max_new_tokens": 4, "do_sample": False, "output_logits": True},
                return_dict_in_generate=True,
            )
            found |= {"tokens": made.sequences, "logits": torch.stack(made.logits)}
    return found


def flat(found: Any) -> Iterator[Any]:
    if torch.is_tensor(found):
        yield found
    elif isinstance(found, dict):
        yield from flat(tuple(found.values()))
    elif isinstance(found, list | tuple):
        for each in found:
            yield from flat(each)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    differing = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert differing == []


def in_memory(model: Any) -> Any:
    """The model with weights that torch allocated: at other addresses, products round otherwise."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@pytest.mark.parametrize("name", EACH)
def test_a_family_loads(folder: Callable[[str], Path], name: str) -> None:
    """Both first lines give the bits of transformers and compute the same, or the page says how."""
    path, said = folder(name), row(name)
    expected = reference(name, path)
    found = load(path, budget="30MB", model_class=type(expected))
    assert said["from_pretrained"] == AS_TYPED
    assert_same_bits(found, expected)
    result = computed(name, in_memory(expected))
    assert_equal(computed(name, in_memory(found)), result)

    own = type(expected)(expected.config).eval()
    try:
        streamload.load_state_dict(own, path, budget="30MB", device="cpu", progress=False)
    except StateDictMismatchError as error:
        line = error.instead or str(error.suggestions[0].arguments)
        assert said["load_state_dict"] == f"`{line.replace(json.dumps(str(path)), 'path')}`"
        call = error.instead or f"streamload.load_state_dict(own, {str(path)!r}, {line})"
        names = {"streamload": streamload, "own": own, type(own).__name__: type(own)}
        found = eval(call, names)
        own = found if error.instead else own
    else:
        assert said["load_state_dict"] == AS_TYPED
    assert_same_bits(own, expected)
    assert_equal(computed(name, in_memory(own)), result)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", EACH)
def test_a_family_is_quantized(folder: Callable[[str], Path], name: str, format: str) -> None:
    path, said = folder(name), row(name)["quant"]
    expected = reference(name, path)
    if said == NOTHING_TO_QUANTIZE:
        with pytest.raises(ValueError, match="nothing is quantised"):
            load(path, quant=format, model_class=type(expected))
        return
    if said == NO_MODULES:
        with pytest.raises(ValueError, match="can hold quantised weights"):
            load(path, quant=format, model_class=type(expected))
        return
    options = arguments(said, format=format) or {"quant": format}
    found = load(path, **options, model_class=type(expected))
    dense = dict(expected.named_modules(remove_duplicate=False))
    parameters = expected.named_parameters(remove_duplicate=False)
    originals = {name: each.detach().clone() for name, each in parameters}
    least, most = FORMATS[format]
    uses: dict[str, int] = {}
    for module_name, module in found.named_modules():
        if not isinstance(module, Coded):
            continue
        for leaf in getattr(module, CODED):
            weight, original = module.dense(leaf), originals[f"{module_name}.{leaf}"]
            assert weight.shape == original.shape, (module_name, leaf)
            error = float((weight - original).norm() / original.norm())
            assert least < error < most, (module_name, leaf, error)
            getattr(dense[module_name], leaf).data = weight.clone()
        uses[module_name] = 0

        def compare(
            module: Any, given: Any, named: Any, output: Any, name: str = module_name
        ) -> None:
            uses[name] += 1
            expected = tuple(flat(dense[name](*given, **named)))
            for mine, theirs in zip(flat(output), expected, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), (name, uses[name])

        module.register_forward_hook(compare, with_kwargs=True)
    assert uses
    computed(name, found)
    assert any(uses.values())


@pytest.mark.parametrize("name", EACH)
def test_a_family_is_offloaded(folder: Callable[[str], Path], name: str) -> None:
    """At half its size, a padded batch gives the bits that the resident model gives."""
    path, options = folder(name), arguments(row(name)["offload"])
    expected = reference(name, path)
    resident = load(path, model_class=type(expected))
    (device,) = resident.streamload_report.plan.devices
    half = device.peak_nbytes // 2
    found = load(path, **options, offload=True, budget=half, model_class=type(expected))
    try:
        assert_equal(computed(name, found), computed(name, resident))
        assert found.streamload_offload.report.read_nbytes
    finally:
        found.streamload_offload.close()
