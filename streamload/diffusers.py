"""Pipelines of diffusers: `from_pretrained`, streamed under a budget."""

from streamload.core.system import needs_extra

with needs_extra("diffusers", "diffusers", "diffusers", "torch", "transformers"):
    from streamload.transformers.pipelines import from_pretrained

__all__ = ["from_pretrained"]
