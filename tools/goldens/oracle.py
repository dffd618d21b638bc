"""Hugging Face transformers as the oracle: forward, backward and training steps in any precision.

`model.double()` alone is not float64: transformers computes RMSNorm and the softmax in float32
whatever the dtype. Both are replaced here by the same formulas in the wider of the two; at float32
and below they do exactly what the library does. Rope stays as transformers has it at every dtype:
angles, cos and sin are float32 (the definition of the model), then cast to the compute dtype.
"""

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama


def rms_norm_forward(self, x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * wide.to(x.dtype)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    key = modeling_llama.repeat_kv(key, module.num_key_value_groups)
    value = modeling_llama.repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    probabilities = functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


modeling_llama.LlamaRMSNorm.forward = rms_norm_forward
modeling_llama.eager_attention_forward = eager_attention


def load(folder, dtype):
    """The model of a folder, every key accounted for, computing in `dtype`."""
    model, info = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise SystemExit(f"{folder}: {kind}: {sorted(info[kind])}")
    return model.to(dtype).eval()


def block_mask(document, dtype):
    """(B, 1, T, T) additive: causal and within the document."""
    length = document.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = document[:, :, None] == document[:, None, :]
    mask = torch.zeros(document.shape[0], 1, length, length, dtype=dtype)
    return mask.masked_fill(~(causal & same)[:, None], torch.finfo(dtype).min)


def summed_loss(logits, labels):
    """Sum over labelled tokens / their number; never below float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    flat = labels.reshape(-1)
    return functional.cross_entropy(wide, flat, ignore_index=-1, reduction="sum") / (flat != -1).sum()


def forward(model, batch, step, packed):
    """(loss, logits) of one step's batch."""
    at = {k: torch.from_numpy(v[step]).long() for k, v in batch.items()}
    extra = {}
    if packed:
        extra["attention_mask"] = block_mask(at["document"], model.dtype)
        extra["position_ids"] = at["position"]
    logits = model(input_ids=at["tokens"], use_cache=False, **extra).logits
    return summed_loss(logits, at["labels"]), logits


def gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def adamw(model, meta):
    """torch's AdamW; one-dimensional tensors are exempt from decay."""
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == decays],
               "weight_decay": meta["weight_decay"] if decays else 0.0} for decays in (True, False)]
    return torch.optim.AdamW(groups, lr=0.0, betas=tuple(meta["betas"]), eps=meta["eps"])


def train(model, batch, meta, packed):
    """All steps. Returns loss and norm of each, and of step 1 the logits and unclipped gradients."""
    optimizer = adamw(model, meta)
    out = {"losses": [], "grad_norms": []}
    for step, rate in enumerate(meta["lr_per_step"]):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss, logits = forward(model, batch, step, packed)
        loss.backward()
        if step == 0:
            out["logits"], out["grads"] = logits.detach(), gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), meta["max_grad_norm"])
        optimizer.step()
        out["losses"].append(loss.item())
        out["grad_norms"].append(norm.item())
    out["after"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out
