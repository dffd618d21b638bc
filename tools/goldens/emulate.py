"""The models written out by hand, with a rounding to bfloat16 wherever transformers has one.

Every operation of a bf16 model reads bf16 and writes bf16, in both directions. Here arithmetic is
float32 and an operation is  r(f(g(x)))  with
    r  rounds the value (nearest even) forward and the accumulated gradient backward,
    g  rounds the gradient that this one operation sends back,
so that a tensor with several readers (q, k, v of one norm; the residual) sees each of their
gradients rounded and then their sum, as autograd in bf16 does. Gradients of weights stay float32.

    Rounding.NONE    nothing rounded: in float64 it must reproduce transformers, a check of both
    Rounding.DESIGN  scores, softmax, logits and cross entropy stay float32, the rest rounded
    Rounding.EAGER   all of them rounded too, as transformers' eager attention does
"""

import enum
import math

import torch
from torch.nn import functional

import cases
import oracle


class Rounding(enum.Enum):
    NONE = 0
    DESIGN = 1
    EAGER = 2


def to_bfloat16(x):
    return x.to(torch.bfloat16).to(x.dtype)


class RoundBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return to_bfloat16(x)

    @staticmethod
    def backward(ctx, gradient):
        return to_bfloat16(gradient)


class RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return to_bfloat16(gradient)


def same(x):
    return x


def tanh_gelu(x):
    return functional.gelu(x, approximate="tanh")


class Options:
    """What a config.json asks for, read here once more and by nobody else."""

    def __init__(self, c):
        kind = c["model_type"]
        self.kind, self.gpt2 = kind, kind == "gpt2"
        self.gemma = kind in ("gemma2", "gemma3_text")
        self.hidden = c["n_embd"] if self.gpt2 else c["hidden_size"]
        self.layers = c["n_layer"] if self.gpt2 else c["num_hidden_layers"]
        self.heads = c["n_head"] if self.gpt2 else c["num_attention_heads"]
        self.kv_heads = c.get("num_key_value_heads") or self.heads
        self.head_dim = c.get("head_dim") or self.hidden // self.heads
        self.eps = c["layer_norm_epsilon"] if self.gpt2 else c["rms_norm_eps"]
        self.qk_norm = kind in ("qwen3", "qwen3_moe", "gemma3_text")
        self.mixtral = kind == "mixtral"
        self.sparse = [cases.has_experts(c, i) for i in range(self.layers)]
        self.experts = c.get("num_local_experts") or c.get("num_experts")
        self.per_token = c.get("num_experts_per_tok")
        self.norm_topk = self.mixtral or c.get("norm_topk_prob", False)
        self.balance = c.get("router_aux_loss_coef", 0.001) if c.get("output_router_logits") else 0.0
        self.scaling = (c["query_pre_attn_scalar"] if self.gemma else self.head_dim) ** -0.5
        self.attention_cap = c.get("attn_logit_softcapping") if kind == "gemma2" else None
        self.final_cap = c.get("final_logit_softcapping") if self.gemma else None
        name = c.get("activation_function") or c.get("hidden_activation") or c["hidden_act"]
        self.gelu_new = name == "gelu_new"
        self.act = {"silu": functional.silu, "gelu_pytorch_tanh": tanh_gelu, "gelu": functional.gelu,
                    "gelu_new": tanh_gelu}[name]
        self.tied = c["tie_word_embeddings"]
        self.pad = None if self.gpt2 else c.get("pad_token_id")
        # a float32 buffer in the library, whatever the dtype
        self.scale = torch.tensor(self.hidden**0.5, dtype=torch.float32).item() if self.gemma else None
        self.windows = [c["sliding_window"] if slides else None for slides in slides_of(c, kind, self.layers)]


def slides_of(c, kind, layers):
    """Which blocks have a window."""
    if c.get("layer_types"):
        return [t == "sliding_attention" for t in c["layer_types"]]
    if kind in ("qwen2", "qwen3"):
        return [bool(c.get("use_sliding_window")) and i >= c.get("max_window_layers", 28) for i in range(layers)]
    if kind in ("mistral", "mixtral", "phi3"):
        return [c.get("sliding_window") is not None] * layers
    if kind == "qwen3_moe":
        return [bool(c.get("use_sliding_window")) and c.get("sliding_window") is not None] * layers
    pattern = {"gemma2": 2, "gemma3_text": c.get("sliding_window_pattern", 6)}.get(kind)
    return [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]


class Model:
    """weights: tensors by Hugging Face name, of the arithmetic's dtype."""

    def __init__(self, config, weights, rounding):
        self.o, self.weights = Options(config), weights
        rounds, eager = rounding is not Rounding.NONE, rounding is Rounding.EAGER
        self.r = RoundBoth.apply if rounds else same
        self.g = RoundGradient.apply if rounds else same
        self.r_eager = RoundBoth.apply if eager else same
        self.g_eager = RoundGradient.apply if eager else same
        self.rounds = rounds

    # -- pieces --

    def linear(self, x, name):
        """GPT-2's matrices lie the other way."""
        w, bias = self.weights[name + ".weight"], self.weights.get(name + ".bias")
        y = self.g(x) @ (w if self.o.gpt2 else w.T)
        return self.r(y if bias is None else y + bias)

    def norm(self, x, name):
        x, w = self.g(x), self.weights[name + ".weight"]
        if self.o.gpt2:
            return self.r(functional.layer_norm(x, x.shape[-1:], w, self.weights[name + ".bias"], self.o.eps))
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.o.eps)
        return self.r(normalized * (1 + w)) if self.o.gemma else self.r(w * self.r(normalized))

    def activation(self, x):
        if not (self.o.gelu_new and self.rounds):
            return self.r(self.o.act(self.g(x)))
        r, g = self.r, self.g  # the library's expression, operation by operation
        cube = r(0.044715 * g(r(g(x).pow(3.0))))
        inner = r(math.sqrt(2.0 / math.pi) * g(r(x + cube)))
        return r(g(r(0.5 * g(x))) * g(r(1.0 + r(torch.tanh(g(inner))))))

    def rope(self, x, rotation):  # x (B, H, T, D); only the first dimensions of a head may turn
        if rotation is None:
            return x
        cos, sin = rotation
        turns = cos.shape[-1]
        still, x = x[..., turns:], x[..., :turns]
        straight = self.r(self.g(x) * cos[:, None])
        turned = self.g(x)
        turned = torch.cat((-turned[..., turns // 2 :], turned[..., : turns // 2]), -1)
        return torch.cat((self.r(straight + self.r(turned * sin[:, None])), still), -1)

    def cap(self, x, cap):
        if cap is None:
            return x
        x = self.r_eager(self.g_eager(x) / cap)
        return self.r_eager(self.g_eager(self.r_eager(torch.tanh(self.g_eager(x)))) * cap)

    def attend(self, q, k, v, blocked):  # (B, H, T, D) each, blocked (B, T, T) bool
        scores = self.r_eager(self.g(q) @ self.g(k).transpose(2, 3))
        scores = self.cap(self.r_eager(scores * self.o.scaling), self.o.attention_cap)
        scores = scores.masked_fill(blocked[:, None], -torch.inf)
        probabilities = self.r_eager(functional.softmax(self.g_eager(scores), -1))
        return self.r(self.g_eager(probabilities) @ self.g(v))

    # -- the block --

    def q_k_v(self, x, at):
        """Flat; of separate or fused matrices."""
        o = self.o
        q, kv = o.heads * o.head_dim, o.kv_heads * o.head_dim
        fused = {"gpt2": "attn.c_attn", "phi3": "self_attn.qkv_proj"}.get(o.kind)
        if not fused:
            return [self.linear(x, at + f"self_attn.{n}_proj") for n in "qkv"]
        return self.linear(x, at + fused).split((q, kv, kv), -1)

    def attention(self, x, at, rotation, blocked):
        rows, length, o = x.shape[0], x.shape[1], self.o
        q, k, v = (part.view(rows, length, -1, o.head_dim) for part in self.q_k_v(x, at))
        if o.qk_norm:
            q, k = self.norm(q, at + "self_attn.q_norm"), self.norm(k, at + "self_attn.k_norm")
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = self.rope(q, rotation), self.rope(k, rotation)
        group = o.heads // o.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = self.attend(q, k, v, blocked)
        out = "attn.c_proj" if o.gpt2 else "self_attn.o_proj"
        return self.linear(mixed.transpose(1, 2).reshape(rows, length, -1), at + out)

    def mlp(self, x, at):
        o = self.o
        if o.gpt2:
            return self.linear(self.activation(self.linear(x, at + "mlp.c_fc")), at + "mlp.c_proj")
        if o.kind == "phi3":
            gate, up = self.linear(x, at + "mlp.gate_up_proj").chunk(2, -1)
        else:
            gate, up = self.linear(x, at + "mlp.gate_proj"), self.linear(x, at + "mlp.up_proj")
        return self.linear(self.r(self.g(self.activation(gate)) * self.g(up)), at + "mlp.down_proj")

    def experts(self, x, at):
        """x (B, T, C). Each expert of each token on its own; the library's order of sums is that of the experts."""
        o, shape = self.o, x.shape
        x = x.reshape(-1, shape[-1])
        logits = self.linear(x, at + "gate")
        p = functional.softmax(self.g(logits), -1)  # float32 in the library, whatever the dtype
        self.routed.append(p)
        weights, chosen = torch.topk(p, o.per_token, dim=-1)
        if o.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if not o.mixtral:
            weights = self.r(weights)
        gate, up, down = ("w1", "w3", "w2") if o.mixtral else ("gate_proj", "up_proj", "down_proj")
        mixed = torch.zeros_like(x)
        for e in range(o.experts):
            rows, place = torch.where(chosen == e)
            if not len(rows):
                continue
            w = {n: self.weights[f"{at}experts.{e}.{n}.weight"] for n in (gate, up, down)}
            both = self.r(self.g(self.g(x)[rows]) @ torch.cat((w[gate], w[up])).T)
            left, right = both.chunk(2, -1)
            y = self.r(self.g(self.r(self.g(self.activation(left)) * self.g(right))) @ w[down].T)
            weight = weights[rows, place, None]
            mixed = self.r(mixed.index_add(0, rows, self.r(self.g(y) * (weight if o.mixtral else self.g(weight)))))
        return mixed.view(shape)

    def chosen(self):
        """Which experts the last logits() took, as sets: sorted."""
        return [torch.topk(p, self.o.per_token, dim=-1)[1].sort(-1)[0] for p in self.routed]

    def balance(self):
        """The load balancing loss of the last logits(), with its coefficient."""
        if not self.o.balance:
            return 0.0
        p = torch.cat(self.routed)
        slots = functional.one_hot(torch.topk(p, self.o.per_token, dim=-1)[1], self.o.experts).sum((0, 1)).to(p.dtype)
        return self.o.balance * self.o.experts * (slots / len(p) * p.mean(0)).sum()

    def block(self, h, at, rotation, blocked, sparse=False):
        if self.o.gpt2:
            h = self.r(h + self.attention(self.norm(h, at + "ln_1"), at, rotation, blocked))
            return self.r(h + self.mlp(self.norm(h, at + "ln_2"), at))
        added = self.attention(self.norm(h, at + "input_layernorm"), at, rotation, blocked)
        if not self.o.gemma:
            h = self.r(h + added)
            normed = self.norm(h, at + "post_attention_layernorm")
            if sparse:
                return self.r(h + self.experts(normed, at + ("block_sparse_moe." if self.o.mixtral else "mlp.")))
            return self.r(h + self.mlp(normed, at))
        h = self.r(h + self.norm(added, at + "post_attention_layernorm"))
        added = self.mlp(self.norm(h, at + "pre_feedforward_layernorm"), at)
        return self.r(h + self.norm(added, at + "post_feedforward_layernorm"))

    # -- the model --

    def embed(self, tokens, position):
        o = self.o
        table = self.weights["transformer.wte.weight" if o.gpt2 else "model.embed_tokens.weight"]
        h = self.r(functional.embedding(tokens, table, o.pad))
        if o.gpt2:
            return self.r(h + self.r(functional.embedding(position, self.weights["transformer.wpe.weight"])))
        if o.scale:
            scale = to_bfloat16(torch.tensor(o.scale)).item() if self.rounds else o.scale
            h = self.r(self.g(h) * scale)
        return h

    def logits(self, at, rotations):
        """at: tokens, document, position (B, T). rotations: of a block by whether it slides."""
        o = self.o
        self.routed = []
        h = self.embed(at["tokens"], at["position"])
        for layer in range(o.layers):
            window = o.windows[layer]
            name = f"transformer.h.{layer}." if o.gpt2 else f"model.layers.{layer}."
            h = self.block(h, name, rotations[bool(window)], blocked_of(at["document"], window), o.sparse[layer])
        x = self.g(self.norm(h, "transformer.ln_f" if o.gpt2 else "model.norm"))
        embedding = "transformer.wte.weight" if o.gpt2 else "model.embed_tokens.weight"
        head = self.weights[embedding if o.tied else "lm_head.weight"]
        return self.cap(self.r_eager(x @ head.T), o.final_cap)


def blocked_of(document, window):
    """(B, T, T) bool: what a token does not see."""
    index = torch.arange(document.shape[1])
    back = index[:, None] - index[None]
    hidden = (back < 0) | ((back >= window) if window else torch.zeros_like(back, dtype=torch.bool))
    return hidden | (document[:, :, None] != document[:, None, :])


def rotations_of(model, position, rounding, dtype):
    """cos and sin of the library's rotary embedding, for blocks that do not slide and that do."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return {False: None, True: None}
    one = torch.zeros(1, dtype=torch.float32)
    if model.config.model_type == "gemma3_text":
        pairs = {False: rotary(one, position, "full_attention"), True: rotary(one, position, "sliding_attention")}
    else:
        pairs = dict.fromkeys((False, True), rotary(one, position))
    def turned(part):
        return (part if rounding is Rounding.NONE else to_bfloat16(part)).to(dtype)
    return {slides: tuple(turned(part) for part in pair) for slides, pair in pairs.items()}


def run(config, weights, batch, library, rounding):
    """(loss, {name: gradient}, experts of each token) of step 1. `library`: the model whose rotary embedding is used."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    dtype = next(iter(leaves.values())).dtype
    at = {k: torch.from_numpy(v[0]).long() for k, v in batch.items()}
    rotations = rotations_of(library, at["position"], rounding, dtype)
    model = Model(config, leaves, rounding)
    loss = oracle.summed_loss(model.logits(at, rotations), at["labels"]) + model.balance()
    loss.backward()
    return loss.item(), {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                         for name, leaf in leaves.items()}, model.chosen()
