"""Files to token files, for `mtlaunch`, which starts this program and gives it a job on standard input:

    name=value\\0 ...     mode        files | encode | decode
                         tokenizer   a tokenizer.json
                         eos         id that ends a document where the tokenizer's files name none; empty: none
                         files:
                         format      auto | text | chat | prompt-completion
                         key         32 hexadecimal digits: what decides the ids besides the source
                         workers     processes
                         source      a file; followed by
                         output      the token file to make of it
                         ...
                         encode:
                         text        a prompt; several of them
                         decode:
                         prompt      the ids of a prompt, with spaces between; followed by
                         ids         those that continue it; several of them

On standard output, one line each, fields apart by tabs, control bytes as \\xNN:

    progress  done  total                bytes of all sources; at least one line a second
    note      text                       something to show
    ids       number  ids                encode: a part of the ids of a prompt; numbers count from 0, parts come in order
    text      number  bytes              decode: a part of what continues a prompt, UTF-8 in hexadecimal digits
    error     exit status  text  hint    the last line; a program that ends without 0 and without it has failed

A source whose token file holds already is not read again. Memory is bounded: the batches that are under way.
The process group is the caller's to kill; the kernel ends this program with its parent, and the workers with it.
"""
import array
import concurrent.futures
import ctypes
import hashlib
import multiprocessing
import os
import signal
import stat
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

import records
from token_file import (END, FAILED, FIT, INSTRUCTION, TEXT, USER, Header, Refusal, Writer, identity_of,
                        is_certainly_of, os_refusal, read_header, renew)

BATCH_BYTES = 1 << 20
BATCH_ROWS = 1024
WHOLE_TEXT_BYTES = 2 << 20  # a text up to this long is one call; a longer one is cut into pieces
PIECE_BYTES = 1 << 19
PIECE_BYTES_MAX = 32 << 20  # without a place to cut at
CONTEXT_BYTES = 4096  # that a piece is encoded with on each side
PR_SET_PDEATHSIG = 1


def tell(*fields):
    clean = []
    for field in fields:
        text = str(field).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        clean.append("".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text))
    sys.stdout.write("\t".join(clean) + "\n")
    sys.stdout.flush()


# -- worker processes --

worker = {}


def worker_begin(parent, path, eos):
    """Ends with its parent, whatever becomes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    from encoding import Encoder
    try:
        worker["encoder"] = Encoder(path, eos)
    except Refusal as e:
        worker["refusal"] = e


def encoder_of():
    if "refusal" in worker:
        raise worker["refusal"]
    return worker["encoder"]


def chat_of():
    if "chat" not in worker:
        from chat import Chat
        worker["chat"] = Chat(encoder_of())
    return worker["chat"]


class Batch:
    """What became of some records: words, and counts by their names in the header."""

    def __init__(self):
        self.parts, self.counts = [], {"tokens": 0, "documents": 0, "labels": 0, "skipped": 0, "unlabelled": 0,
                                       "token_max": 0}

    def add(self, ids, learned=None):
        from encoding import masked_words, words_of
        labels = len(ids) - 1 if learned is None else sum(learned[1:])
        if learned is not None and labels == 0:
            self.counts["unlabelled"] += 1
            return
        self.counts["tokens"] += len(ids)
        self.counts["documents"] += 1
        self.counts["labels"] += labels
        self.counts["token_max"] = max(self.counts["token_max"], max(ids))
        self.parts.append((words_of(ids) if learned is None else masked_words(ids, learned)).tobytes())

    def result(self):
        return b"".join(self.parts), self.counts


def at(place, refusal):
    return Refusal(refusal.status, "%s: %s" % (place, refusal.text), refusal.hint)


def encode_record(kind, record):
    """ids and learned of one record of instruction data."""
    if kind == "messages":
        return chat_of().conversation(records.messages_at(record, "messages"), records.tools_of(record),
                                      records.extra_of(record))
    if kind == "sharegpt":
        return chat_of().conversation(records.sharegpt_messages(record), records.tools_of(record))
    if kind == "alpaca":
        return chat_of().prompt_and_completion(*records.alpaca_messages(record))
    if isinstance(record["prompt"], list):
        return chat_of().prompt_and_completion(
            records.messages_at(record, "prompt"), records.messages_at(record, "completion"),
            records.tools_of(record), records.extra_of(record))
    from chat import strings
    return strings(encoder_of(), records.text_at(record, "prompt"), records.text_at(record, "completion"))


def is_empty(kind, record):
    """Nothing in it, as an empty line."""
    first = record[records.KINDS[kind][0]]
    return kind != "prompt-completion" and len(first) == 0 if isinstance(first, (str, list)) else False


def encode_instruction(batch, kind, place, record):
    try:
        if is_empty(kind, record):
            batch.counts["skipped"] += 1
        else:
            batch.add(*encode_record(kind, record))
    except Refusal as e:
        raise at(place, e)


def encode_records(kind, placed):
    """placed: (place in words, record) in order."""
    batch, texts = Batch(), []
    for place, record in placed:
        try:
            if any(record.get(k) is None for k in records.KINDS[kind]):
                raise records.bad("expected %s as in the first record, found %s" % (
                    records.wanted_text((kind,)), records.keys_text(record)))
            if kind == "text":
                text = records.text_at(record, "text")
                if text:
                    texts.append(text)
                else:
                    batch.counts["skipped"] += 1
        except Refusal as e:
            raise at(place, e)
        if kind != "text":
            encode_instruction(batch, kind, place, record)
    if texts:
        for ids in encoder_of().documents(texts):
            batch.add(ids)
    return batch


def lines_of(path, number, offset, data):
    """(place, line) of what is not blank; blank lines as None. A line that is not UTF-8 names its byte."""
    for line in data.split(b"\n"):
        place = "%s:%d" % (path, number)
        body = line[3:] if number == 1 and line.startswith(b"\xef\xbb\xbf") else line
        if not body.strip(b" \t\r"):
            yield place, None
        else:
            try:
                yield place, records.parse_line(body)
            except UnicodeDecodeError as e:
                where = offset + len(line) - len(body) + e.start
                raise at(place, records.bad("not valid UTF-8 at byte offset %d of the file" % where,
                                            "convert the file first, for example with iconv -t UTF-8"))
            except Refusal as e:
                raise at(place, e)
        number += 1
        offset += len(line) + 1


def work_lines(kind, path, number, offset, data):
    blank, placed = 0, []
    for place, record in lines_of(path, number, offset, data):
        if record is None:
            blank += 1
        else:
            placed.append((place, record))
    batch = encode_records(kind, placed)
    batch.counts["skipped"] += blank
    return batch.result()


def work_rows(kind, path, first, data):
    import pyarrow
    with pyarrow.ipc.open_stream(data) as reader:
        rows = [row for part in reader for row in part.to_pylist()]
    return encode_records(kind, [("%s: row %d" % (path, first + i), row) for i, row in enumerate(rows)]).result()


def work_text(data):
    batch = Batch()
    batch.add(encoder_of().documents([data.decode("utf-8")])[0])
    return batch.result()


def work_piece(left, body, right):
    inside, start, end = encoder_of().piece(*(part.decode("utf-8") for part in (left, body, right)))
    words = None if inside is None else array.array("I", inside).tobytes()
    return words, max(inside or [0]), start, end


def work_ends():
    encoder = encoder_of()
    return encoder.before, encoder.after


# -- the main process --


class Team:
    """The worker processes, and the results in the order in which the work was given out."""

    def __init__(self, job):
        self.limit = 2 * job.workers + 2
        self.pool = concurrent.futures.ProcessPoolExecutor(
            job.workers, multiprocessing.get_context("fork"), worker_begin, (os.getpid(), job.tokenizer, job.eos))
        # forks all of them now, before libraries start threads; a tokenizer that cannot be loaded is told here
        self.ends = self.one(work_ends)

    def one(self, function, *arguments):
        return self.pool.submit(function, *arguments).result()

    def results(self, calls):
        """calls: (function, arguments ...). Yields results; never more under way than the limit."""
        waiting = []
        for call in calls:
            waiting.append(self.pool.submit(*call))
            if len(waiting) >= self.limit:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()


class Progress:
    def __init__(self, total):
        self.done, self.total, self.shown = 0, total, 0.0

    def add(self, n):
        self.done += n
        self.beat()

    def beat(self):
        now = time.monotonic()
        if now - self.shown >= 0.2:
            self.shown = now
            tell("progress", self.done, self.total)


class Source:
    """A file that is read once from front to back, hashed on the way."""

    def __init__(self, path, progress):
        self.path, self.progress = path, progress
        try:
            # a FIFO must not hang the start
            self.file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)
        except OSError as e:
            raise Refusal(USER, "%s: cannot open: %s" % (path, e.strerror))
        status = os.fstat(self.file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(USER, "%s: expected a regular file" % path)
        if status.st_size == 0:
            raise Refusal(USER, "%s: the file is empty, expected training data" % path)
        self.identity, self.size = identity_of(status), status.st_size
        self.hash = hashlib.blake2b(digest_size=32)

    def read(self, n=BATCH_BYTES):
        parts = []
        while n > 0:
            data = self.file.read(n)
            if not data:
                break
            self.hash.update(data)
            self.progress.add(len(data))
            parts.append(data)
            n -= len(data)
        return b"".join(parts)

    def hash_all(self):
        while self.read():
            pass
        return self.hash.digest()

    def check_unchanged(self):
        now = identity_of(os.fstat(self.file.fileno()))
        if now[2:4] != self.identity[2:4]:
            raise Refusal(FAILED, "%s: the file changed while it was read" % self.path)

    def close(self):
        self.file.close()


def line_batches(source):
    """(number of the first line, its offset, whole lines without the last newline)."""
    number, offset, rest = 1, 0, b""
    while True:
        data = source.read()
        if not data:
            if rest:
                yield number, offset, rest
            return
        cut = data.rfind(b"\n")
        if cut < 0:
            rest += data
            if len(rest) > records.LINE_BYTES_MAX:
                raise Refusal(USER, "%s:%d: the line is longer than %d bytes" % (
                    source.path, number, records.LINE_BYTES_MAX), "split the document into several lines, or make it "
                    "a .txt file")
            continue
        whole = rest + data[:cut]
        yield number, offset, whole
        number += whole.count(b"\n") + 1
        offset += len(whole) + 1
        rest = data[cut + 1:]


class Reader:
    """How the records of a source are read: its kind, and the work that makes words of it."""

    def __init__(self, source, form):
        self.source, self.form, self.kind = source, form, None

    def header_kind(self):
        return TEXT if self.kind == "text" else INSTRUCTION

    def run(self, team, writer, header):
        for words, counts in team.results(self.calls()):
            writer.append(words)
            for name, value in counts.items():
                old = getattr(header, name)
                setattr(header, name, max(old, value) if name == "token_max" else old + value)


class Lines(Reader):
    def calls(self):
        for number, offset, data in line_batches(self.source):
            if self.kind is None:
                self.kind = self.first_kind(number, offset, data)
            if self.kind is not None:
                yield work_lines, self.kind, self.source.path, number, offset, data

    def first_kind(self, number, offset, data):
        for place, record in lines_of(self.source.path, number, offset, data):
            if record is None:
                continue
            try:
                return records.kind_of(record, self.form)
            except Refusal as e:
                raise at(place, e)
        return None


class Rows(Reader):
    """Parquet. The columns decide; the file's bytes are hashed apart, since reading skips."""

    def calls(self):
        import pyarrow
        import pyarrow.parquet
        path = self.source.path
        try:
            file = pyarrow.parquet.ParquetFile(path)
            self.kind = records.kind_of(dict.fromkeys(file.schema_arrow.names, True), self.form)
            wanted = {k for keys in records.KINDS.values() for k in keys} | {
                "tools", "system", "input", "chat_template_kwargs"}
            columns = [n for n in file.schema_arrow.names if n in wanted]
            first, rows = 1, max(file.metadata.num_rows, 1)
            for part in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, part.schema) as stream:
                    stream.write_batch(part)
                yield work_rows, self.kind, path, first, sink.getvalue().to_pybytes()
                first += part.num_rows
                self.source.progress.add(self.source.size * part.num_rows // rows)
        except Refusal as e:
            raise at(path, e)
        except (pyarrow.ArrowException, OSError) as e:
            raise Refusal(USER, "%s: not a Parquet file that pyarrow reads: %s" % (path, e))
        self.source.progress.done -= self.source.size  # hashing counts the same bytes
        self.source.hash_all()


class Text(Reader):
    """A file that is one document. A long one is cut where a line begins, and encoded piece by piece."""

    def run(self, team, writer, header):
        self.kind = "text"
        if self.source.size <= WHOLE_TEXT_BYTES:
            self.run_whole(team, writer, header)
            return
        before, after = team.ends
        header.documents = 1
        self.append(writer, header, before)
        agreed = None
        for words, most, start, end in team.results(self.calls()):
            if words is None or agreed not in (None, start):
                self.refuse("two pieces do not agree about the tokens around a cut")
            agreed = end
            writer.append(words)
            header.tokens += len(words) // 4
            header.token_max = max(header.token_max, most)
        self.append(writer, header, after[:-1] + [after[-1] | END])
        header.labels = header.tokens - 1

    def run_whole(self, team, writer, header):
        data = self.source.read(self.source.size)
        self.check_utf8(data, 0)
        words, counts = team.one(work_text, data)
        writer.append(words)
        for name, value in counts.items():
            setattr(header, name, value)

    @staticmethod
    def append(writer, header, words):
        writer.append(array.array("I", words).tobytes())
        header.tokens += len(words)
        header.token_max = max([header.token_max] + [w & ~END for w in words])

    def refuse(self, what):
        raise Refusal(USER, "%s: too long for one piece, and it cannot be cut: %s" % (self.source.path, what),
                      "split it into several files, or into the lines of a .jsonl file")

    def check_utf8(self, data, offset):
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise Refusal(USER, "%s: not valid UTF-8 at byte offset %d" % (self.source.path, offset + e.start),
                          "convert the file first, for example with iconv -t UTF-8")

    def calls(self):
        """(left, body, right): the body ends before the last line that begins with a letter or the like."""
        left, body, offset = b"", b"", 0
        while True:
            data = self.source.read(PIECE_BYTES)
            if not data:
                break
            body += data
            cut = cut_of(body)
            if cut is None:
                if len(body) > PIECE_BYTES_MAX:
                    self.refuse("no line begins in %d bytes" % len(body))
                continue
            self.check_utf8(body[:cut], offset)
            yield work_piece, left, body[:cut], right_of(body[cut:])
            left, offset, body = left_of(left + body[:cut]), offset + cut, body[cut:]
        self.check_utf8(body, offset)
        yield work_piece, left, body, b""


def begins_at(data, i):
    """Whether a line that begins with something to be seen begins at i."""
    return data[i - 1:i] == b"\n" and data[i:i + 1] not in (b"\n", b"\r", b" ", b"\t", b"\v", b"\f", b"")


def cut_of(data):
    """The last such place that leaves CONTEXT_BYTES behind it."""
    at_byte = len(data) - CONTEXT_BYTES
    while at_byte > CONTEXT_BYTES:
        at_byte = data.rfind(b"\n", 0, at_byte)
        if at_byte < 0:
            return None
        if begins_at(data, at_byte + 1):
            return at_byte + 1
    return None


def left_of(data):
    """The context before: from the beginning of a line, or a character."""
    start = max(0, len(data) - CONTEXT_BYTES)
    while 0 < start < len(data) and data[start] & 0xc0 == 0x80:
        start += 1
    return data[start:]


def right_of(data):
    end = min(len(data), CONTEXT_BYTES)
    while 0 < end < len(data) and data[end] & 0xc0 == 0x80:
        end -= 1
    return data[:end]


READERS = {".jsonl": Lines, ".parquet": Rows}


def reader_of(source, form):
    kind = READERS.get(os.path.splitext(source.path)[1].lower(), Text)
    if kind is Text and form not in ("auto", "text"):
        raise Refusal(USER, "%s: data.format = \"%s\": expected .jsonl or .parquet" % (source.path, form))
    return kind(source, form)


class Job:
    def __init__(self, data):
        self.pairs, self.texts, self.said, fields = [], [], [], {}
        for item in data.split(b"\0"):
            name, _, value = item.partition(b"=")
            value = os.fsdecode(value)
            if name == b"source":
                self.pairs.append([value, None])
            elif name == b"output":
                self.pairs[-1][1] = value
            elif name == b"text":
                self.texts.append(value)
            elif name == b"prompt":
                self.said.append([[int(n) for n in value.split()], None])
            elif name == b"ids":
                self.said[-1][1] = [int(n) for n in value.split()]
            elif name:
                fields[name.decode()] = value
        self.mode, self.tokenizer = fields["mode"], fields["tokenizer"]
        self.format, self.key = fields.get("format"), bytes.fromhex(fields.get("key", ""))
        self.workers = int(fields.get("workers", "1"))
        self.eos = int(fields["eos"]) if fields["eos"] else None


def holds(source, path, job):
    """Whether the token file at path is of this source and these settings."""
    header = read_header(path)
    if header is None or header.key != job.key:
        return False
    if is_certainly_of(header, source.identity):
        return True
    if header.identity[2] != source.size or source.hash_all() != header.source_hash:
        return False
    renew(path, header, source.identity)
    return True


def made_by():
    from importlib.metadata import version
    return "tokenizers %s" % version("tokenizers")


def check_result(source, header):
    if header.documents:
        return
    raise Refusal(USER, "%s: no document in it: %d blank lines or empty records, %d conversations in which nothing is "
                  "learned" % (source.path, header.skipped, header.unlabelled))


def make(source, path, job, team, writer):
    reader = reader_of(source, job.format)
    header = Header(TEXT, job.key, source=source.path, identity=source.identity)
    writer.begin()
    reader.run(team, writer, header)
    header.kind, header.taken_as, header.made_by = reader.header_kind(), reader.kind or "text", made_by()
    check_result(source, header)
    source.check_unchanged()
    header.source_hash = source.hash.digest()
    writer.finish(header)


def one_source(path, output, job, progress, get_team):
    source, writer = Source(path, progress), Writer(output)
    begun = progress.done
    try:
        if not holds(source, output, job):
            os.makedirs(os.path.dirname(output), exist_ok=True)
            writer.open_locked(progress.beat)
            source.close()
            progress.done = begun
            source = Source(path, progress)
            if not holds(source, output, job):  # another process may just have made it
                source.close()
                progress.done = begun
                source = Source(path, progress)
                make(source, output, job, get_team(), writer)
    except OSError as e:
        raise os_refusal(e, e.filename or output)
    finally:
        writer.close()
        source.close()
    progress.done = begun + source.size


PART_IDS = 500
PART_BYTES = 2000


def encode_prompts(job):
    from encoding import Encoder
    encoder = Encoder(job.tokenizer, job.eos)
    for number, text in enumerate(job.texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Refusal(USER, "prompt %d: not valid UTF-8" % (number + 1))
        ids = encoder.before + encoder.ids(text, False) or [encoder.eos_id]
        for i in range(0, len(ids), PART_IDS):
            tell("ids", number, " ".join(map(str, ids[i:i + PART_IDS])))


def decode_continuations(job):
    """A continuation is what the whole has more than the prompt: alone, a first space could be lost."""
    from encoding import Encoder
    tokenizer = Encoder(job.tokenizer, job.eos).tokenizer
    for number, (prompt, ids) in enumerate(job.said):
        before, whole = (tokenizer.decode(i, skip_special_tokens=True) for i in (prompt, prompt + ids))
        text = whole[len(before):] if whole.startswith(before) else tokenizer.decode(ids, skip_special_tokens=True)
        data = text.encode("utf-8")
        for i in range(0, len(data), PART_BYTES):
            tell("text", number, data[i:i + PART_BYTES].hex())


def run(job):
    {"files": make_files, "encode": encode_prompts, "decode": decode_continuations}[job.mode](job)


def make_files(job):
    import encoding  # noqa: F401 - its absence is told before anything is read
    teams = []

    def get_team():
        if not teams:
            teams.append(Team(job))
        return teams[0]

    progress = Progress(sum(os.stat(p).st_size for p, _ in job.pairs if os.path.exists(p)))
    for path, output in job.pairs:
        one_source(path, output, job, progress, get_team)
    tell("progress", progress.total, progress.total)


def main():
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent == 1 or os.getppid() != parent:
        return FAILED
    try:
        run(Job(sys.stdin.buffer.read()))
        return 0
    except Refusal as e:
        refusal = e
    except concurrent.futures.process.BrokenProcessPool:
        refusal = Refusal(FAILED, "a tokenizing process died", "is there enough memory? start again to go on")
    except ImportError as e:
        refusal = Refusal(USER, "the tokenizing environment is not whole: %s" % e)
    except MemoryError:
        refusal = Refusal(FIT, "out of memory while tokenizing")
    tell("error", refusal.status, refusal.text, refusal.hint)
    return refusal.status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what is under way in the workers is of no use
