"""A plain FSDP2 training script, before: torchrun --nproc-per-node 4 examples/fsdp2.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(20):
    # Eight rows that count upwards; each rank takes its slice of them.
    rows = torch.randint(0, 64, (8, 1), generator=torch.Generator().manual_seed(step)) + torch.arange(32)
    ids = (rows % 64).chunk(world_size)[rank]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.6f}")

dist.destroy_process_group()
