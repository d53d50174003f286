"""Run a sparse GPT on a CPU: its linear layers by the runtime, attention and LayerNorm by plain numpy.

What `export` writes, `Reader` runs with numpy and without torch.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dirprune import deploy

Array = np.ndarray[Any, np.dtype[np.float32]]


def export(model: Any, folder: Path) -> None:
    """Write every linear layer of a torch module as a runtime, and all other tensors as they are."""
    import torch

    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, layer in linears.items():
        deploy.compile(layer, torch.zeros(1, layer.in_features)).save(folder / f"{name}.safetensors")
    others = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(folder / "others.npz", **{k: v for k, v in others.items() if k.removesuffix(".weight") not in linears})


class Reader:
    """An exported GPT, as dirprune.lab.models.gpt defines it: the logits of the next token at every place of a text."""

    def __init__(self, folder: Path, heads: int, threads: int = 1) -> None:
        self.heads = heads
        self.linear = {file.stem: deploy.load(file, threads=threads) for file in folder.glob("*.safetensors")}
        self.dense: dict[str, Array] = dict(np.load(folder / "others.npz"))

    def __call__(self, tokens: Array) -> Array:
        x = self.dense["tokens.weight"][tokens] + self.dense["positions.weight"][: len(tokens)]
        for block in sorted({name.rpartition(".")[0] for name in self.linear} - {""}, key=lambda b: int(b[7:])):
            x = x + self.attend(block, self.norm(f"{block}.norm1", x))
            x = x + self.linear[f"{block}.down"](gelu(self.linear[f"{block}.up"](self.norm(f"{block}.norm2", x))))
        return self.linear["head"](self.norm("norm", x))

    def attend(self, block: str, x: Array) -> Array:
        time, width = x.shape
        q, k, v = self.linear[f"{block}.qkv"](x).reshape(time, 3, self.heads, -1).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(width / self.heads)  # (heads, time, time)
        scores[:, np.triu(np.ones((time, time), bool), 1)] = -np.inf  # no token reads a later one
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear[f"{block}.out"]((weights @ v).transpose(1, 0, 2).reshape(time, width))

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scale = self.dense[f"{name}.weight"] / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
        return centred * scale + self.dense[f"{name}.bias"]


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def main(name: str = "gpt64x2", sparsity: float = 0.9) -> float:
    """Export a pruned GPT, run it, and return how far its logits are from torch's, relative to the largest."""
    import torch

    from dirprune.lab import models

    torch.manual_seed(0)
    model = models.build(name, 256).eval()  # stands for one that you trained
    for p in model.blocks.parameters():
        if p.dim() > 1:
            p.data[torch.rand_like(p) < sparsity] = 0
    tokens = torch.randint(256, (1, 100))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        export(model, Path(folder))
        found = Reader(Path(folder), model.blocks[0].heads)(tokens[0].numpy())
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        wanted = model(tokens)[0].T.numpy()
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    dense = sum(p.nbytes for p in model.parameters())
    print(f"{dense / size:.1f} times smaller; the logits differ from torch's by {error:.1e} of the largest")
    return error


if __name__ == "__main__":
    main(*sys.argv[1:2])
