#!/usr/bin/env python3
"""Turns the pages of the Debian package perl-doc into training text.

    extract_text.py OUT.jsonl

One line {"text": ...} per page: the prose paragraphs, unwrapped, without markup. Code samples,
tables, change logs and the pages in other languages are left out.
"""
import json
import os
import re
import subprocess
import sys

PACKAGE = "perl-doc"
# indexes, tables and change logs rather than prose
SKIPPED_PAGES = re.compile(r"(delta|perltoc|perluniprops|perlcn|perljp|perlko|perltw|perlebcdic)\.pod$")
ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}
WORDS_MIN = 8  # shorter paragraphs are mostly list items and headings


def pages():
    listing = subprocess.run(["dpkg", "-L", PACKAGE], stdout=subprocess.PIPE, check=True, text=True)
    return sorted(p for p in listing.stdout.split("\n")
                  if p.endswith(".pod") and not SKIPPED_PAGES.search(p) and os.path.isfile(p))


def without_code(match):
    letter, body = match.group(1), match.group(3)
    if letter in "XZ":  # index entries, zero width
        return ""
    if letter == "E":
        return ESCAPES.get(body, "")
    if letter == "L":
        return body.split("|")[0].strip("/\"")
    return body


def plain(paragraph):
    """A<text> and A<< text >> become text, innermost first."""
    before = None
    while before != paragraph:
        before = paragraph
        paragraph = re.sub(r"([A-Z])(<<+ )((?:(?! >>).)*?) >>+", without_code, paragraph)
        paragraph = re.sub(r"([A-Z])(<)([^<>]*)>", without_code, paragraph)
    return " ".join(paragraph.split())


def prose(page):
    with open(page, encoding="utf-8", errors="replace") as file:
        blocks = re.split(r"\n\s*\n", file.read())
    kept, inside = [], None
    for block in blocks:
        if block.startswith("=begin"):
            inside = True
        elif block.startswith("=end"):
            inside = None
        elif not inside and block[:1] not in ("=", " ", "\t", "") and block.isascii():
            text = plain(block)
            if len(text.split()) >= WORDS_MIN:
                kept.append(text)
    return "\n\n".join(kept)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = sys.argv[1]
    texts = [text for text in map(prose, pages()) if text]
    with open(out + ".new", "w", encoding="ascii") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    os.replace(out + ".new", out)
    print("%s: %d pages, %.1f MB of text" % (out, len(texts), sum(map(len, texts)) / 1e6))


main()
