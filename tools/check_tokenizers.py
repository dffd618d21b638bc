#!/usr/bin/env python3
"""Compares tools/tokenizer with transformers on real vocabularies, which are not part of this repository.

    tools/venv/bin/python tools/check_tokenizers.py FAMILY=FILE ...

FAMILY is one of tests/text_samples.py, for its chat template and special tokens; FILE a tokenizer.json, or a vocabulary
in tiktoken's format (needs the package tiktoken), such as Llama 3's tokenizer.model or qwen.tiktoken. Each line says
how many conversations, texts and long texts were compared; any difference ends with status 1.
"""
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "tokenizer"), str(ROOT / "tools" / "goldens")]
os.environ["HF_HUB_OFFLINE"] = "1"

import text_samples as samples
import transformers
from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

import chat
import encoding
import mtlaunch_tokenizer as program

CONVERSATIONS, TEXTS = 200, 200


def load(path):
    if path.endswith(".json"):
        return Tokenizer.from_file(path)
    return TikTokenConverter(path, extra_special_tokens=[]).converted()


def write_folder(folder, family, path):
    tokenizer = load(path)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in samples.SPECIAL])
    samples.write_tokenizer(folder, family)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    return tokenizer.get_vocab_size()


def check(same, what):
    if not same:
        raise SystemExit("differs: " + what)


def pieces(text):
    """What Text of the program would give to the workers."""
    class File:
        def __init__(self, data):
            self.data, self.path = data, "text"

        def read(self, n):
            part, self.data = self.data[:n], self.data[n:]
            return part
    return list(program.Text(File(text.encode()), "text").calls())


def check_long(encoder, seed):
    dice = samples.Dice("long", seed)
    text = "\n".join(samples.text(dice, 9) for _ in range(2500)) * 5
    found, agreed, cuts = [], None, pieces(text)
    for _, *parts in cuts:
        inside, start, end = encoder.piece(*(p.decode() for p in parts))
        check(inside is not None and agreed in (None, start), "pieces disagree")
        found, agreed = found + inside, end
    check(found == encoder.ids(text, False), "a text in %d pieces" % len(cuts))
    return len(cuts)


def compare(family, folder):
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    encoder = encoding.Encoder(os.path.join(folder, "tokenizer.json"))
    ours, takes = chat.Chat(encoder), samples.FAMILIES[family]["takes"]
    for i in range(CONVERSATIONS):
        record = samples.conversation(samples.Dice("check", family, i), takes)
        messages, tools, extra = record["messages"], record.get("tools"), record.get("chat_template_kwargs", {})
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **extra)
        text = reference.apply_chat_template(messages, tools=tools, tokenize=False, **extra)
        check(ours.render(messages, tools, extra=extra)[0] == text, "text of conversation %d" % i)
        ids, learned = ours.conversation(messages, tools, extra)
        check(ids == expected, "ids of conversation %d" % i)
        check(any(learned) and not learned[0], "what is learned of conversation %d" % i)
    texts = [samples.text(samples.Dice("check text", i), 12) for i in range(TEXTS)]
    for text, ids in zip(texts, encoder.documents(texts)):
        ending = "" if text.endswith(reference.eos_token) else reference.eos_token
        check(ids == reference(text + ending)["input_ids"], "text %r" % text)
    return check_long(encoder, family)


def main():
    for argument in sys.argv[1:]:
        family, _, path = argument.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            size = write_folder(folder, family, path)
            cuts = compare(family, folder)
        print("%s, %d tokens: %d conversations, %d texts, 1 text in %d pieces: equal" % (
            argument, size, CONVERSATIONS, TEXTS, cuts), flush=True)


main()
