"""Find which pairs of features interact: AdamW trains the network, gRDA a gate for each pair.

Pairs whose gate ends at exactly zero need not be computed. After AutoFIS: Liu et al., "Automatic feature interaction
selection in factorization models for click-through rate prediction", KDD 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dirprune import GRDA

FIELDS, VALUES, WIDTH = 8, 10, 4
PLANTED = [(0, 1), (2, 5), (3, 7)]


class Clicks(nn.Module):
    """A factorization machine whose every pair of fields has a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Embedding(FIELDS * VALUES, 1)
        self.embedding = nn.Embedding(FIELDS * VALUES, WIDTH)
        self.pairs = torch.combinations(torch.arange(FIELDS))  # (28, 2)
        self.norm = nn.BatchNorm1d(len(self.pairs), affine=False)  # so that a gate alone decides about its pair
        self.gates = nn.Parameter(torch.ones(len(self.pairs)))

    def forward(self, fields: Tensor) -> Tensor:
        index = fields + VALUES * torch.arange(FIELDS)  # (examples, 8)
        vectors = self.embedding(index)  # (examples, 8, 4)
        products = (vectors[:, self.pairs[:, 0]] * vectors[:, self.pairs[:, 1]]).sum(2)  # (examples, 28)
        return self.linear(index).sum((1, 2)) + self.norm(products) @ self.gates


def main(steps: int = 1000, seed: int = 0) -> list[tuple[int, int]]:
    torch.manual_seed(seed)
    effects = 2 * torch.randn(len(PLANTED), VALUES, VALUES)

    def examples(count: int) -> tuple[Tensor, Tensor]:
        fields = torch.randint(VALUES, (count, FIELDS))
        planted = [effect[fields[:, i], fields[:, j]] for effect, (i, j) in zip(effects, PLANTED, strict=True)]
        return fields, torch.bernoulli(torch.sigmoid(torch.stack(planted).sum(0)))

    model = Clicks()
    network = [p for name, p in model.named_parameters() if name != "gates"]
    optimizers = [torch.optim.AdamW(network, lr=0.01), GRDA([model.gates], lr=0.1, c=0.1, mu=0.7)]
    for _ in range(steps):
        fields, clicks = examples(512)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(fields), clicks).backward()
        for optimizer in optimizers:
            optimizer.step()

    kept = [(i, j) for i, j in model.pairs[model.gates != 0].tolist()]
    print(f"{len(kept)} of {len(model.pairs)} pairs are kept: {kept}")
    return kept


if __name__ == "__main__":
    main()
