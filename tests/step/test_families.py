#!/usr/bin/env python3
"""Whole runs of each family: what they come back as, what must not change a bit, what is refused.

That they compute what transformers computes is test_parity.py's and tests/numeric's business.
"""
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from harness import *  # noqa: E402,F403

FROZEN = {"optimizer": {"learning_rate": 0.0, "weight_decay": 0.0}, "training": {"steps": 1}}
COMMON = {"vocab_size": 272, "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": 256,
          "pad_token_id": None, "torch_dtype": "float32"}
USUAL = {**COMMON, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128}
FAMILIES = {
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9, **USUAL},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
              "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True, **USUAL},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **USUAL},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 11,
             "partial_rotary_factor": 0.5, **USUAL},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 8,
               "query_pre_attn_scalar": 20, **USUAL},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 8,
               "sliding_window_pattern": 2, "query_pre_attn_scalar": 20, "tie_word_embeddings": False, **USUAL},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": 10,
                "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
                "router_aux_loss_coef": 0.02, **USUAL},
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
                 "mlp_only_layers": [1], **USUAL},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4,
             "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **COMMON},
}


def config_folder(t, family, name=None, **changes):
    """A folder with a config.json only."""
    folder = os.path.join(t.dir, "model-" + (name or family))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({**FAMILIES[family], **changes}, f, indent=1)
    return folder


def config_of(folder):
    with open(os.path.join(folder, "config.json")) as f:
        return json.load(f)


def same_tensors(found, expected):
    equal(sorted(found), sorted(expected), "tensors")
    for name in expected:
        equal(found[name][:2], expected[name][:2], "dtype and shape of " + name)
        check(found[name][2] == expected[name][2], "%s: the bytes differ" % name)


# -- folders --


def golden_folders():
    return sorted(n for n in os.listdir(GOLDENS) if n.split("_")[0] in FAMILIES)


@test
def golden_folders_come_back_bit_for_bit(t):
    """Import, one step that changes nothing, export: the same tensors and the same config.json."""
    names = golden_folders()
    check(len(names) == 18, "goldens: %s" % names)
    data = write_nanogpt_shard(os.path.join(t.dir, "train.bin"), tokens_of(2000, vocab=60))
    for index, name in enumerate(names):
        folder, dtype = os.path.join(GOLDENS, name), ("float32", "bfloat16")[index % 2]
        run = tiny_run(t.dir, name, hf=folder, file=data, memory={"page_elements": 4096},
                       model={"init": "pretrained", "dtype": dtype, "tokenizer": ""}, **FROZEN)
        run.ok()
        same_tensors(read_weights(run.export_dir(1)), read_weights(folder))
        equal(config_of(run.export_dir(1)), config_of(folder), "config.json of " + name)


@test
def gpt_2_is_read_with_the_names_that_it_has_on_the_hub(t):
    """Without the prefix of the base model, with the causal masks and with the head that it is tied to."""
    golden = os.path.join(GOLDENS, "gpt2_tied_packed")
    full = read_weights(golden)
    data = write_nanogpt_shard(os.path.join(t.dir, "train.bin"), tokens_of(2000, vocab=60))
    mask = ("F32", (1, 1, 4, 4), b"\0" * 64)
    hub = {name[len("transformer."):]: tensor for name, tensor in full.items()}
    hub.update({"h.0.attn.bias": mask, "h.1.attn.masked_bias": ("F32", (), b"\0" * 4), "lm_head.weight":
                full["transformer.wte.weight"]})

    def run_of(name, tensors):
        folder = os.path.join(t.dir, "hf-" + name)
        os.makedirs(folder)
        shutil.copy(os.path.join(golden, "config.json"), folder)
        write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
        return tiny_run(t.dir, name, hf=folder, file=data, model={"init": "pretrained", "tokenizer": ""}, **FROZEN)

    run = run_of("hub", hub)
    run.ok()
    same_tensors(read_weights(run.export_dir(1)), full)
    run = run_of("both", {**full, "wte.weight": full["transformer.wte.weight"]})
    found = run.run(status=USER)
    check("tensor wte.weight: expected no such tensor" in found.err, found.err)
    run = run_of("without", {n: x for n, x in hub.items() if n != "h.1.ln_2.bias"})
    found = run.run(status=USER)
    check("tensor transformer.h.1.ln_2.bias: expected in the weights" in found.err, found.err)


# -- bits --


@test
def bits_do_not_depend_on_how_activations_are_kept(t):
    """Full recomputation, groups of two blocks, nothing recomputed: the same weights after ten steps."""
    for family in FAMILIES:
        folder, reference = config_folder(t, family), None
        for mode in ("full", "every-2", "none"):
            run = tiny_run(t.dir, "%s-%s" % (family, mode), hf=folder, memory={"threads": 2},
                           training={"activation_checkpointing": mode, "steps": 6})
            run.ok()
            weights = read_weights(run.export_dir(6))
            reference = reference or weights
            same_tensors(weights, reference)


@test
def every_family_learns_in_both_precisions(t):
    for family in FAMILIES:
        losses = {}
        for dtype in ("float32", "bfloat16"):
            run = tiny_run(t.dir, "%s-%s" % (family, dtype), hf=config_folder(t, family), model={"dtype": dtype},
                           training={"steps": 40})
            run.ok()
            losses[dtype] = [line["loss"] for line in run.step_lines()]
        first, last = losses["float32"][0], losses["float32"][-1]
        t.note("%s: loss %.3f to %.3f, bfloat16 %.3f" % (family, first, last, losses["bfloat16"][-1]))
        check(last < 0.8 * first, "%s: loss %.3f to %.3f" % (family, first, last))
        check(abs(losses["bfloat16"][-1] / last - 1) < 0.03, "%s: bfloat16 %r" % (family, losses["bfloat16"][-1]))


@test
def text_goes_on_alike_from_a_run_and_from_its_export(t):
    """Longer than every window. The prompt alone, or with a beginning that was generated from it."""
    for family in FAMILIES:
        run = tiny_run(t.dir, family, hf=config_folder(t, family), training={"steps": 20})
        run.ok()

        def text(where, prompt, n):
            return mtlaunch("generate", where, "--prompt", prompt, "--max-new-tokens", str(n), status=DONE).out[:-1]
        whole = text(run.dir, "The story", 40)
        equal(text(run.export_dir(20), "The story", 40), whole, family + ": from the export")
        equal(text(run.dir, whole[:24], 40 - 15), whole, family + ": from its own beginning")


@test
def bits_of_experts_depend_on_no_page_size_and_no_worker(t):
    """An expert has pages of its own whatever their size; three workers share them otherwise than one."""
    for family in ("mixtral", "qwen3moe"):
        folder, reference = config_folder(t, family), None
        for name, size, workers in (("small", 4096, 1), ("large", 1 << 20, 3)):
            run = tiny_run(t.dir, "%s-%s" % (family, name), hf=folder, memory={"page_elements": size},
                           training={"steps": 6}, optimizer={"workers": workers})
            run.ok()
            weights = read_weights(run.export_dir(6))
            reference = reference or weights
            same_tensors(weights, reference)


# -- what is refused --


@test
def experts_in_one_tensor_are_refused_by_name(t):
    """As the library holds them in memory; files have a tensor for each expert."""
    golden = os.path.join(GOLDENS, "mixtral_tied_unpacked")
    tensors = {n: x for n, x in read_weights(golden).items() if ".experts." not in n}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = ("F32", (4, 74, 24), b"\0" * (4 * 4 * 74 * 24))
    folder = os.path.join(t.dir, "hf-fused")
    os.makedirs(folder)
    shutil.copy(os.path.join(golden, "config.json"), folder)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    data = write_nanogpt_shard(os.path.join(t.dir, "train.bin"), tokens_of(2000, vocab=60))
    run = tiny_run(t.dir, hf=folder, file=data, model={"init": "pretrained", "tokenizer": ""}, **FROZEN)
    found = run.run(status=USER)
    check("model.layers.0.mlp.experts.gate_up_proj" in found.err and "hint: " in found.err, found.err)


@test
def dropout_is_refused_for_training_and_not_for_evaluation(t):
    folder = config_folder(t, "gpt2", resid_pdrop=0.1)
    run = tiny_run(t.dir, hf=folder)
    found = run.run(status=USER)
    check("resid_pdrop: expected 0 for training" in found.err and "hint: " in found.err, found.err)
    trained = tiny_run(t.dir, "ok", hf=config_folder(t, "gpt2", "ok"), training={"steps": 2})
    trained.ok()
    export = trained.export_dir(2)
    with open(os.path.join(export, "config.json"), "w") as f:
        json.dump({**FAMILIES["gpt2"], "resid_pdrop": 0.1}, f)
    mtlaunch("eval", export, "--data", trained.sections["data"]["train"][0], "--seq-len", 32, status=DONE)


@test
def a_run_goes_on_only_with_the_model_that_it_began_with(t):
    """A number of config.json that no tensor's shape shows."""
    folder = config_folder(t, "mistral")
    run = tiny_run(t.dir, hf=folder, training={"steps": 4})
    run.change(run={"stop_after_step": 2})
    run.ok(status=STOPPED)
    run.change(run={"stop_after_step": 0})
    config_folder(t, "mistral", sliding_window=10)
    found = run.run(status=USER)
    check("mistral" in found.err and "model" in found.err, found.err)
    config_folder(t, "mistral")
    run.ok()
    run.check_steps(4)


@test
def learned_positions_end(t):
    """GPT-2 has a row for each position: no more than those, in training and in generation."""
    folder = config_folder(t, "gpt2", n_positions=31)
    found = tiny_run(t.dir, hf=folder).run(status=USER)
    check("seq_len = 32" in found.err and "31 positions" in found.err, found.err)
    run = tiny_run(t.dir, "fits", hf=config_folder(t, "gpt2", "fits", n_positions=32), training={"steps": 2})
    run.ok()
    mtlaunch("generate", run.dir, "--prompt", "abcd", "--max-new-tokens", 27, status=DONE)
    found = mtlaunch("generate", run.dir, "--prompt", "abcd", "--max-new-tokens", 60, status=USER)
    check("positions" in found.err, found.err)


main()
