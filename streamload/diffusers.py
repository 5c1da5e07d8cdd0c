"""Pipelines of diffusers: `from_pretrained`, streamed under a budget."""

from streamload.transformers.pipelines import from_pretrained

__all__ = ["from_pretrained"]
