"""Conversations to ids and what is learned of them: the model's own chat template, rendered as transformers does.

What is learned of a conversation: where the template marks it ({% generation %}), what it marks. Elsewhere the
conversation is rendered without and with each turn of the assistant:

    prefix      the turns before, and the template's opening of an answer (add_generation_prompt)
    turn        the same turns and this one, less special tokens at its end that only a last turn has
    learned     what `turn` has beyond `prefix`, the end of the turn included

Both must begin the whole conversation. Some templates render a turn otherwise when others follow (Qwen3's keeps the
reasoning of the last answer only). Then the turn ends where the message behind it begins: the conversation up to that
message, less what the message adds to the turns before without the answer between. What must be equal is compared
each time; where it is not, none of this holds for the template, and that is said. Of
prompt/completion everything is learned that comes after the tokens that the prompt alone begins with (as TRL).
"""
import datetime
import json
import os
import re

import jinja2
import jinja2.ext
import jinja2.sandbox

from encoding import load_json
from token_file import USER, Refusal

REASONING = ("reasoning_content", "thinking", "reasoning")


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: tells the Template how long the text inside came out."""

    tags = {"generation"}

    def parse(self, parser):
        tag = next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("inside", lineno=tag.lineno), [], [], inside, lineno=tag.lineno)

    def inside(self, caller):
        text = caller()
        self.environment.on_generation(len(text))
        return text


def plain_name(name):
    """A name that reaches nothing of Python; transformers refuses others in a namespace."""
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace of a chat template has no name %r" % name)
    return name


class Fields(jinja2.utils.Namespace):
    def __setitem__(self, name, value):
        super().__setitem__(plain_name(name), value)


def new_namespace(*values, **named):
    return Fields({plain_name(name): value for name, value in dict(*values, **named).items()})


def new_dict(*values, **named):
    return dict(*values, **named)


new_dict.fromkeys = dict.fromkeys  # a template has this of the class, and nothing else


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(form):
    return datetime.datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


GLOBALS = {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": new_dict, "namespace": new_namespace}


class Template:
    """A chat template, compiled with the options, filters and functions that transformers gives one."""

    def __init__(self, text):
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
            extensions=[jinja2.ext.loopcontrols, GenerationTag], lstrip_blocks=True, trim_blocks=True)
        sandbox.filters["tojson"] = tojson
        sandbox.globals.update(GLOBALS)
        sandbox.extend(on_generation=self.on_generation)
        self.compiled = sandbox.from_string(text)
        self.written, self.spans = 0, []

    def on_generation(self, length):
        self.spans.append((self.written, self.written + length))

    def render(self, values):
        """Text, and the spans of it that are marked."""
        parts, self.written, self.spans = [], 0, []
        for part in self.compiled.generate(values):
            parts.append(part)
            self.written += len(part)
        return "".join(parts), self.spans


def read_text(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise Refusal(USER, "%s: %s" % (path, e))


def load_templates(folder, config):
    """{name: text}, as transformers finds them: files before what tokenizer_config.json says."""
    found = {}
    text = read_text(os.path.join(folder, "chat_template.jinja"))
    if text is not None:
        found["default"] = text
    more = os.path.join(folder, "additional_chat_templates")
    for name in sorted(os.listdir(more)) if os.path.isdir(more) else []:
        if name.endswith(".jinja"):
            found[name[:-len(".jinja")]] = read_text(os.path.join(more, name))
    if found:
        return found
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return dict(value)
    return {t["name"]: t["template"] for t in value or []}


def normalized(messages):
    """As apply_chat_template: no keys without a value; reasoning under each name that templates read."""
    out = []
    for message in messages:
        message = {k: v for k, v in message.items() if v is not None}
        given = [message[name] for name in REASONING if name in message]
        if given:
            message = {"thinking": given[0]} | message | {"reasoning_content": given[0]}
        out.append(message)
    return out


def common_prefix(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


def learned_by_spans(offsets, spans):
    """One truth per token: does it share a character with a span? Both ascend."""
    out, at = [], 0
    for first, last in offsets:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        if at == len(spans):
            out.append(False)
            continue
        start, end = spans[at]
        out.append(first < end and (last > start or first == last >= start))
    return out


class Chat:
    """The templates of one tokenizer's folder."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.where = os.path.join(encoder.folder, "chat_template.jinja")
        texts = load_templates(encoder.folder, encoder.config)
        if "chat_template.jinja" not in os.listdir(encoder.folder):
            self.where = encoder.config_path
        self.templates, self.marks = {}, {}
        for name, text in texts.items():
            try:
                self.templates[name] = Template(text)
            except jinja2.exceptions.TemplateError as e:
                raise Refusal(USER, "%s: the chat template \"%s\" is not one: %s" % (self.where, name, e))
            self.marks[name] = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        self.special = sorted(encoder.special_texts(), key=len, reverse=True)

    def choose(self, tools):
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name in self.templates:
            return name
        if not self.templates:
            raise Refusal(USER, "%s: the model has no chat template" % self.encoder.folder,
                          "expected chat_template.jinja, or chat_template in tokenizer_config.json; an instruction-"
                          "tuned model has one")
        raise Refusal(USER, "%s: several chat templates and none is \"default\": %s" % (
            self.where, ", ".join(sorted(self.templates))))

    def render(self, messages, tools=None, opening=False, extra=None):
        """Text, and the spans that the template marks. A template's own refusal is the user's error."""
        template, names = self.templates[self.choose(tools)], {**self.encoder.named, **(extra or {})}
        try:  # dict() refuses a chat_template_kwargs that would take the place of messages or another
            return template.render(dict(messages=normalized(messages), tools=tools, documents=None,
                                        add_generation_prompt=opening, **names))
        except jinja2.exceptions.TemplateError as e:
            raise Refusal(USER, "the chat template refuses the conversation: %s" % e)
        except Exception as e:  # what the template's expressions do to data that they do not expect
            raise Refusal(USER, "the chat template fails on the conversation: %s: %s" % (type(e).__name__, e))

    def does_not_hold(self, what):
        return Refusal(
            USER, "%s: %s" % (self.where, what),
            "what the assistant said cannot be told apart by prefixes with this template: mark it in the template with "
            "{%- generation %} and {%- endgeneration %}, or use prompt/completion")

    def turn_span(self, messages, i, whole, tools, extra):
        if i == 0:
            raise self.does_not_hold("a conversation that begins with the assistant has no prefix to compare")
        prefix, _ = self.render(messages[:i], tools, True, extra)
        if not whole.startswith(prefix):
            raise self.does_not_hold("message %d: the turns before it, rendered alone, do not begin the conversation" %
                                     (i + 1))
        ends = (end_by(messages, i, whole, tools, extra) for end_by in (self.end_by_prefix, self.end_by_next))
        end = next((e for e in ends if e is not None and e >= len(prefix)), None)
        if end is None:
            raise self.does_not_hold("message %d is rendered otherwise when others follow" % (i + 1))
        return len(prefix), end

    def end_by_prefix(self, messages, i, whole, tools, extra):
        turn, _ = self.render(messages[:i + 1], tools, False, extra)
        while not whole.startswith(turn):
            ending = next((s for s in self.special if turn.endswith(s)), None)
            if ending is None:
                return None
            turn = turn[:-len(ending)]
        return len(turn)

    def end_by_next(self, messages, i, whole, tools, extra):
        """The message behind the answer is no answer itself: what it adds is the same with the answer and without."""
        if i + 1 == len(messages) or messages[i + 1].get("role") == "assistant":
            return None
        try:
            followed, _ = self.render(messages[:i + 2], tools, False, extra)
            before, _ = self.render(messages[:i], tools, False, extra)
            without, _ = self.render(messages[:i] + [messages[i + 1]], tools, False, extra)
        except Refusal:
            return None  # a template that wants turns to alternate
        added = without[len(before):]
        if not added or not without.startswith(before) or not (whole.startswith(followed) and followed.endswith(added)):
            return None
        return len(followed) - len(added)

    def conversation(self, messages, tools=None, extra=None):
        """ids, and one truth per id: is it the assistant's."""
        whole, spans = self.render(messages, tools, False, extra)
        if not self.marks[self.choose(tools)]:
            spans = [self.turn_span(messages, i, whole, tools, extra) for i, m in enumerate(messages)
                     if m.get("role") == "assistant"]
        encoding = self.encoder.tokenizer.encode(whole, add_special_tokens=False)
        return encoding.ids, learned_by_spans(encoding.offsets, spans)

    def prompt_and_completion(self, prompt, completion, tools=None, extra=None):
        before, _ = self.render(prompt, tools, True, extra)
        whole, _ = self.render(prompt + completion, tools, False, extra)
        if not whole.startswith(before):
            raise self.does_not_hold("the prompt, rendered alone, does not begin the conversation")
        ids = self.encoder.ids(whole, False)
        n = common_prefix(self.encoder.ids(before, False), ids)
        return ids, [False] * n + [True] * (len(ids) - n)


def strings(encoder, prompt, completion):
    """prompt and completion as they are; the completion ends with the token that ends a document."""
    if not completion.endswith(encoder.eos_token):
        completion += encoder.eos_token
    ids = encoder.ids(prompt + completion, True)
    n = common_prefix(encoder.ids(prompt, True), ids)
    return ids, [False] * n + [True] * (len(ids) - n)
