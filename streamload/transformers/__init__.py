"""Models of transformers: `from_pretrained`, streamed under a budget.

transformers builds the model, names its weights, ties them, and computes the buffers that no
checkpoint holds; streamload moves the bytes. Tried with transformers 5.9, 5.17 and 5.23.
"""

from streamload.core.system import needs_extra

with needs_extra("transformers", "transformers", "torch", "transformers"):
    from streamload.transformers.loading import from_pretrained, streamed

__all__ = ["from_pretrained", "streamed"]
