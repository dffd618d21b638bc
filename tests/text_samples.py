"""Conversations and texts for the tests of tokenizing, and how what comes of them is called in goldens.

The same everywhere and always: numbers come from SHA-256, not from a library's generator. Used by the tests and by
tools/goldens/make_text_goldens.py, which asks transformers what the ids must be.
"""
import array
import hashlib
import json
import os
import re

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens", "text")
PER_FAMILY = 55
MASKED = 1 << 30  # model/token_file.h
SEQ_LEN = 160

# what each family's template takes, and its tokens
FAMILIES = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|eot_id|>",
               "takes": "system tools date"},
    "qwen2_5": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "takes": "system tools"},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "takes": "system tools reasoning"},
    "qwen3_marked": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "takes": "system tools reasoning"},
    "blocks": {"bos_token": "<s>", "eos_token": "</s>", "takes": "system tools reasoning"},  # of ours; see the template
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "takes": ""},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>", "takes": ""},
    "phi3": {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "takes": "system"},
    "chatml": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "takes": "system"},
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>",
           "<end_of_turn>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens, but not special
VOCAB_SIZE = 600

WORDS = ("the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
         "but not what all were we when your can said there use an each which she do how their if will up other about "
         "out many then them these so some her would make like him into time has look two more write go see number no "
         "way could people my than first water been call who oil its now find long down day did get come made may part "
         "don't I'm it's naïve café Straße Ωμέγα 日本語 русский 🙂 👩‍👩‍👧 3.14 2026 x=1; {} [a] \\n C:\\path a_b").split(" ")


class Dice:
    def __init__(self, *seed):
        self.seed, self.count = "/".join(map(str, seed)), 0

    def below(self, n):
        self.count += 1
        digest = hashlib.sha256(("%s#%d" % (self.seed, self.count)).encode()).digest()
        return int.from_bytes(digest[:8], "big") % n

    def pick(self, items):
        return items[self.below(len(items))]


def sentence(dice, most=14):
    return " ".join(dice.pick(WORDS) for _ in range(1 + dice.below(most)))


def text(dice, most=4):
    """Prose with what breaks tokenizing: blank lines, code, spaces at the ends, texts of special tokens, nothing."""
    parts = [sentence(dice) for _ in range(1 + dice.below(most))]
    kind = dice.below(16)
    if kind == 0:
        parts.append("```\nfor i in range(3):\n\tprint( i )\n```")
    if kind == 1:
        parts.append("")
    if kind == 2:
        parts.insert(0, "")
    if kind == 3:
        parts[-1] += dice.pick(("<|im_end|>", "<s>", " </s> ", "<|endoftext|>", "[INST]", "<think>"))
    joined = dice.pick((". ", "\n", "\n\n", ".  ")).join(parts)
    return {4: " " + joined, 5: joined + " ", 6: "\n" + joined, 7: joined + "\n\n"}.get(kind, joined)


def tool_turns(dice, takes):
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {
        "name": dice.pick(("search", "add")), "arguments": {"q": sentence(dice, 3), "n": dice.below(9)}}}]}
    if dice.below(2):
        call["content"] = sentence(dice, 5)
    else:
        call["content"] = "" if "reasoning" not in takes else None
    answer = {"role": "tool", "content": json.dumps({"result": sentence(dice, 4)})}
    return [call, answer]


TOOLS = [{"type": "function", "function": {"name": "search", "description": "Looks it up.", "parameters": {
    "type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}, "required": ["q"]}}}]


def conversation(dice, takes):
    """{"messages": ..., and for some "tools" or "chat_template_kwargs"}."""
    record, messages = {}, []
    if "system" in takes and dice.below(3) == 0:
        messages.append({"role": "system", "content": text(dice, 2)})
    tools = "tools" in takes and dice.below(4) == 0
    for _ in range(1 + dice.below(4)):
        messages.append({"role": "user", "content": text(dice)})
        if tools and dice.below(2):
            messages += tool_turns(dice, takes)
        answer = {"role": "assistant", "content": text(dice)}
        if "reasoning" in takes and dice.below(3) == 0:
            answer["reasoning_content"] = sentence(dice)
        messages.append(answer)
    record["messages"] = messages
    if tools:
        record["tools"] = TOOLS
    if "date" in takes and dice.below(2):
        record["chat_template_kwargs"] = {"date_string": "%d May 2026" % (1 + dice.below(31))}
    return record


def family_records(name):
    return [conversation(Dice(name, i), FAMILIES[name]["takes"]) for i in range(PER_FAMILY)]


# -- 500 samples of all kinds, for one model (chatml) --


def from_value(record):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in record["messages"]]}


def mixed_record(kind, dice):
    takes = FAMILIES["chatml"]["takes"]
    if kind == "text":
        return {"text": text(dice, 9) + ("<|im_end|>" if dice.below(9) == 0 else "")}  # its end is there already
    if kind == "strings":
        return {"prompt": text(dice), "completion": dice.pick((" ", "", "\n")) + text(dice) + dice.pick(
            ("", "", "", "", "<|im_end|>")), "id": dice.below(100)}
    if kind == "alpaca":
        return {"instruction": text(dice, 2), "input": text(dice, 2) if dice.below(2) else "", "output": text(dice)}
    record = conversation(dice, takes)
    if kind == "turns":
        return {"prompt": record["messages"][:-1], "completion": record["messages"][-1:]}
    if dice.below(12) == 0:
        record["messages"] = [m for m in record["messages"] if m["role"] != "assistant"]  # nothing to learn
    return from_value(record) if kind == "sharegpt" else record


MIXED = {"messages": 120, "sharegpt": 90, "strings": 90, "turns": 70, "alpaca": 80, "text": 50}


def mixed_records():
    """{kind: records}, 500 in all."""
    return {kind: [mixed_record(kind, Dice("mixed", kind, i)) for i in range(n)] for kind, n in MIXED.items()}


def write_records(path, records):
    with open(path, "w", encoding="utf-8") as f:
        for i, record in enumerate(records):
            f.write(json.dumps(record, ensure_ascii=i % 2 == 0) + "\n")
    return path


# -- names of results --


def digest(numbers):
    """12 hexadecimal digits of a list of 32-bit numbers."""
    return hashlib.sha256(array.array("i", numbers).tobytes()).hexdigest()[:12]


def document_name(ids, learned):
    """Of a document; the first token's mask does not count, it is never a label."""
    return digest([i | (0 if yes or at == 0 else MASKED) for at, (i, yes) in enumerate(zip(ids, learned))])


def tokenizer_config(name):
    return {k: v for k, v in FAMILIES[name].items() if k.endswith("_token")}


def template(name):
    """Of a family; qwen3's is qwen3_marked's without its marks."""
    if name == "qwen3":
        return re.sub(r"{%- (end)?generation -%}", "", template("qwen3_marked"))
    with open(os.path.join(FOLDER, "templates", name + ".jinja"), encoding="utf-8") as f:
        return f.read()


def write_tokenizer(folder, name):
    """The files of a model's folder that say how it is tokenized: the template in tokenizer_config.json for half."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(FOLDER, "tokenizer.json"), encoding="utf-8") as f:
        content = f.read()
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        f.write(content)
    config = tokenizer_config(name)
    if len(name) % 2:
        config["chat_template"] = template(name)
    else:
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(template(name))
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    return folder


def read_goldens():
    with open(os.path.join(FOLDER, "goldens.json"), encoding="utf-8") as f:
        return json.load(f)
