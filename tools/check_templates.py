#!/usr/bin/env python3
"""Compares tools/tokenizer with transformers on published chat templates, which are not part of this repository.

    tools/venv/bin/python tools/check_templates.py FOLDER-OR-PACKAGE ...

A folder with *.jinja below it, or the name of an installed package that has such files (`trl`, which need not be
importable). Each template renders 55 conversations, a quarter each of turns alone, with system turns, with tools too
and with reasoning too, closed and with the opening of an answer. Equal must be: the text, the ids, and that the
template refuses the conversation; where it has {% generation %}, what is learned. Without, what the assistant says is
told apart by tools/tokenizer/chat.py or the conversation refused. Where NAME_training.jinja stands beside NAME.jinja and
renders the same, "only ours" and "only twin" count the tokens that are learned here but not marked there, and the other
way round: no fault, conventions differ about headers, empty reasoning and the end of a turn. Any difference ends with
status 1.
"""
import collections
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "tokenizer")]
os.environ["HF_HUB_OFFLINE"] = "1"

import text_samples as samples
import transformers
from tokenizers import AddedToken, Tokenizer

import chat
import encoding
from token_file import Refusal

transformers.logging.set_verbosity_error()
TAKES = ("", "system", "system tools", "system tools reasoning")
LIKE_TOKENS = re.compile(r"<[|\uff5c]?/?[A-Za-z0-9_\u2581]+[|\uff5c]?>")
COLUMNS = ("rendered", "refused", "marks", "told apart", "not told", "twin", "only ours", "only twin", "different")


def found_under(name):
    folder = pathlib.Path(name)
    if not folder.is_dir():
        package = importlib.util.find_spec(name) if name.isidentifier() else None
        if package is None or not package.submodule_search_locations:
            raise SystemExit("%s: no folder and no installed package" % name)
        folder = pathlib.Path(package.submodule_search_locations[0])
    files = sorted(folder.rglob("*.jinja"))
    if not files:
        raise SystemExit("%s: no *.jinja below it" % folder)
    return files


class Both:
    """A template in a model's folder, with the tests' tokenizer and what looks like a token in the template."""

    def __init__(self, folder, text):
        tokenizer = Tokenizer.from_file(os.path.join(samples.FOLDER, "tokenizer.json"))
        for token in sorted(set(LIKE_TOKENS.findall(text))):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(text)
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
            json.dump({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|endoftext|>"}, f)
        self.theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.ours = chat.Chat(encoding.Encoder(os.path.join(folder, "tokenizer.json")))
        self.marked = self.ours.marks["default"]

    def texts(self, record, opening):
        """Of transformers and of ours; None: the conversation is refused."""
        messages, tools = record["messages"], record.get("tools")
        try:
            theirs = self.theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=opening)
        except Exception:  # a template's refusals and what its expressions raise
            theirs = None
        try:
            return theirs, self.ours.render(messages, tools, opening)[0]
        except Refusal:
            return theirs, None

    def reference(self, record):
        """ids, and what is marked."""
        out = self.theirs.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=True,
                                              return_dict=True, return_assistant_tokens_mask=self.marked)
        return out["input_ids"], [bool(m) for m in out.get("assistant_masks", [])]


def compare(both, twin, record, count):
    """Adds to count; true if nothing differs."""
    for opening in (True, False):
        theirs, ours = both.texts(record, opening)
        if theirs != ours:
            return False
    if ours is None:
        count["refused"] += 1
        return True
    count["rendered"] += 1
    ids, marked = both.reference(record)
    if both.ours.encoder.ids(ours, False) != ids:
        return False
    try:
        found, learned = both.ours.conversation(record["messages"], record.get("tools"))
    except Refusal:
        count["not told"] += 1
        return not both.marked
    if both.marked:
        count["marks"] += 1
        return (found, learned) == (ids, marked)
    count["told apart"] += 1
    if twin is not None:
        beside(twin, record, ids, learned, count)
    return found == ids


def beside(twin, record, ids, learned, count):
    if twin.texts(record, False)[0] is None:
        return
    same, marked = twin.reference(record)
    if same == ids:
        count["twin"] += 1
        count["only ours"] += sum(a and not b for a, b in zip(learned, marked))
        count["only twin"] += sum(b and not a for a, b in zip(learned, marked))


def check(file):
    count = collections.Counter()
    marks = file.with_name(file.stem + "_training.jinja")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        text = file.read_text(encoding="utf-8")
        both = Both(folder, text)
        twin = Both(other, marks.read_text(encoding="utf-8")) if marks.exists() and not both.marked else None
        for i in range(samples.PER_FAMILY):
            record = samples.conversation(samples.Dice("templates", i), TAKES[i % len(TAKES)])
            if not compare(both, twin, record, count):
                count["different"] += 1
                print("%s: conversation %d differs" % (file.name, i))
    return count


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    total, files = collections.Counter(), [f for name in sys.argv[1:] for f in found_under(name)]
    print("%-44s %s" % ("template", " ".join("%11s" % c for c in COLUMNS)))
    for file in files:
        count = check(file)
        total += count
        print("%-44s %s" % (file.stem, " ".join("%11d" % count[c] for c in COLUMNS)), flush=True)
    print("%-44s %s" % ("%d templates" % len(files), " ".join("%11d" % total[c] for c in COLUMNS)))
    return 1 if total["different"] else 0


sys.exit(main())
