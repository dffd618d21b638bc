"""Writes tests/goldens/text/: what transformers makes of the conversations and texts of tests/text_samples.py.

    python tools/goldens/make_text_goldens.py [--tokenizer]

goldens.json holds, per family of chat templates, a name (a hash) of each conversation's ids and of what is learned of
them; the same of 500 samples of all kinds, and of the samples (tokens, labels, positions, documents) that training
would see of these; and some in full. The rules are those of transformers' apply_chat_template and of TRL's SFTTrainer
(1.16: add_eos, tokenize_fn, completion_only_loss, keep_start), written here once more and apart from tools/tokenizer:

    text             encode(text + eos_token, if it does not end so)
    prompt, strings  encode(prompt + completion + eos_token); learned behind the common prefix with encode(prompt)
    prompt, turns    the same through the template, the prompt with add_generation_prompt
    messages         learned are, per turn of the assistant, the tokens between the common prefixes with the
                     conversation before the turn (add_generation_prompt) and up to it; or the template's own marks;
                     Qwen3 (whose template has prefixes only for the last turn): the marks of the same template with
                     marks, and the newline behind the end of a turn
    samples          documents in order; one that does not fit into what is left of seq_len begins the next sample

The templates (tests/goldens/text/templates) were written for these tests, after the families' published layouts.
With --tokenizer it trains tests/goldens/text/tokenizer.json anew: a byte-level BPE with the families' special tokens.
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
os.environ["HF_HUB_OFFLINE"] = "1"

import text_samples as samples
import tokenizers
import transformers

HERE = ROOT / "tests" / "goldens" / "text"
FULL = 2  # per list, in full


def train_tokenizer():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    dice = samples.Dice("tokenizer")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=samples.VOCAB_SIZE - len(samples.ADDED), special_tokens=samples.SPECIAL, show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    model.train_from_iterator([samples.sentence(dice, 40) for _ in range(400)] + ["assistant user system tool"], trainer)
    model.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in samples.ADDED])
    with open(HERE / "tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(json.loads(model.to_str()), f, ensure_ascii=True, separators=(",", ":"))


def load(name):
    with tempfile.TemporaryDirectory() as folder:
        samples.write_tokenizer(folder, name)
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Reference:
    def __init__(self, name):
        self.name, self.t = name, load(name)
        self.marked = "endgeneration" in samples.template(name)

    def ids(self, messages, tools=None, opening=False, extra=None):
        return self.t.apply_chat_template(messages, tools=tools, add_generation_prompt=opening, tokenize=True,
                                          return_dict=False, **(extra or {}))

    def messages(self, messages, tools=None, extra=None):
        ids = self.ids(messages, tools, extra=extra)
        if self.marked:
            out = self.t.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True,
                                             return_assistant_tokens_mask=True, **(extra or {}))
            assert out["input_ids"] == ids
            return ids, [bool(m) for m in out["assistant_masks"]]
        if self.name == "qwen3":
            same, learned = Reference("qwen3_marked").messages(messages, tools, extra)
            assert same == ids
            return ids, [yes or (i > 0 and learned[i - 1]) for i, yes in enumerate(learned)]
        learned = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = common(self.ids(messages[:i], tools, True, extra), ids)
                end = common(self.ids(messages[:i + 1], tools, False, extra), ids)
                learned[start:end] = [True] * (end - start)
        return ids, learned

    def completion(self, before, whole):
        n = common(before, whole)
        return whole, [False] * n + [True] * (len(whole) - n)

    def text(self, text):
        ids = self.t(text if text.endswith(self.t.eos_token) else text + self.t.eos_token)["input_ids"]
        return ids, [True] * len(ids)

    def record(self, kind, record):
        """ids and learned, or None where nothing is learned."""
        if kind == "text":
            out = self.text(record["text"])
        elif kind == "strings":
            completion = record["completion"]
            completion += "" if completion.endswith(self.t.eos_token) else self.t.eos_token
            out = self.completion(self.t(record["prompt"])["input_ids"], self.t(record["prompt"] + completion)["input_ids"])
        elif kind == "turns":
            out = self.completion(self.ids(record["prompt"], opening=True), self.ids(record["prompt"] + record["completion"]))
        elif kind == "alpaca":
            question = record["instruction"] + ("\n\n" + record["input"] if record["input"] else "")
            prompt = [{"role": "user", "content": question}]
            answer = [{"role": "assistant", "content": record["output"]}]
            out = self.completion(self.ids(prompt, opening=True), self.ids(prompt + answer))
        elif kind == "sharegpt":
            roles = {"human": "user", "gpt": "assistant", "system": "system"}
            out = self.messages([{"role": roles[m["from"]], "content": m["value"]} for m in record["conversations"]])
        else:
            out = self.messages(record["messages"], record.get("tools"), record.get("chat_template_kwargs"))
        return out if any(out[1][1:]) else None


def pieces_of(document, instruction, length, drop):
    """What of a document stays together in a sample, with its counts."""
    ids, learned = document
    if not instruction:
        return [(ids[i:i + length], learned[i:i + length]) for i in range(0, len(ids), length) if len(ids) - i > 1]
    if len(ids) > length and drop:
        return []
    piece = ids[:length], learned[:length]
    return [piece] if any(piece[1][1:]) else []


def fill(rows, length, pad):
    """tokens, labels, position, document_start of a sample of pieces."""
    tokens, labels, position, start = [], [], [], []
    for ids, learned in rows:
        first = len(tokens)
        tokens += ids
        labels += [b if yes else -1 for b, yes in zip(ids[1:], learned[1:])] + [-1]
        position += range(len(ids))
        start += [first] * len(ids)
    n = length - len(tokens)
    return (tokens + [pad] * n, labels + [-1] * n, position + list(range(n)), start + [len(tokens)] * n)


def arrange(documents, instruction, length, pad, drop):
    """Samples of one file. What was left out ends a sample, too."""
    out, rows, used = [], [], 0

    def end():
        if rows:
            out.append(fill(rows, length, pad))
        rows.clear()

    for document in documents:
        pieces = pieces_of(document, instruction, length, drop)
        if not pieces:
            end()
            used = 0
        for piece in pieces:
            if used + len(piece[0]) > length:
                end()
                used = 0
            rows.append(piece)
            used += len(piece[0])
    end()
    return out


def named(documents):
    return {"names": [samples.document_name(*d) for d in documents],
            "full": [[d[0], [int(x) for x in d[1]]] for d in documents[:FULL]]}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--tokenizer", action="store_true")
    if options.parse_args().tokenizer:
        train_tokenizer()
    goldens = {"made_by": "transformers %s, tokenizers %s" % (transformers.__version__, tokenizers.__version__),
               "families": {}, "mixed": {}, "samples": {"truncate": [], "drop": []}}
    for name in samples.FAMILIES:
        reference = Reference(name)
        goldens["families"][name] = named([reference.record("messages", r) for r in samples.family_records(name)])
    reference, pad = Reference("chatml"), load("chatml").pad_token_id
    for kind, records in samples.mixed_records().items():
        documents = [d for d in (reference.record(kind, r) for r in records) if d is not None]
        goldens["mixed"][kind] = dict(named(documents), left_out=len(records) - len(documents))
        for word in goldens["samples"]:
            rows = arrange(documents, kind != "text", samples.SEQ_LEN, pad, word == "drop")
            goldens["samples"][word] += [samples.digest(sum(map(list, row), [])) for row in rows]
    with open(HERE / "goldens.json", "w", encoding="utf-8") as f:
        f.write(json.dumps(goldens, separators=(",", ":")).replace('"],', '"],\n').replace("]]},", "]]},\n") + "\n")
    print("%d samples of %d tokens" % (len(goldens["samples"]["truncate"]), samples.SEQ_LEN))


main()
