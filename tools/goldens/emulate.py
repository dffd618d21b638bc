"""A Llama written out by hand, with a rounding to bfloat16 wherever transformers has one.

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

import torch
from torch.nn import functional

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


class Llama:
    """weights: tensors by Hugging Face name, of the arithmetic's dtype. cos, sin: (B, T, head_dim)."""

    def __init__(self, config, weights, rounding):
        self.config, self.weights = config, weights
        rounds, eager = rounding is not Rounding.NONE, rounding is Rounding.EAGER
        self.r = RoundBoth.apply if rounds else same
        self.g = RoundGradient.apply if rounds else same
        self.r_eager = RoundBoth.apply if eager else same
        self.g_eager = RoundGradient.apply if eager else same

    def linear(self, x, name):
        return self.r(self.g(x) @ self.weights[name + ".weight"].T)

    def norm(self, x, name):
        x = self.g(x)
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.r(self.weights[name + ".weight"] * self.r(normalized))

    def rope(self, x, cos, sin):  # x (B, H, T, D)
        half = x.shape[-1] // 2
        straight = self.r(self.g(x) * cos[:, None])
        turned = self.g(x)
        turned = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        return self.r(straight + self.r(turned * sin[:, None]))

    def attend(self, q, k, v, blocked):  # (B, H, T, D) each, blocked (B, T, T) bool
        scores = self.r_eager(self.g(q) @ self.g(k).transpose(2, 3))
        scores = self.r_eager(scores * self.config["head_dim"] ** -0.5)
        scores = scores.masked_fill(blocked[:, None], -torch.inf)
        probabilities = self.r_eager(functional.softmax(self.g_eager(scores), -1))
        return self.r(self.g_eager(probabilities) @ self.g(v))

    def attention(self, x, at, rotation, blocked):
        rows, length, c = x.shape[0], x.shape[1], self.config

        def heads(name, count):
            flat = self.linear(x, at + name)
            return flat.view(rows, length, count, c["head_dim"]).transpose(1, 2)

        q = self.rope(heads("q_proj", c["num_attention_heads"]), *rotation)
        k = self.rope(heads("k_proj", c["num_key_value_heads"]), *rotation)
        v = heads("v_proj", c["num_key_value_heads"])
        group = c["num_attention_heads"] // c["num_key_value_heads"]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = self.attend(q, k, v, blocked)
        return self.linear(mixed.transpose(1, 2).reshape(rows, length, -1), at + "o_proj")

    def mlp(self, x, at):
        gate, up = self.linear(x, at + "gate_proj"), self.linear(x, at + "up_proj")
        activated = self.r(functional.silu(self.g(gate)))
        return self.linear(self.r(self.g(activated) * self.g(up)), at + "down_proj")

    def logits(self, tokens, rotation, blocked):
        h = self.r(functional.embedding(tokens, self.weights["model.embed_tokens.weight"],
                                        self.config.get("pad_token_id")))
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = self.norm(h, at + "input_layernorm")
            h = self.r(h + self.attention(x, at + "self_attn.", rotation, blocked))
            x = self.norm(h, at + "post_attention_layernorm")
            h = self.r(h + self.mlp(x, at + "mlp."))
        x = self.g(self.norm(h, "model.norm"))
        tied = self.config["tie_word_embeddings"]
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self.r_eager(x @ head.T)


def run(config, weights, batch, rotation, rounding):
    """(loss, {name: gradient}) of step 1. `rotation`: float32 cos and sin of the rope."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    dtype = leaves["model.norm.weight"].dtype
    if rounding is not Rounding.NONE:
        rotation = [to_bfloat16(part) for part in rotation]
    at = {k: torch.from_numpy(v[0]).long() for k, v in batch.items()}
    length = at["tokens"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    blocked = ~(causal & (at["document"][:, :, None] == at["document"][:, None, :]))
    model = Llama(config, leaves, rounding)
    logits = model.logits(at["tokens"], [part.to(dtype) for part in rotation], blocked)
    loss = oracle.summed_loss(logits, at["labels"])
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items()}
