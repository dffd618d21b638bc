"""What a line of a .jsonl file or a row of a .parquet file is, and what it says.

A file is of one kind, which its first record with something in it decides:

    messages            {"messages": [{"role": ..., "content": ...}, ...]}, with "tools" or without
    prompt-completion   {"prompt": ..., "completion": ...}: both texts, or both lists of messages
    sharegpt            {"conversations": [{"from": ..., "value": ...}, ...]}, with "system" or without
    alpaca              {"instruction": ..., "input": ..., "output": ...}, with "system" or without
    text                {"text": ...}

Other keys are ignored, as is a key whose value is null.
"""
import json

from token_file import USER, Refusal

LINE_BYTES_MAX = 64 << 20  # as model/jsonl.h

# kind: the keys by which it is known
KINDS = {
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OF_FORMAT = {
    "auto": tuple(KINDS),
    "text": ("text",),
    "chat": ("messages", "sharegpt"),
    "prompt-completion": ("prompt-completion", "alpaca"),
}
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                  "chatgpt": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool",
                  "function": "tool", "observation": "tool", "function_response": "tool"}


def type_name(value):
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number",
             float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def bad(text, hint=""):
    return Refusal(USER, text, hint)


def keys_text(record):
    keys = ", ".join('"%s"' % k for k in list(record)[:12])
    return "only " + keys if keys else "none"


def wanted_text(kinds):
    return " or ".join(" and ".join('"%s"' % k for k in KINDS[kind]) for kind in kinds)


def kind_of(record, form):
    for kind in OF_FORMAT[form]:
        if all(record.get(k) is not None for k in KINDS[kind]):
            return kind
    raise bad("expected keys %s, found %s" % (wanted_text(OF_FORMAT[form]), keys_text(record)))


def no_duplicates(pairs):
    record = dict(pairs)
    if len(record) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise bad('the key "%s" stands twice in an object' % key)
            seen.add(key)
    return record


def no_constant(name):
    raise bad("%s is not JSON" % name)


def parse_line(line):
    """line: bytes without the newline. UnicodeDecodeError is the caller's."""
    text = line.decode("utf-8")
    try:
        record = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except json.JSONDecodeError as e:
        raise bad("expected a JSON object, found an error at column %d: %s" % (e.colno, e.msg))
    except RecursionError:
        raise bad("the JSON is nested too deeply")
    if not isinstance(record, dict):
        raise bad("expected a JSON object, found %s" % type_name(record))
    if "\\u" in text:
        check_surrogates(record)
    return record


def check_surrogates(record):
    """Only an escape can bring one."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as e:
        raise bad("a text holds half a surrogate pair, \\u%04x, which is no character" % ord(e.object[e.start]))


def text_at(record, key, optional=False):
    value = record.get(key)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise bad('expected "%s" to be a string, found %s' % (key, type_name(value)))
    return value


def messages_at(record, key):
    value = record.get(key)
    if not isinstance(value, list):
        raise bad('expected "%s" to be a list of messages, found %s' % (key, type_name(value)))
    for i, message in enumerate(value):
        where = '"%s", message %d' % (key, i + 1)
        if not isinstance(message, dict):
            raise bad("%s: expected an object, found %s" % (where, type_name(message)))
        if not isinstance(message.get("role"), str):
            raise bad('%s: expected "role" to be a string, found %s' % (where, type_name(message.get("role"))))
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise bad('%s: expected "content" to be a string, found %s' % (where, type_name(content)))
    return value


def tools_of(record):
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as e:
            raise bad('"tools": expected a list, or its JSON as a string: %s' % e)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise bad('"tools": expected a list of objects, found %s' % type_name(tools))
    return tools or None


def extra_of(record):
    extra = record.get("chat_template_kwargs")
    if extra is not None and not isinstance(extra, dict):
        raise bad('"chat_template_kwargs": expected an object, found %s' % type_name(extra))
    return extra


def sharegpt_messages(record):
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise bad('expected "conversations" to be a list, found %s' % type_name(turns))
    out = system_of(record)
    for i, turn in enumerate(turns):
        where = '"conversations", turn %d' % (i + 1)
        if not isinstance(turn, dict):
            raise bad("%s: expected an object, found %s" % (where, type_name(turn)))
        role = SHAREGPT_ROLES.get(turn.get("from"))
        if role is None:
            raise bad('%s: expected "from" to be one of %s, found %s' % (
                where, ", ".join(SHAREGPT_ROLES), json.dumps(turn.get("from"))))
        if not isinstance(turn.get("value"), str):
            raise bad('%s: expected "value" to be a string, found %s' % (where, type_name(turn.get("value"))))
        out.append({"role": role, "content": turn["value"]})
    return out


def system_of(record):
    system = text_at(record, "system", optional=True)
    return [{"role": "system", "content": system}] if system else []


def alpaca_messages(record):
    """The question, and the answer: the input stands below the instruction, a blank line between."""
    question, more = text_at(record, "instruction"), text_at(record, "input", optional=True)
    question = question + "\n\n" + more if more else question
    answer = {"role": "assistant", "content": text_at(record, "output")}
    return system_of(record) + [{"role": "user", "content": question}], [answer]
