"""The bound of products with quantised weights."""

from __future__ import annotations

from typing import Any

import torch


def worst(y: Any, x: Any, weight: Any, bias: Any = None) -> float:
    """The largest error of ``y = x @ weight.T + bias``, as a part of what is allowed.

    Allowed are ``K * 2^-24`` times the sum of ``|w| |x|`` over K columns, and one rounding of the
    result, against float64.
    """
    x, weight = x.detach().double(), torch.as_tensor(weight).detach().double()
    exact = x @ weight.T
    allowed = x.abs() @ weight.abs().T * (weight.shape[1] * 2.0**-24)
    if bias is not None:
        exact, allowed = exact + bias.double(), allowed + bias.double().abs() * 2.0**-24
    allowed = allowed + exact.abs() * torch.finfo(y.dtype).eps + torch.finfo(y.dtype).tiny
    return float(((y.detach().double() - exact).abs() / allowed).max())
