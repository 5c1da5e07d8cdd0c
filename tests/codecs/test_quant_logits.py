"""What a quantised model's products and logits are off by, beside what its errors allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
transformers = needs.module("transformers")

from streamload.codecs.parts import QuantCounts  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402

TOKENS = 48
#: By format, what the logits are off by at most, of their own root mean square: about twice what
#: was seen (docs/measurements.md, "Quantising").
LOGITS = {"int8": 0.06, "q8_0": 0.05, "nf4": 0.8, "q4_0": 0.75}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of float32, whose activations are of about unit size."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        **{"vocab_size": 320, "hidden_size": 256, "intermediate_size": 640},
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"max_position_embeddings": 64, "tie_word_embeddings": False},
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def run(model: Any) -> tuple[dict[str, tuple[Any, Any]], Any]:
    seen: dict[str, tuple[Any, Any]] = {}

    def note(name: str) -> Any:
        def hook(module: Any, given: Any, out: Any) -> None:
            width = given[0].shape[-1]
            flat = out.double().reshape(-1, out.shape[-1])
            seen[name] = given[0].double().reshape(-1, width), flat

        return hook

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    ids = torch.randint(320, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits[0].double()
    for hook in hooks:
        hook.remove()
    return seen, logits


@pytest.mark.parametrize("format", LOGITS)
def test_products_are_within_their_bounds(folder: Path, format: str) -> None:
    """Each Linear's output is as far off as the errors that the report counts allow, or less.

    A Linear computes y = W x. Quantised, it has W + D, and gets x' = x + d, for the layers before
    it are quantised as well: its output is off by y' - y = W d + D x'. With d as it was seen in the
    two models, the first term is exact. Of D the report counts the largest magnitude e and the sum
    of squares s, so that for each output i and for all outputs of a token together

        |(D x')_i| <= sum_j |D_ij| |x'_j| <= e |x'|_1        ||D x'||_2 <= sqrt(s) ||x'||_2

    and |y' - y|_i <= sum_j |W_ij| |d_j| + e |x'|_1. The products of float32 are off by no more than
    n eps sum_j |W_ij| |x_j| besides, for n inputs. The head is quantised too: its output are the
    logits.
    """
    given = {"device": "cpu", "dtype": "float32", "progress": False}
    whole = from_pretrained(folder, **given)
    model = from_pretrained(folder, quant={"lm_head.weight": format, "*": format}, **given)
    counted: dict[str, QuantCounts] = dict(model.streamload_report.errors)
    full, logits = run(whole)
    found, others = run(model)
    assert counted.keys() == {f"{name}.weight" for name in full}
    assert len(full) == 4 * 7 + 1
    eps = torch.finfo(torch.float32).eps
    nearest = 0.0
    for name, (x, y) in full.items():
        weight = whole.get_submodule(name).weight.detach().double()
        errors = counted[f"{name}.weight"]
        given_x, out = found[name]
        d = given_x - x
        rounding = 2 * x.shape[1] * eps * (x.abs() + given_x.abs()) @ weight.abs().T
        own = (out - y - d @ weight.T).abs()
        most = errors.largest_error * given_x.abs().sum(1, keepdim=True)
        assert (own <= most * (1 + 1e-5) + rounding).all(), name
        of_token = errors.squared_error**0.5 * given_x.norm(dim=1)
        assert (own.norm(dim=1) <= of_token * (1 + 1e-5) + rounding.norm(dim=1)).all(), name
        in_all = d.abs() @ weight.abs().T + most
        assert ((out - y).abs() <= in_all * (1 + 1e-5) + rounding).all(), name
        assert own.max() > rounding.max(), name  # it is quantised
        nearest = max(nearest, float((own / most).max()))
    off = float((others - logits).norm() / logits.norm())
    weights = sum(counted.values(), QuantCounts()).relative
    print(f"{format}: weights {weights:.2%}, logits {off:.2%}, of the bound {nearest:.1%}")
    assert weights < off < LOGITS[format]
