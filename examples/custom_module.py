"""A module of one's own with a dict plan: torchrun --nproc-per-node 4 examples/custom_module.py

The plan says what each module with weights becomes; ``*`` is a layer index. Patterns that match
nothing and weights whose treatment is unclear are errors.
"""

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_tp

VOCABULARY, WIDTH, HEADS, SEQUENCE = 64, 64, 4, 32

PLAN = {
    "embed": "vocab",
    "blocks.*.norm1": "sequence",
    "blocks.*.attention": "shared_input",  # wq, wk and wv read its first argument
    "blocks.*.attention.wq": "column",
    "blocks.*.attention.wk": "column",
    "blocks.*.attention.wv": "column",
    "blocks.*.attention.wo": "row",
    "blocks.*.norm2": "sequence",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "norm": "sequence_gather",
    "head": "column_gather",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # "-1 heads": a rank of the tensor axis has only its share of them.
        head_width = WIDTH // HEADS
        q, k, v = (
            einops.rearrange(w(x), "batch t (heads width) -> batch heads t width", width=head_width)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(einops.rearrange(y, "batch heads t width -> batch t (heads width)"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
with torch.device("meta"):  # no memory until every rank knows its part
    model = Decoder()
model = fsdp_tp.wrap(model, mesh, plan=PLAN, sequence_parallel=True, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if torch.distributed.get_rank() == 0:
    print(mesh.describe())

for step in range(20):
    rows = torch.randint(0, VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    ids = ((rows + torch.arange(SEQUENCE + 1)) % VOCABULARY).chunk(mesh.data_size)[mesh.data_rank].to(mesh.device)
    targets = ids[:, 1:]
    loss_sum = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = fsdp_tp.global_mean(loss_sum, targets.numel(), mesh)
    loss.backward()
    norm = fsdp_tp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.6f}  gradient norm {norm.item():.4f}")

torch.distributed.destroy_process_group()
