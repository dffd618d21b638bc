"""Whole runs: from the bytes of data files to the weights after the last step.

The other cases hand tokens and labels to the layers. These begin where a run begins, with files, so
that reading, packing, labels, order, schedule, accumulation, clipping, AdamW, exemptions and export
are in the comparison too. The rules are written here once more, from the documentation of
io_worker/data.h and launcher/schedule.h and from torch, and share no code with them:

    a stream    the tokens of all files in order; a document ends with the end-of-document id or
                with its file; text: the bytes of each line's "text", then 256
    packed      sample i is stream[i T : i T + T]; shards look one token further for the last label
    unpacked    each document cut every T tokens, the rest of a sample padded with the
                end-of-document id; a piece without any label is left out
    labels      the next token of the sample, none where a document ends
    order       sample q of the run is q modulo their number (shuffle = false)

A variant is the same run with one mistake. Its numbers are stored so that the test can show that
it would have noticed.
"""

import fnmatch
import json
import math
import struct

import numpy
import torch

import cases
import emulate
import oracle

BYTES_END = 256
LLMC = {"llmc16": (20240520, 1, "<u2"), "llmc32": (20240801, 7, "<u4")}
# of a variant: the one that the model has, and the vectors
FULL_TENSORS = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight",
                "transformer.h.0.attn.c_attn.weight")


# -- files: made from the case, then read back from their bytes --


def shard_tokens(rng, case, count):
    """Skewed ids, documents from one token up; the padding id and the highest id occur."""
    vocab, end = case["config"]["vocab_size"], case["config"]["eos_token_id"]
    tokens = (vocab * rng.random(count) ** 2).astype(numpy.int64)
    tokens[tokens == end] = 1
    at = 0
    while at < count:
        at += int(rng.choice(case["document_lengths"]))
        if at < count:
            tokens[at] = end
    return tokens


def text_documents(rng, case, count):
    """Words of some letters, with escapes and letters of several bytes; empty and one-byte texts."""
    letters = list("aaeeiou tnsrhl\n\"\\\t") + ["é", "日", "🙂"]
    documents = []
    for number in range(count):
        length = int(rng.choice(case["document_lengths"]))
        documents.append("".join(letters[int(len(letters) * rng.random() ** 1.5)] for _ in range(length)))
        if number % 7 == 3:
            documents.append("")
    return documents


def write_data(folder, name, rng, case, count):
    kind = case["data"]
    if kind == "jsonl":
        lines = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0)
                 for i, text in enumerate(text_documents(rng, case, count))]
        (folder / name).write_text("\n".join(lines[:2] + [""] + lines[2:]), encoding="utf-8")
        return
    tokens = shard_tokens(rng, case, count)
    if kind == "nanogpt":
        (folder / name).write_bytes(tokens.astype("<u2").tobytes())
        return
    magic, version, dtype = LLMC[kind]
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    (folder / name).write_bytes(header + tokens.astype(dtype).tobytes())


def read_documents(path, kind, end):
    """Lists of ids, each with its end-of-document id where the file has one."""
    content = path.read_bytes()
    if kind == "jsonl":
        texts = [json.loads(line)["text"] for line in content.decode("utf-8").split("\n") if line.strip()]
        return [list(text.encode("utf-8")) + [BYTES_END] for text in texts if text]
    if kind == "nanogpt":
        ids = numpy.frombuffer(content, "<u2").tolist()
    else:
        ids = numpy.frombuffer(content[1024:], LLMC[kind][2]).tolist()
    documents, current = [], []
    for token in ids:
        current.append(token)
        if token == end:
            documents.append(current)
            current = []
    return documents + ([current] if current else [])


# -- samples --


def padded(sample, length, end):
    """A list of (token, label, document, position) -> arrays of one row."""
    number = sample[-1][2] + 1
    rest = [(end, -1, number, i) for i in range(length - len(sample))]
    return numpy.array(sample + rest, numpy.int64)


def packed_samples(documents, case, keep_partial):
    length, shards = case["seq_len"], case["data"] != "jsonl"
    stream = [(token, number, index == len(document) - 1)
              for number, document in enumerate(documents) for index, token in enumerate(document)]
    out = []
    for start in range(0, len(stream), length):
        window = stream[start : start + length + (1 if shards else 0)]
        if not keep_partial and len(window) < length + (1 if shards else 0):
            break
        rows, position = [], 0
        for i, (token, number, last) in enumerate(window[:length]):
            label = -1 if last or i + 1 >= len(window) else window[i + 1][0]
            rows.append((token, label, number, position))
            position = 0 if last else position + 1
        out.append(padded(rows, length, case["end"]))
    return out


def unpacked_samples(documents, case):
    length, shards = case["seq_len"], case["data"] != "jsonl"
    out = []
    for document in documents:
        for start in range(0, len(document), length):
            window = document[start : start + length + (1 if shards else 0)]
            if len(window) < 2:
                continue
            rows = [(token, window[i + 1] if i + 1 < len(window) else -1, 0, i)
                    for i, token in enumerate(window[:length])]
            out.append(padded(rows, length, case["end"]))
    return out


def samples_of(paths, case, keep_partial=False):
    """(n, T, 4) int64: token, label, document, position."""
    documents = [d for path in paths for d in read_documents(path, case["data"], case["end"])]
    rows = packed_samples(documents, case, keep_partial) if case["packing"] else unpacked_samples(documents, case)
    return torch.from_numpy(numpy.stack(rows))


def microbatch(samples, first, case):
    index = [q % len(samples) for q in range(first, first + case["micro_batch_size"])]
    return samples[index].unbind(-1)


# -- schedule and optimizer --


def learning_rate(case, update):
    """Of update k = step - 1: warm-up lr (k + 1) / w, then the fall to min_lr_ratio."""
    s, steps = case["scheduler"], cases.STEPS
    base, floor, warm = case["learning_rate"], s["min_lr_ratio"], s["warmup_steps"]
    if update < warm:
        return base * (update + 1) / warm
    if s["type"] == "wsd":
        span = s["decay_ratio"] * steps
        return base * (1 - (1 - floor) * max(0.0, update - (steps - span)) / span)
    progress = (update - warm) / (steps - warm)
    if s["type"] == "linear":
        return base * (1 - (1 - floor) * progress)
    return base * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(named, case, variant):
    def decays(name, parameter):
        return variant == "decay_everywhere" or (
            parameter.ndim > 1 and not any(fnmatch.fnmatchcase(name, p) for p in case["no_decay"]))
    wd = 0.0 if variant == "no_decay_at_all" else case["weight_decay"]
    groups = [{"params": [p for n, p in named if decays(n, p) == yes], "weight_decay": wd if yes else 0.0}
              for yes in (True, False)]
    groups = [g for g in groups if g["params"]]
    kind = torch.optim.Adam if variant == "adam_l2" else torch.optim.AdamW
    return kind(groups, lr=0.0, betas=tuple(case["betas"]), eps=case["eps"])


# -- the run --


class Transformers:
    """The oracle: transformers in the dtype asked for, explicit 4-D masks and positions. loss_sum() leaves in
    `added` what the microbatch's own loss has beside that of the tokens."""

    def __init__(self, folder, case, dtype, variant):
        self.model, self.variant = oracle.load(folder, dtype), variant
        embedding = self.model.get_input_embeddings()
        if variant == "pad_trained":
            embedding.padding_idx = None
        elif embedding.padding_idx != pad_of(case):
            raise SystemExit(f"{case['name']}: transformers has another padding_idx")

    def named(self):
        return list(self.model.named_parameters())

    def hub_names(self, tensors):
        return oracle.hub_names(self.model, tensors)

    def loss_sum(self, tokens, labels, document, position):
        if self.variant == "documents_not_masked":
            document = torch.zeros_like(document)
        if self.variant == "labels_one_too_far":
            labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -1)), 1)
        masks = oracle.masks(self.model, document)
        if self.variant == "window_ignored":
            full = oracle.block_mask(document, self.model.dtype)
            masks = dict.fromkeys(masks, full) if isinstance(masks, dict) else full
        out = self.model(input_ids=tokens, position_ids=position, use_cache=False, attention_mask=masks)
        self.added = 0.0 if self.variant == "not_balanced" else oracle.added_loss(self.model, out)
        return oracle.summed_loss(out.logits, labels) * (labels >= 0).sum()


class Emulation:
    """bf16 compute on f32 masters: emulate.py's rounding points on the high halves of the masters."""

    def __init__(self, folder, case, weights, high_half):
        self.case, self.high_half = case, high_half
        self.library = oracle.load(folder, torch.float32)
        self.masters = {n: torch.nn.Parameter(torch.from_numpy(w.copy())) for n, w in weights.items()}

    def named(self):
        return list(self.masters.items())

    def hub_names(self, tensors):
        return tensors

    def loss_sum(self, tokens, labels, document, position):
        high = {n: p + (torch.from_numpy(self.high_half(p.detach().numpy())) - p).detach()
                for n, p in self.masters.items()}  # the gradient passes to the master as it is
        rotations = emulate.rotations_of(self.library, position, emulate.Rounding.DESIGN, torch.float32)
        model = emulate.Model(self.case["config"], high, emulate.Rounding.DESIGN)
        at = {"tokens": tokens, "document": document, "position": position}
        loss = oracle.summed_loss(model.logits(at, rotations), labels) * (labels >= 0).sum()
        self.added = model.balance()
        return loss


def pad_of(case):
    """The row of the embedding that look-ups do not train; GPT-2 trains all."""
    config = case["config"]
    return None if config["model_type"] == "gpt2" else config.get("pad_token_id")


def labelled(batch):
    return int((batch[1] >= 0).sum())


def evaluate(model, samples):
    with torch.no_grad():
        parts = [(model.loss_sum(*row.unsqueeze(0).unbind(-1)).item(), int((row[:, 1] >= 0).sum()))
                 for row in samples if (row[:, 1] >= 0).any()]
    tokens = sum(n for _, n in parts)
    return sum(loss for loss, _ in parts) / tokens, tokens


def train(model, samples, case, variant=""):
    """All steps: losses, norms, labelled tokens, rates."""
    optimizer = optimizer_of(model.named(), case, variant)
    parameters = [p for _, p in model.named()]
    out = {"losses": [], "grad_norms": [], "labelled": [], "rates": []}
    count = case["gradient_accumulation_steps"]
    for step in range(cases.STEPS):
        first = step * count * case["micro_batch_size"]
        batches = [microbatch(samples, first + m * case["micro_batch_size"], case) for m in range(count)]
        total = sum(labelled(b) for b in batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in batches:
            share = 1 / total
            if variant == "mean_of_microbatches":
                share = 1 / (max(labelled(batch), 1) * count)
            part = model.loss_sum(*batch) * share + model.added / count
            part.backward()
            loss += part.item()
        limit = math.inf if variant == "not_clipped" else case["max_grad_norm"]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
        rate = learning_rate(case, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for key, value in zip(out, (loss, norm, total, rate)):
            out[key].append(value)
    out["after"] = model.hub_names({n: p.detach().clone() for n, p in model.named()})
    return out


def variants_of(case):
    """The mistakes that this case can show."""
    out = ["labels_one_too_far", "mean_of_microbatches", "decay_everywhere", "no_decay_at_all", "adam_l2",
           "not_clipped"]
    if case["packing"]:
        out.append("documents_not_masked")
    if pad_of(case) is not None:
        out.append("pad_trained")
    if any(emulate.Options(case["config"]).windows):
        out.append("window_ignored")
    if case["config"].get("output_router_logits"):
        out.append("not_balanced")
    return out


def kept_of_variant(after):
    return {n: t for n, t in after.items() if t.ndim == 1 or n in FULL_TENSORS}
