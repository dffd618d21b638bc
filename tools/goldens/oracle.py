"""Hugging Face transformers as the oracle: forward, backward and training steps in any precision.

`model.double()` alone is not float64: transformers computes RMSNorm and the softmax in float32
whatever the dtype. Both are replaced here by the same formulas in the wider of the two; at float32
and below they do exactly what the library does. Rope stays as transformers has it at every dtype:
angles, cos and sin are float32 (the definition of the model), then cast to the compute dtype.
"""

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3


def wider(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm_forward(self, x):
    wide = wider(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * wide.to(x.dtype)


def gemma_norm_forward(self, x):
    wide = wider(x)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
    return (wide * (1.0 + wider(self.weight))).to(x.dtype)


def eager_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **_):
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    probabilities = functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


for module, norm in ((modeling_llama, "LlamaRMSNorm"), (modeling_mistral, "MistralRMSNorm"),
                     (modeling_qwen2, "Qwen2RMSNorm"), (modeling_qwen3, "Qwen3RMSNorm"),
                     (modeling_phi3, "Phi3RMSNorm"), (modeling_gemma2, "Gemma2RMSNorm"),
                     (modeling_gemma3, "Gemma3RMSNorm"), (modeling_gpt2, None)):
    if norm:
        getattr(module, norm).forward = gemma_norm_forward if "Gemma" in norm else rms_norm_forward
    module.eager_attention_forward = eager_attention

# These take a mask for each kind of block; the others one mask, which has the window in it.
BY_LAYER_TYPE = ("qwen2", "qwen3", "gemma2", "gemma3_text")


def load(folder, dtype):
    """The model of a folder, every key accounted for, computing in `dtype`."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise SystemExit(f"{folder}: {kind}: {sorted(info[kind])}")
    return model.to(dtype).eval()


def block_mask(document, dtype, window=None):
    """(B, 1, T, T) additive: causal, within the document, and the last `window` tokens of it."""
    length = document.shape[-1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        visible &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
    same = document[:, :, None] == document[:, None, :]
    mask = torch.zeros(document.shape[0], 1, length, length, dtype=dtype)
    return mask.masked_fill(~(visible & same)[:, None], torch.finfo(dtype).min)


def masks(model, document):
    """What a packed batch gives the model as attention_mask."""
    window = getattr(model.config, "sliding_window", None)
    full, windowed = (block_mask(document, model.dtype, w) for w in (None, window))
    if model.config.model_type in BY_LAYER_TYPE:
        return {"full_attention": full, "sliding_attention": windowed}
    return windowed


def summed_loss(logits, labels):
    """Sum over labelled tokens / their number; never below float32."""
    wide = wider(logits).reshape(-1, logits.shape[-1])
    flat = labels.reshape(-1)
    return functional.cross_entropy(wide, flat, ignore_index=-1, reduction="sum") / (flat != -1).sum()


def forward(model, batch, step, packed):
    """(loss, logits) of one step's batch."""
    at = {k: torch.from_numpy(v[step]).long() for k, v in batch.items()}
    extra = {}
    if packed:
        extra["attention_mask"] = masks(model, at["document"])
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
