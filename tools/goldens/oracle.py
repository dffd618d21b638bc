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
from transformers.models.mixtral import modeling_mixtral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe


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
                     (modeling_gemma3, "Gemma3RMSNorm"), (modeling_gpt2, None),
                     (modeling_mixtral, "MixtralRMSNorm"), (modeling_qwen3_moe, "Qwen3MoeRMSNorm")):
    if norm:
        getattr(module, norm).forward = gemma_norm_forward if "Gemma" in norm else rms_norm_forward
    module.eager_attention_forward = eager_attention

def router_forward(self, x):
    """Mixtral keeps the weights in float32 and always divides them by their sum."""
    mixtral = isinstance(self, modeling_mixtral.MixtralTopKRouter)
    logits = functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    values, experts = torch.topk(functional.softmax(wider(logits), dim=-1), self.top_k, dim=-1)
    if mixtral or self.norm_topk_prob:
        values = values / values.sum(dim=-1, keepdim=True)
    return logits, values if mixtral else values.to(logits.dtype), experts


def balance_loss(router_logits, n_experts, top_k, attention_mask=None):
    """All rows of all layers together; every row counts, whatever the mask."""
    p = functional.softmax(wider(torch.cat(router_logits)), dim=-1)
    slots = functional.one_hot(torch.topk(p, top_k, dim=-1)[1], n_experts).sum(dim=(0, 1)).to(p.dtype)
    return n_experts * (slots / len(p) * p.mean(dim=0)).sum()


library_balance_loss = modeling_mixtral.load_balancing_loss_func
for module, router in ((modeling_mixtral, "MixtralTopKRouter"), (modeling_qwen3_moe, "Qwen3MoeTopKRouter")):
    getattr(module, router).forward = router_forward
    module.load_balancing_loss_func = balance_loss

# These take a mask for each kind of block; the others one mask, which has the window in it.
BY_LAYER_TYPE = ("qwen2", "qwen3", "gemma2", "gemma3_text")


def load(folder, dtype):
    """The model of a folder, every key accounted for, computing in `dtype`."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True)
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
    out = model(input_ids=at["tokens"], use_cache=False, **extra)
    return summed_loss(out.logits, at["labels"]) + added_loss(model, out), out.logits


def added_loss(model, out):
    """What the class adds to the loss of the tokens: load balancing, where the config asks for it."""
    if getattr(out, "aux_loss", None) is None:
        return 0.0
    plain = library_balance_loss(tuple(l.detach().float() for l in out.router_logits), model.num_experts,
                                 model.num_experts_per_tok)
    assert abs(plain.item() / out.aux_loss.item() - 1) < 1e-5, "two formulas of the load balancing loss"
    return model.router_aux_loss_coef * out.aux_loss


def hub_names(model, tensors):
    """Parameters by the names that they have in files: the library holds all experts of a block in one."""
    out = {}
    for name, t in tensors.items():
        block, _, which = name.rpartition(".experts.")
        mixtral = model.config.model_type == "mixtral"
        inside = block.replace(".mlp", ".block_sparse_moe") if mixtral else block
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        if which == "gate_up_proj":
            for e, both in enumerate(t):
                at = f"{inside}.experts.{e}."
                out[at + gate + ".weight"], out[at + up + ".weight"] = (half.clone() for half in both.chunk(2))
        elif which == "down_proj":
            for e, one in enumerate(t):
                out[f"{inside}.experts.{e}.{down}.weight"] = one.clone()
        elif mixtral and name.endswith(".mlp.gate.weight"):
            out[name.replace(".mlp.", ".block_sparse_moe.")] = t
        else:
            out[name] = t
    return out


def gradients(model):
    return hub_names(model, {name: p.grad.detach().clone() for name, p in model.named_parameters()})


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
    out["after"] = hub_names(model, {name: p.detach().clone() for name, p in model.named_parameters()})
    return out
