#!/usr/bin/env python3
"""Run a Llama that is spread over several nodes, each of which loads and runs its own layers.

    torchrun --nproc-per-node 2 pipeline.py DIR --budget 3GB

Each rank asks the plan which layers are its own, builds those alone (on the meta device, where they
take no memory), loads them, and sends what it computes to the rank that has the next ones. The last
one prints the most likely next token. One process without torchrun runs the whole model. Under
mpirun it is the same, on several hosts with `-x MASTER_ADDR=HOST -x MASTER_PORT=29500`.

    torchrun --nproc-per-node 2 pipeline.py DIR --budget 1GB --offload --count 8

With --offload the budgets may be too small for the shares: each rank keeps what fits of its own,
and streams the rest at every pass. What is computed is the same, bit for bit.

It is a small example of what a part of a model needs, and no engine: it has no batches, no KV cache
and no slices of tensors. transformers (`distributed_config=`) and vLLM run models over nodes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_module import Config, Layer, linear, norm

import streamload.distributed
from streamload.distributed import Share


class Stage(nn.Module):
    """The part of a Llama that one rank has, by the names that Hugging Face gives its tensors."""

    def __init__(self, config: Config, share: Share) -> None:
        super().__init__()
        dim, vocab = config["hidden_size"], config["vocab_size"]
        parts: dict[str, nn.Module] = {
            "layers": nn.ModuleDict({str(index): Layer(config) for index in share.layers})
        }
        if share.has_embedding:
            parts["embed_tokens"] = nn.Embedding(vocab, dim)
        if share.has_head:
            parts["norm"], self.lm_head = norm(config), linear(dim, vocab)
        self.model = nn.ModuleDict(parts)
        self.share, self.width = share, dim

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states (batch, length, ...) to hidden states, or logits at the end."""
        if self.share.has_embedding:
            x = self.model["embed_tokens"](x)
        for layer in self.model["layers"].children():
            x = layer(x)
        return self.lm_head(self.model["norm"](x)) if self.share.has_head else x


def main() -> None:
    """Read the command line, plan, build, load and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--budget", help="bytes on the device of this rank, such as 3GB")
    parser.add_argument("--dtype", default="float32", help="dtype of weights and hidden states")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0 or another")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    parser.add_argument("--count", type=int, default=1, help="how many tokens to predict")
    parser.add_argument("--offload", action="store_true", help="stream what does not fit")
    parser.add_argument("--logits", type=Path, help="write the last token's logits there")
    args = parser.parse_args()

    meet()
    asked = {"budget": args.budget, "device": args.device, "dtype": args.dtype}
    plan = streamload.distributed.plan(args.dir, offload=args.offload, **asked)
    share = plan.mine
    config = json.loads((args.dir / "config.json").read_text())
    with torch.device("meta"):
        stage = Stage(config, share).eval()
    offloaded = None
    if args.offload:
        offloaded = streamload.distributed.offload(stage, args.dir, **asked)
        report = offloaded.load
    else:
        report = streamload.distributed.load_state_dict(stage, args.dir, **asked)
    if share.rank == 0:
        print(report, flush=True)

    tokens = list(args.tokens)
    for _ in range(args.count):
        logits = run(stage, torch.tensor([tokens]), getattr(torch, args.dtype), args.device)
        token = logits[0, -1].argmax() if share.next_rank is None else torch.tensor(0)
        if dist.is_initialized():
            dist.broadcast(token, plan.shares[-1].rank)
        tokens.append(int(token))
    if offloaded is not None:
        print(offloaded.report)
        offloaded.close()
    if share.next_rank is None:
        print("next token:", *tokens[len(args.tokens) :])
        if args.logits:
            torch.save(logits[0, -1], args.logits)
    if dist.is_initialized():
        dist.barrier()  # a sender must not leave before what it sent was received
        dist.destroy_process_group()


def meet() -> None:
    """Begin torch.distributed, as torchrun or mpirun says; one process alone needs none."""
    mpi = "OMPI_COMM_WORLD_"
    for rank, size in (("RANK", "WORLD_SIZE"), (f"{mpi}RANK", f"{mpi}SIZE")):
        if rank in os.environ and size in os.environ:
            break
    else:
        return
    if os.environ.get(f"{mpi}LOCAL_SIZE") == os.environ[size]:  # all are on this host
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    if not os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
        raise SystemExit(
            "pipeline.py: cannot meet the other ranks: nothing says where rank 0 is; write "
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, with the name of rank 0's host"
        )
    dist.init_process_group("gloo", rank=int(os.environ[rank]), world_size=int(os.environ[size]))


def run(stage: Stage, tokens: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """What a rank's part computes of tokens: logits at the end, else what it sends to the next."""
    x, share = tokens, stage.share
    if share.previous_rank is not None:
        x = torch.empty((*tokens.shape, stage.width), dtype=dtype)
        dist.recv(x, share.previous_rank)
    with torch.no_grad():
        x = stage(x.to(device)).cpu()
    if share.next_rank is not None:
        dist.send(x, share.next_rank)
    return x


if __name__ == "__main__":
    main()
