"""Text to ids by the reference library, with the rules by which transformers loads a tokenizer.

    document    encode(text) with the tokens that the tokenizer puts around a text, and the token that ends a
                document where that is not the last one already
    pieces      a text too long for one call is cut at lines; each piece is encoded with what stands around it, and
                neighbours must agree about the tokens around the cut
"""
import array
import json
import os

from tokenizers import AddedToken, Tokenizer, processors
import tokenizers

from token_file import END, MASKED, USER, Refusal

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
AGREE_CHARS = 256  # on each side of a cut, in which both encodings must be the same


def load_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise Refusal(USER, "%s: %s" % (path, e))
    if not isinstance(value, dict):
        raise Refusal(USER, "%s: expected an object, found %s" % (path, type(value).__name__))
    return value


def token_text(value):
    return value.get("content") if isinstance(value, dict) else value


class Encoder:
    """A tokenizer.json and the tokenizer_config.json beside it. eos_id: of the model, where those name none."""

    def __init__(self, path, eos_id=None):
        self.path, self.folder = path, os.path.dirname(path)
        try:
            self.tokenizer = Tokenizer.from_file(path)
        except Exception as e:  # the library raises Exception itself
            raise Refusal(USER, "%s: the tokenizers library %s cannot load it: %s" % (path, tokenizers.__version__, e))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.config_path = os.path.join(self.folder, "tokenizer_config.json")
        self.config = load_json(self.config_path)
        self.named = self.named_tokens()
        self.check_added_tokens()
        self.set_post_processor()
        self.eos_token = self.named.get("eos_token")
        self.eos_id = self.tokenizer.token_to_id(self.eos_token) if self.eos_token else eos_id
        if self.eos_id is None:
            raise Refusal(USER, "%s: no token ends a document" % path,
                          "expected eos_token in tokenizer_config.json, or eos_token_id in the model's config.json")
        if self.eos_token is None:
            self.eos_token = self.tokenizer.id_to_token(self.eos_id)
        probe = self.tokenizer.encode("a")
        self.before = self.leading(probe.ids, probe.special_tokens_mask)
        self.after = self.leading(probe.ids[::-1], probe.special_tokens_mask[::-1])[::-1]
        if self.after[-1:] != [self.eos_id]:
            self.after = self.after + [self.eos_id]

    def named_tokens(self):
        legacy = load_json(os.path.join(self.folder, "special_tokens_map.json"))
        found = {}
        for name in NAMED:
            text = token_text(self.config[name] if name in self.config else legacy.get(name))
            if text is None:
                continue
            if self.tokenizer.token_to_id(text) is None:
                raise Refusal(USER, "%s: %s \"%s\" is not a token of %s" % (self.config_path, name, text, self.path))
            found[name] = text
        # transformers makes them special, whatever tokenizer.json says
        self.tokenizer.add_special_tokens([AddedToken(t, special=True) for t in found.values()
                                           if t not in self.added()])
        return found

    def added(self):
        return {t.content for t in self.tokenizer.get_added_tokens_decoder().values()}

    def check_added_tokens(self):
        for number, token in self.config.get("added_tokens_decoder", {}).items():
            if self.tokenizer.token_to_id(token_text(token)) != int(number):
                raise Refusal(USER, "%s: added_tokens_decoder: \"%s\" is %s, %s says %s" % (
                    self.config_path, token_text(token), number, self.path,
                    self.tokenizer.token_to_id(token_text(token))))

    def set_post_processor(self):
        """As transformers: what tokenizer_config.json says of bos and eos replaces the file's post-processor."""
        explicit = "add_bos_token" in self.config or "add_eos_token" in self.config
        if not explicit and self.tokenizer.post_processor is not None:
            return
        bos = self.named.get("bos_token") if self.config.get("add_bos_token") else None
        eos = self.named.get("eos_token") if self.config.get("add_eos_token") else None
        single = "%s$A:0%s" % (bos + ":0 " if bos else "", " " + eos + ":0" if eos else "")
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(t, self.tokenizer.token_to_id(t)) for t in (bos, eos) if t])

    @staticmethod
    def leading(ids, mask):
        n = mask.index(0) if 0 in mask else 0
        return list(ids[:n])

    def special_texts(self):
        return {t.content for t in self.tokenizer.get_added_tokens_decoder().values() if t.special}

    def ids(self, text, add_special_tokens):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def documents(self, texts):
        """One list of ids per text, each ending with the token that ends a document."""
        out = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=True):
            ids = encoding.ids
            if not ids or ids[-1] != self.eos_id:
                ids.append(self.eos_id)
            out.append(ids)
        return out

    def piece(self, left, body, right):
        """ids of a piece of a longer text, and those around both its ends, as its neighbours must see them. None when
        a token lies across an end."""
        encoding = self.tokenizer.encode(left + body + right, add_special_tokens=False)
        ends = len(left), len(left) + len(body)
        first, last = (cut_at(encoding, end, len(left + body + right)) for end in ends)
        if first is None or last is None:
            return None, [], []
        ids = encoding.ids
        return (ids[first:last], *(around(encoding, ids, i, end) for i, end in zip((first, last), ends)))


def cut_at(encoding, at, length):
    """The number of the token that begins at a character; None when none does."""
    if at in (0, length):
        return 0 if at == 0 else len(encoding)
    i = encoding.char_to_token(at)
    return i if i is not None and encoding.token_to_chars(i)[0] == at else None


def around(encoding, ids, i, at):
    """ids of the tokens that begin less than AGREE_CHARS before or behind a cut."""
    low = high = i
    while low > 0 and at - encoding.token_to_chars(low - 1)[0] < AGREE_CHARS:
        low -= 1
    while high < len(ids) and encoding.token_to_chars(high)[0] - at < AGREE_CHARS:
        high += 1
    return ids[low:high]


def words_of(ids):
    """Words of a document that is learned whole."""
    words = array.array("I", ids)
    words[-1] |= END
    return words


def masked_words(ids, learned):
    """learned: one truth per id."""
    words = array.array("I", [i if yes else i | MASKED for i, yes in zip(ids, learned)])
    words[-1] |= END
    return words
