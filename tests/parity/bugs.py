"""Training jobs with one mistake each, of kinds that people have reported, and the jobs without it.

Each mistake is planted from outside, by a function that :func:`fsdp_tp.parity.assert_parity`
takes: how a model is wrapped, its loss, its optimizer, its clipping.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fsdp_tp
from fsdp_tp.parity import job
from fsdp_tp.regions import copy_to_tensor_axis
from tests import models

WIDTH, HEAD = 16, 4

llama = functools.partial(models.hugging_face, "llama")
llama_with_biases = functools.partial(models.hugging_face, "llama", attention_bias=True)
tied_llama = functools.partial(models.hugging_face, "llama", tie_word_embeddings=True)

batches = [models.batch(step) for step in range(4)]


def uneven_batches():
    """Rows with 1 to 8 tokens that count."""
    found = []
    for ids in batches:
        labels = ids.clone()
        for row, labelled in enumerate(labels):
            labelled[row + 2 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class MultiQueryNet(nn.Module):
    """One block of attention with a single key/value head, which every rank needs whole, and dropout that
    depends on the position alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([MultiQueryBlock()])
        self.head = nn.Linear(WIDTH, models.VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_key_bias():
    """Attention without rotary positions does not depend on it: its gradient is zero but for rounding."""
    model = MultiQueryNet()
    model.layers[0].attention.key = nn.Linear(WIDTH, HEAD)
    return model


class MultiQueryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = MultiQueryAttention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class MultiQueryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, HEAD, bias=False)
        self.value = nn.Linear(WIDTH, HEAD, bias=False)
        self.dropout = PositionalDropout()
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        query = self.query(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        key, value = (projection(x).unsqueeze(1).expand_as(query) for projection in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(self.dropout(mixed.transpose(1, 2).flatten(-2)))


class PositionalDropout(nn.Module):
    """Masks drawn for all features, of which a rank takes its own."""

    same_on_all_ranks = False

    def forward(self, x):
        generator = torch.Generator().manual_seed(11)
        if self.same_on_all_ranks:
            return x * (torch.rand(x.shape[1:], generator=generator) > 0.3)
        mask = torch.rand(x.shape[1], WIDTH, generator=generator) > 0.3
        if x.shape[-1] < WIDTH:
            mask = mask.chunk(WIDTH // x.shape[-1], -1)[dist.get_rank()]
        return x * mask


MULTI_QUERY_PLAN = {
    "embed": "vocab",
    "layers.*.norm": "replicate",
    "layers.*.attention": "shared_input",
    "layers.*.attention.query": "column",
    "layers.*.attention.key": "per_head",
    "layers.*.attention.value": "per_head",
    "layers.*.attention.output": "row",
    "head": "column_gather",
}


def wrap_multi_query(model, mesh, layout, mp_policy, seed):
    return fsdp_tp.wrap(model, mesh, plan=MULTI_QUERY_PLAN, mp_policy=mp_policy, seed=seed)


def unsummed(wrap, parameter, model, *args):
    """The gradient of a whole weight that every rank applies to its own slice is not summed."""
    model = wrap(model, *args)
    module_path, _, name = parameter.rpartition(".")
    owner = model.get_submodule(module_path)
    for module in model.modules():
        entries = getattr(module, "_bound_parameters", [])
        for index, entry in enumerate(entries):
            if entry.module is owner and entry.name == name:
                entries[index] = entry._replace(partial=False)
    return model


def summed_twice(model, mesh, *args):
    """The gradient of the mlp's input is all-reduced once more."""
    model = job.wrap(model, mesh, *args)
    mlp, group = model.model.layers[1].mlp, mesh.tensor.get_group()
    ((name, position, once),) = mlp._argument_regions
    mlp._argument_regions = [(name, position, lambda x: once(copy_to_tensor_axis(x, group)))]
    return model


def mean_of_means(model, batch, mesh, layout):
    """Each rank's own mean, although ranks have different numbers of tokens."""
    logits = model(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def untied(model, *args):
    """The output projection gets a copy of the embedding."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return job.wrap(model, *args)


def dropout_alike(model, *args):
    """Both halves of the features draw the same masks."""
    for module in model.modules():
        if isinstance(module, PositionalDropout):
            module.same_on_all_ranks = True
    return wrap_multi_query(model, *args)


def clip_by_local_norm(parameters, max_norm):
    parameters = list(parameters)
    return torch.nn.utils.clip_grad_norm_([p.grad._local_tensor for p in parameters], max_norm).new_tensor(
        torch.linalg.vector_norm(torch.stack([p.grad._local_tensor.norm() for p in parameters])).item()
    )


def bf16_accumulation(model, mesh, layout, mp_policy, seed):
    """Gradients of micro-batches are added up in bf16."""
    return job.wrap(model, mesh, layout, dataclasses.replace(mp_policy, reduce_dtype=torch.bfloat16), seed)


def rotary_off_by_one(model, mesh, *args):
    """On the second half of the heads one layer's positions are off by one."""
    model = job.wrap(model, mesh, *args)

    def shift(module, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (cos.roll(1, 1), sin.roll(1, 1))}

    if mesh.tensor_rank == 1:
        model.model.layers[1].self_attn.register_forward_pre_hook(shift, with_kwargs=True)
    return model


class SkipsAnUpdate(torch.optim.AdamW):
    replica = 0

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return None if self.steps == 3 and self.replica == 1 else super().step(closure)


def skips_an_update(model, mesh):
    """One replica leaves out its third step."""
    optimizer = SkipsAnUpdate(model.parameters(), lr=1e-3, fused=True)
    optimizer.replica = mesh.coordinate.replicate
    return optimizer


class LosesSecondMoment(torch.optim.AdamW):
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            saved = copy.deepcopy(self.state_dict())
            for state in saved["state"].values():
                state["exp_avg_sq"].zero_()
            self.load_state_dict(saved)
        return super().step(closure)


def loses_second_moment(model, mesh):
    """The third step starts from a checkpoint without AdamW's second moment."""
    return LosesSecondMoment(model.parameters(), lr=1e-3, fused=True)


def plain_adamw(model, mesh):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def stale_weight(model, *args):
    """One layer keeps the weight that it gathered in the first step."""
    model = job.wrap(model, *args)
    layer = model.model.layers[1].mlp.down_proj
    kept = []

    def use_kept(module, args, output):
        if not kept:
            kept.append(module.weight.detach().clone())
            return None
        return F.linear(args[0], kept[0] + 0 * module.weight)

    layer.register_forward_hook(use_kept)
    return model


SMOOTHING = 0.1


def smoothed(model, batch, mesh, layout, *, local=False):
    """Cross entropy with label smoothing; ``local`` spreads it over this rank's slice of the vocabulary."""
    logits, targets = model(batch[:, :-1]).logits, batch[:, 1:]
    if not layout.loss_parallel:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=SMOOTHING)

    def loss(smoothing):
        return fsdp_tp.vocab_parallel_cross_entropy(
            logits, targets, mesh=mesh, reduction="sum", label_smoothing=smoothing
        )

    return (1 - SMOOTHING) * loss(0.0) + SMOOTHING * mesh.tensor_size * loss(1.0) if local else loss(SMOOTHING)


def bias_on_every_rank(model, mesh, *args):
    """A row-parallel layer adds its bias before the sum, so that it counts once a rank."""
    model = job.wrap(model, mesh, *args)

    def add(module, args, output):
        return output + (mesh.tensor_size - 1) * module.bias.to_local()

    model.model.layers[0].self_attn.o_proj.register_forward_hook(add)
    return model


def with_nonzero_biases(build):
    """Hugging Face starts biases at zero, where nobody would see them counted twice."""
    model = build()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model
