/*
 * The simulated disk and its file system.
 *
 * A file has two contents: `now`, what reads return, and `safe`, what survives a loss of power. A
 * write changes `now` and stays pending; a flush that began after it landed makes it safe. When the
 * power goes, each pending write lands in `safe` wholly, in some of its sectors, or not at all, in
 * any order. Names and sizes are pending too, until their directory or file is flushed.
 *
 * A transfer of the engine is in flight until the scheduler lets it land; in any order. It needs no
 * living process: what a dead one started goes on, into shared memory too, and keeps its open file
 * and so its lock, as in Linux. A dead process's O_DSYNC write may land without its sync.
 */
#include "tests/sim/sim.h"

#include "io_worker/engine_backend.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

enum {
    INODES_MAX = 48,
    FILE_BYTES_MAX = 256 << 10,
    OPEN_MAX = 96,
    TRANSFERS_MAX = 512,
    ENGINES_MAX = 16,
    PENDING_MAX = 8192,
    PENDING_BYTES = 8 << 20,
    NAMES_MAX = 128,
};

const char *const disk_fault_names[DISK_FAULT_COUNT] = {
    "none", "eio",         "eio_ever",   "short",     "eintr",    "lost",        "misdirected",
    "rot",  "flush_fails", "cut_before", "cut_after", "cut_torn", "kill_before", "kill_after"};

struct inode {
    char name[SIM_PATH_BYTES]; /* "" : none (any more) */
    int in_use, is_directory, broken;
    uint64_t size, safe_size;
    uint64_t high; /* no byte beyond was ever written */
    unsigned char *now, *safe;
};

struct open_file {
    int refs, inode, locked, flags;
};

/* A write that has landed in `now` and not yet in `safe`. */
struct pending {
    int inode;
    uint64_t offset, bytes, sequence;
    const unsigned char *data;
};

struct name_change {
    int inode, replaced; /* replaced by a rename; -1 none */
    char before[SIM_PATH_BYTES];
};

struct sim_engine {
    int in_use, process;
    unsigned depth, n_files;
    int files[ENGINE_FILES_MAX]; /* open files */
    struct {
        struct io_request *tag;
        int64_t result;
    } finished[ENGINE_DEPTH_MAX];
    unsigned head, tail;
};

struct transfer {
    int in_use, engine, file, dead;
    struct engine_transfer t;
    unsigned char *copy; /* of a dead process's private memory; malloced */
    uint64_t sequence;   /* writes landed when it began */
    enum disk_fault fault;
};

struct disk disk;
static struct inode inodes[INODES_MAX], kept[INODES_MAX];
static struct open_file files[OPEN_MAX];
static struct sim_engine engines[ENGINES_MAX];
static struct transfer transfers[TRANSFERS_MAX];
static struct pending pending[PENDING_MAX];
static unsigned n_pending;
static unsigned char *pending_bytes;
static uint64_t pending_used, sequence;
static struct name_change names[NAMES_MAX];
static unsigned n_names;

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* -- faults -- */

/* What a fault can do to an operation; others wait for the next operation. */
static int applies(enum disk_fault fault, enum io_op op, const struct inode *n)
{
    int checked = strstr(n->name, "store/") != NULL; /* metrics.jsonl and run.id have no digests */
    switch (fault) {
    case DISK_LOST:
    case DISK_MISDIRECTED:
        return op == IO_WRITE && checked;
    case DISK_CUT_TORN:
        return op == IO_WRITE;
    case DISK_FLUSH_FAILS:
        return op == IO_FLUSH && checked;
    case DISK_SHORT:
        return op != IO_FLUSH;
    case DISK_ROT:
        return op != IO_FLUSH && checked;
    default:
        return 1;
    }
}

static void happens(enum disk_fault fault)
{
    disk.done[fault]++;
    sim_trace("disk: %s", disk_fault_names[fault]);
}

/* Nothing happens any more in this process: the power goes at the next tick. */
static _Noreturn void cut(void)
{
    disk.cut = 1;
    for (;;)
        sim_sleep();
}

static int cuts(enum disk_fault fault)
{
    return fault == DISK_CUT_AFTER || fault == DISK_CUT_TORN;
}

/* Counts an operation and says what becomes of it. */
static enum disk_fault next_fault(enum io_op op, const struct inode *n)
{
    uint64_t number = disk.operations++;
    for (unsigned i = 0; i < disk.n_plans; i++) {
        struct disk_plan *plan = &disk.plans[i];
        if (plan->fault == DISK_NONE || plan->operation > number)
            continue;
        enum disk_fault fault = plan->fault;
        if (!applies(fault, op, n))
            continue;
        plan->fault = DISK_NONE;
        if (fault != DISK_SHORT)
            happens(fault);
        if (fault == DISK_CUT_BEFORE)
            cut();
        if (fault == DISK_KILL_BEFORE)
            sim_die(SIGKILL);
        return fault;
    }
    return DISK_NONE;
}

/* -- bytes -- */

static void keep_pending(int inode, uint64_t offset, const void *data, uint64_t bytes)
{
    if (n_pending == PENDING_MAX || pending_used + bytes > PENDING_BYTES) {
        sim_violation("sim: the log of pending writes is full");
        return;
    }
    unsigned char *copy = pending_bytes + pending_used;
    memcpy(copy, data, bytes);
    pending_used += bytes;
    pending[n_pending++] = (struct pending){inode, offset, bytes, ++sequence, copy};
}

static void write_now(int inode, uint64_t offset, const void *data, uint64_t bytes)
{
    struct inode *n = &inodes[inode];
    if (offset + bytes > FILE_BYTES_MAX) {
        sim_violation("sim: %s grows beyond %d bytes", n->name, FILE_BYTES_MAX);
        return;
    }
    memcpy(n->now + offset, data, bytes);
    if (offset + bytes > n->size)
        n->size = offset + bytes;
    if (n->size > n->high)
        n->high = n->size;
    keep_pending(inode, offset, data, bytes);
}

static void settle(const struct pending *p)
{
    memcpy(inodes[p->inode].safe + p->offset, p->data, p->bytes);
}

/* What landed before `upto` is safe. */
static void flush_inode(int inode, uint64_t upto)
{
    unsigned left = 0;
    for (unsigned i = 0; i < n_pending; i++) {
        if (pending[i].inode == inode && pending[i].sequence <= upto)
            settle(&pending[i]);
        else
            pending[left++] = pending[i];
    }
    n_pending = left;
    if (n_pending == 0)
        pending_used = 0;
    inodes[inode].safe_size = inodes[inode].size;
}

/* The kernel's way: the pages are marked clean, what they held reaches no disk. */
static void drop_pending(int inode)
{
    unsigned left = 0;
    for (unsigned i = 0; i < n_pending; i++)
        if (pending[i].inode != inode)
            pending[left++] = pending[i];
    n_pending = left;
    if (sim_chance(2)) /* evicted: later reads see the disk; else the cache still shows the data */
        memcpy(inodes[inode].now, inodes[inode].safe, inodes[inode].safe_size);
}

static void rot(int inode, uint64_t offset, uint64_t bytes)
{
    uint64_t at = offset + sim_below(bytes);
    unsigned char bit = (unsigned char)(1u << sim_below(8));
    struct inode *n = &inodes[inode];
    flush_inode(inode, UINT64_MAX);
    n->now[at] ^= bit;
    n->safe[at] = n->now[at];
}

/* Sectors of a write that the power let through. */
static void settle_torn(const struct pending *p)
{
    uint64_t kind = sim_below(3);
    uint64_t cut = sim_below(p->bytes / SIM_SECTOR_BYTES + 1) * SIM_SECTOR_BYTES;
    for (uint64_t at = 0; at < p->bytes; at += SIM_SECTOR_BYTES) {
        int lands = kind == 0 ? at < cut : kind == 1 ? at >= cut : sim_chance(2);
        uint64_t bytes = least(SIM_SECTOR_BYTES, p->bytes - at);
        if (lands)
            memcpy(inodes[p->inode].safe + p->offset + at, p->data + at, bytes);
    }
}

/* -- one operation on a file, when it lands -- */

static int64_t land_read(struct inode *n, void *buffer, uint64_t offset, uint64_t bytes,
                         enum disk_fault fault)
{
    uint64_t there = offset < n->size ? least(bytes, n->size - offset) : 0;
    if (fault == DISK_SHORT && there > SIM_SECTOR_BYTES) {
        happens(DISK_SHORT);
        there = (1 + sim_below(there / SIM_SECTOR_BYTES)) * SIM_SECTOR_BYTES;
        there = least(there, n->size - offset);
    }
    if (buffer)
        memcpy(buffer, n->now + offset, there);
    if (fault == DISK_ROT && there && buffer) /* on the way: the disk itself is whole */
        ((unsigned char *)buffer)[sim_below(there)] ^= 1u << sim_below(8);
    return (int64_t)there;
}

static int64_t land_write(int inode, int flags, const void *data, uint64_t offset, uint64_t bytes,
                          enum disk_fault fault)
{
    struct inode *n = &inodes[inode];
    uint64_t moved = bytes;
    if (fault == DISK_CUT_TORN) {
        struct pending torn = {inode, offset, bytes, 0, data};
        settle_torn(&torn);
        return (int64_t)bytes;
    }
    /* a table or record that was lost is found by its read-back, before anybody counts on it */
    disk.corrupted += (fault == DISK_LOST && strstr(n->name, "/slots") != NULL) ||
                      fault == DISK_MISDIRECTED || fault == DISK_ROT;
    if (fault == DISK_LOST)
        return (int64_t)bytes;
    if (fault == DISK_SHORT && bytes > SIM_SECTOR_BYTES) {
        happens(DISK_SHORT);
        moved = (1 + sim_below(bytes / SIM_SECTOR_BYTES - 1)) * SIM_SECTOR_BYTES;
    }
    if (fault == DISK_MISDIRECTED) {
        uint64_t other = offset >= bytes && sim_chance(2) ? offset - bytes : offset + bytes;
        if (other + bytes <= n->size)
            write_now(inode, other, data, bytes);
    } else {
        write_now(inode, offset, data, moved);
    }
    if (flags & O_DSYNC)
        flush_inode(inode, UINT64_MAX);
    if (fault == DISK_ROT)
        rot(inode, offset, moved);
    return (int64_t)moved;
}

static int64_t land_flush(int inode, uint64_t upto, enum disk_fault fault)
{
    if (fault == DISK_FLUSH_FAILS) {
        drop_pending(inode);
        return -EIO;
    }
    flush_inode(inode, upto);
    return 0;
}

static int64_t failure(int inode, enum disk_fault fault)
{
    if (fault == DISK_EIO_EVER)
        inodes[inode].broken = 1;
    if (inodes[inode].broken || fault == DISK_EIO)
        return -EIO;
    if (fault == DISK_EINTR)
        return sim_chance(2) ? -EINTR : -EAGAIN;
    return 0;
}

/* -- open files -- */

static int file_of(int fd)
{
    struct sim_fd *f = sim_fd_get(fd);
    return f && f->kind == FD_FILE ? f->object : -1;
}

static void file_release(int file)
{
    if (--files[file].refs == 0)
        files[file].locked = 0;
}

int sim_file_close(int file)
{
    file_release(file);
    return 0;
}

static int find(const char *path)
{
    for (int i = 0; i < INODES_MAX; i++)
        if (inodes[i].in_use && inodes[i].name[0] && strcmp(inodes[i].name, path) == 0)
            return i;
    return -1;
}

static int change_name(int inode, const char *after, int replaced)
{
    if (n_names == NAMES_MAX)
        n_names = 0; /* long ago: durable by now */
    struct name_change *c = &names[n_names++];
    c->inode = inode;
    c->replaced = replaced;
    memcpy(c->before, inodes[inode].name, SIM_PATH_BYTES);
    if (replaced >= 0)
        inodes[replaced].name[0] = '\0';
    (void)snprintf(inodes[inode].name, SIM_PATH_BYTES, "%s", after);
    return 0;
}

static int inode_referenced(int inode)
{
    for (int i = 0; i < OPEN_MAX; i++)
        if (files[i].refs > 0 && files[i].inode == inode)
            return 1;
    for (unsigned i = 0; i < n_names; i++)
        if (names[i].inode == inode || names[i].replaced == inode)
            return 1;
    return 0;
}

static void wipe(struct inode *n)
{
    memset(n->now, 0, n->high);
    memset(n->safe, 0, n->high);
    n->high = n->size = n->safe_size = 0;
}

static int new_inode(const char *path, int is_directory)
{
    for (int i = 0; i < INODES_MAX; i++) {
        struct inode *n = &inodes[i];
        if (n->in_use && (n->name[0] || inode_referenced(i)))
            continue;
        for (unsigned p = 0; n->in_use && p < n_pending; p++)
            if (pending[p].inode == i)
                pending[p].bytes = 0;
        wipe(n);
        n->in_use = 1;
        n->is_directory = is_directory;
        n->broken = 0;
        n->size = n->safe_size = 0;
        n->name[0] = '\0';
        if (path)
            (void)change_name(i, path, -1);
        return i;
    }
    (void)fprintf(stderr, "sim: too many files\n");
    abort();
}

static int open_inode(int inode, int flags)
{
    for (int i = 0; i < OPEN_MAX; i++)
        if (files[i].refs == 0) {
            files[i] = (struct open_file){1, inode, 0, flags};
            return i;
        }
    (void)fprintf(stderr, "sim: too many open files\n");
    abort();
}

int sim_disk_exists(const char *path)
{
    return find(path) >= 0;
}

const unsigned char *sim_disk_bytes(const char *path, uint64_t *n)
{
    int i = find(path);
    *n = i < 0 ? 0 : inodes[i].size;
    return i < 0 ? NULL : inodes[i].now;
}

void sim_disk_write_file(const char *path, const void *bytes, uint64_t n)
{
    int i = find(path);
    if (i < 0) {
        i = new_inode(path, 0);
        n_names--; /* its name is durable too */
    }
    memcpy(inodes[i].now, bytes, n);
    memcpy(inodes[i].safe, bytes, n);
    inodes[i].size = inodes[i].safe_size = n;
    if (n > inodes[i].high)
        inodes[i].high = n;
}

/* -- system calls on files; an error is -1 and errno -- */

static int set_errno(int error)
{
    errno = error;
    return -1;
}

int sim_open(const char *path, int flags, ...);
int sim_open(const char *path, int flags, ...)
{
    int nameless = (flags & O_TMPFILE) == O_TMPFILE;
    if (nameless && strcmp(path, "/dev/shm") == 0)
        return sim_segment_new();
    if (!nameless && (flags & O_DIRECTORY))
        return sim_fd_new(FD_DIRECTORY, 0);
    int inode = nameless ? new_inode(NULL, 0) : find(path);
    if (inode >= 0 && (flags & O_CREAT) && (flags & O_EXCL))
        return set_errno(EEXIST);
    if (inode < 0 && !(flags & O_CREAT))
        return set_errno(ENOENT);
    if (inode < 0)
        inode = new_inode(path, 0);
    if (flags & O_TRUNC)
        inodes[inode].size = 0;
    return sim_fd_new(FD_FILE, open_inode(inode, flags));
}

int sim_flock(int fd, int operation);
int sim_flock(int fd, int operation)
{
    int file = file_of(fd);
    sim_yield();
    if (operation & LOCK_UN) {
        files[file].locked = 0;
        return 0;
    }
    for (int i = 0; i < OPEN_MAX; i++)
        if (i != file && files[i].refs > 0 && files[i].inode == files[file].inode &&
            (files[i].locked & LOCK_EX || (files[i].locked && operation & LOCK_EX)))
            return set_errno(EWOULDBLOCK);
    files[file].locked = operation & (LOCK_SH | LOCK_EX);
    return 0;
}

static ssize_t answer(int64_t result)
{
    return result < 0 ? set_errno((int)-result) : (ssize_t)result;
}

/* A flush, too, may be what finds no room. */
static int is_full(const struct inode *n, enum io_op op)
{
    if (sim.now_ns >= disk.full_until_ns || strcmp(n->name, "/run/metrics.jsonl") != 0 ||
        !(op == IO_WRITE || (op == IO_FLUSH && sim_chance(2))))
        return 0;
    disk.full++;
    sim_trace("disk: full");
    return 1;
}

static ssize_t call(int fd, enum io_op op, void *buffer, uint64_t bytes, uint64_t offset)
{
    int file = file_of(fd);
    sim_yield();
    if (file < 0)
        return set_errno(EBADF);
    int inode = files[file].inode;
    enum disk_fault fault = next_fault(op, &inodes[inode]);
    int64_t result = failure(inode, fault);
    if (fault == DISK_EINTR)
        result = 0; /* a call on a plain file is not interrupted */
    if (result == 0 && is_full(&inodes[inode], op))
        return set_errno(ENOSPC);
    if (result == 0 && op == IO_READ)
        result = land_read(&inodes[inode], buffer, offset, bytes, fault);
    else if (result == 0 && op == IO_WRITE)
        result = land_write(inode, files[file].flags, buffer, offset, bytes, fault);
    else if (result == 0)
        result = land_flush(inode, UINT64_MAX, fault);
    if (fault == DISK_KILL_AFTER)
        sim_die(SIGKILL);
    if (cuts(fault))
        cut();
    sim_yield();
    return answer(result);
}

static ssize_t shared_call(struct sim_fd *f, enum io_op op, void *buffer, uint64_t n, uint64_t at)
{
    uint64_t bytes;
    unsigned char *memory = sim_segment_bytes(f->object, &bytes);
    if (at > bytes)
        return 0;
    n = least(n, bytes - at);
    memcpy(op == IO_READ ? buffer : memory + at, op == IO_READ ? memory + at : buffer, n);
    return (ssize_t)n;
}

ssize_t sim_pread(int fd, void *buffer, size_t n, off_t at);
ssize_t sim_pread(int fd, void *buffer, size_t n, off_t at)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_SHARED)
        return shared_call(f, IO_READ, buffer, n, (uint64_t)at);
    return call(fd, IO_READ, buffer, n, (uint64_t)at);
}

ssize_t sim_pwrite(int fd, const void *buffer, size_t n, off_t at);
ssize_t sim_pwrite(int fd, const void *buffer, size_t n, off_t at)
{
    struct sim_fd *f = sim_fd_get(fd);
    void *from = (void *)(uintptr_t)buffer;
    if (f && f->kind == FD_SHARED)
        return shared_call(f, IO_WRITE, from, n, (uint64_t)at);
    return call(fd, IO_WRITE, from, n, (uint64_t)at);
}

ssize_t sim_write(int fd, const void *buffer, size_t n);
ssize_t sim_write(int fd, const void *buffer, size_t n)
{
    int file = file_of(fd);
    if (file < 0)
        return set_errno(EBADF);
    struct sim_fd *f = sim_fd_get(fd);
    uint64_t at = files[file].flags & O_APPEND ? inodes[files[file].inode].size : f->at;
    ssize_t put = call(fd, IO_WRITE, (void *)(uintptr_t)buffer, n, at);
    f->at = at + (put > 0 ? (uint64_t)put : 0);
    return put;
}

ssize_t sim_read(int fd, void *buffer, size_t n);
ssize_t sim_read(int fd, void *buffer, size_t n)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_SIGNAL && sim_self()->signalled &&
        n == sizeof(struct signalfd_siginfo)) {
        memset(buffer, 0, n);
        ((struct signalfd_siginfo *)buffer)->ssi_signo = SIGTERM;
        sim_self()->signalled = 0;
        return (ssize_t)n;
    }
    if (!f || f->kind == FD_SIGNAL)
        return set_errno(EAGAIN);
    ssize_t got = call(fd, IO_READ, buffer, n, f->at);
    f->at += got > 0 ? (uint64_t)got : 0;
    return got;
}

int sim_fdatasync(int fd);
int sim_fdatasync(int fd)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_DIRECTORY) {
        sim_yield();
        n_names = 0; /* what was named before is durable */
        sim_yield();
        return 0;
    }
    return (int)call(fd, IO_FLUSH, NULL, 0, 0);
}

int sim_fsync(int fd);
int sim_fsync(int fd)
{
    return sim_fdatasync(fd);
}

int sim_ftruncate(int fd, off_t bytes);
int sim_ftruncate(int fd, off_t bytes)
{
    int file = file_of(fd);
    sim_yield();
    if (file < 0)
        return set_errno(EBADF);
    struct inode *n = &inodes[files[file].inode];
    if ((uint64_t)bytes < n->size)
        memset(n->now + bytes, 0, n->size - (uint64_t)bytes);
    n->size = (uint64_t)bytes;
    return 0;
}

int sim_posix_fallocate(int fd, off_t at, off_t bytes);
int sim_posix_fallocate(int fd, off_t at, off_t bytes)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_SHARED) {
        uint64_t all;
        unsigned char *memory = sim_segment_bytes(f->object, &all);
        if (sim_refuses(REFUSE_MEMORY))
            return ENOSPC;
        if ((uint64_t)(at + bytes) > all)
            return ENOMEM;
        memset(memory + at, 0, (uint64_t)bytes);
        f->at = (uint64_t)(at + bytes); /* the segment's size */
        return 0;
    }
    struct inode *n = &inodes[files[file_of(fd)].inode];
    sim_yield();
    if ((uint64_t)(at + bytes) > FILE_BYTES_MAX)
        return ENOSPC;
    if ((uint64_t)(at + bytes) > n->size)
        n->size = (uint64_t)(at + bytes);
    return 0;
}

int sim_access(const char *path, int mode);
int sim_access(const char *path, int mode)
{
    (void)mode;
    return find(path) < 0 ? set_errno(ENOENT) : 0;
}

static void fill_stat(const struct inode *n, struct stat *st)
{
    memset(st, 0, sizeof *st);
    st->st_mode = !n || n->is_directory ? S_IFDIR | 0700 : S_IFREG | 0600;
    st->st_size = n ? (off_t)n->size : 0;
    st->st_blocks = (st->st_size + 511) / 512;
    st->st_uid = geteuid();
    st->st_dev = 1;
    st->st_ino = n ? (ino_t)(n - inodes) + 2 : 1;
}

int sim_stat(const char *path, struct stat *st);
int sim_stat(const char *path, struct stat *st)
{
    int i = find(path);
    if (i < 0 && strcmp(path, "/") != 0)
        return set_errno(ENOENT);
    fill_stat(i < 0 ? NULL : &inodes[i], st);
    return 0;
}

int sim_lstat(const char *path, struct stat *st);
int sim_lstat(const char *path, struct stat *st)
{
    return sim_stat(path, st);
}

int sim_fstat(int fd, struct stat *st);
int sim_fstat(int fd, struct stat *st)
{
    struct sim_fd *f = sim_fd_get(fd);
    if (f && f->kind == FD_SHARED) {
        uint64_t bytes;
        const struct plan *plan = (const void *)sim_segment_bytes(f->object, &bytes);
        memset(st, 0, sizeof *st);
        st->st_size = (off_t)plan->segment_bytes;
        return 0;
    }
    int file = file_of(fd);
    if (file < 0 && (!f || f->kind != FD_DIRECTORY))
        return set_errno(EBADF);
    fill_stat(file < 0 ? NULL : &inodes[files[file].inode], st);
    return 0;
}

/* Only where the end is: the one writer of metrics.jsonl appends. */
off_t sim_lseek(int fd, off_t offset, int whence);
off_t sim_lseek(int fd, off_t offset, int whence)
{
    struct stat st;
    if (whence != SEEK_END || sim_fstat(fd, &st) < 0)
        return set_errno(EBADF);
    return st.st_size + offset;
}

int sim_statvfs(const char *path, struct statvfs *fs);
int sim_statvfs(const char *path, struct statvfs *fs)
{
    (void)path;
    memset(fs, 0, sizeof *fs);
    fs->f_frsize = 4096;
    fs->f_bavail = 1 << 20;
    return 0;
}

int sim_fstatfs(int fd, struct statfs *fs);
int sim_fstatfs(int fd, struct statfs *fs)
{
    (void)fd;
    memset(fs, 0, sizeof *fs);
    return 0;
}

int sim_statx(int fd, const char *path, int flags, unsigned mask, struct statx *st);
int sim_statx(int fd, const char *path, int flags, unsigned mask, struct statx *st)
{
    (void)fd;
    (void)path;
    (void)flags;
    memset(st, 0, sizeof *st);
    st->stx_mask = mask;
    st->stx_dio_offset_align = st->stx_dio_mem_align = SIM_SECTOR_BYTES;
    return 0;
}

int sim_fcntl(int fd, int command, ...);
int sim_fcntl(int fd, int command, ...)
{
    va_list args;
    va_start(args, command);
    int value = va_arg(args, int), file = file_of(fd);
    va_end(args);
    if (command == F_GETFL)
        return file < 0 ? 0 : files[file].flags;
    if (command == F_SETFL && file >= 0)
        files[file].flags = value;
    return 0;
}

int sim_mkdir(const char *path, mode_t mode);
int sim_mkdir(const char *path, mode_t mode)
{
    (void)mode;
    sim_yield();
    if (find(path) >= 0)
        return set_errno(EEXIST);
    (void)new_inode(path, 1);
    return 0;
}

int sim_rename(const char *from, const char *to);
int sim_rename(const char *from, const char *to)
{
    int inode = find(from);
    sim_yield();
    if (inode < 0)
        return set_errno(ENOENT);
    return change_name(inode, to, find(to));
}

int sim_unlink(const char *path);
int sim_unlink(const char *path)
{
    int inode = find(path);
    return inode < 0 ? set_errno(ENOENT) : change_name(inode, "", -1);
}

FILE *sim_fopen(const char *path, const char *mode);
FILE *sim_fopen(const char *path, const char *mode)
{
    int inode = find(path);
    (void)mode;
    if (inode < 0) {
        errno = ENOENT;
        return NULL;
    }
    static char empty[1];
    struct inode *n = &inodes[inode];
    return n->size ? fmemopen(n->now, n->size, "r") : fmemopen(empty, 1, "r");
}

/* -- the engine's backend -- */

static int backend_create(const struct engine_options *options, void **self)
{
    struct sim_engine *e = NULL;
    for (int i = 0; i < ENGINES_MAX && !e; i++)
        if (!engines[i].in_use)
            e = &engines[i];
    if (!e)
        return error_set(ERROR_FAILED, "sim: too many engines");
    e->in_use = 1;
    e->process = sim.current;
    e->depth = options->depth;
    e->n_files = options->n_files;
    e->head = e->tail = 0;
    for (unsigned i = 0; i < options->n_files; i++) {
        e->files[i] = file_of(options->files[i].fd);
        files[e->files[i]].refs++; /* registered with the ring */
    }
    *self = e;
    return 0;
}

int engine_uring_create(const struct engine_options *options, void **self, char *notice,
                        uint64_t notice_bytes)
{
    (void)notice_bytes;
    *notice = '\0';
    return backend_create(options, self);
}

static void backend_start(void *self, const struct engine_transfer *t)
{
    struct sim_engine *e = self;
    struct transfer *f = NULL;
    sim_yield();
    enum disk_fault fault = next_fault(t->op, &inodes[files[e->files[t->file]].inode]);
    for (int i = 0; i < TRANSFERS_MAX && !f; i++)
        if (!transfers[i].in_use)
            f = &transfers[i];
    if (!f) {
        sim_violation("sim: more than %d transfers", TRANSFERS_MAX);
        return;
    }
    *f = (struct transfer){.in_use = 1,
                           .engine = (int)(e - engines),
                           .file = e->files[t->file],
                           .t = *t,
                           .sequence = sequence,
                           .fault = fault};
    files[f->file].refs++;
    disk.in_flight++;
    disk.transfers++;
    if (fault == DISK_KILL_AFTER)
        sim_die(SIGKILL);
    sim_yield();
}

static int backend_collect(void *self, struct io_request **tag, int64_t *result)
{
    struct sim_engine *e = self;
    if (e->head == e->tail)
        return 0;
    *tag = e->finished[e->head % ENGINE_DEPTH_MAX].tag;
    *result = e->finished[e->head++ % ENGINE_DEPTH_MAX].result;
    return 1;
}

static int backend_event_fd(const void *self)
{
    const struct sim_engine *e = self;
    int object = (int)(e - engines);
    struct sim_process *p = sim_self();
    for (int fd = 3; fd < SIM_FDS_MAX; fd++)
        if (p->fds[fd].kind == FD_EVENT && p->fds[fd].object == object)
            return fd;
    return sim_fd_new(FD_EVENT, object);
}

static void engine_free(struct sim_engine *e)
{
    for (unsigned i = 0; i < e->n_files; i++)
        file_release(e->files[i]);
    e->in_use = 0;
}

static void backend_close(void *self)
{
    struct sim_process *p = sim_self();
    int object = (int)((struct sim_engine *)self - engines);
    for (int fd = 3; fd < SIM_FDS_MAX; fd++)
        if (p->fds[fd].kind == FD_EVENT && p->fds[fd].object == object)
            p->fds[fd].kind = FD_NONE;
    engine_free(self);
}

const struct engine_backend engine_uring_backend = {.name = "sim",
                                                    .start = backend_start,
                                                    .collect = backend_collect,
                                                    .event_fd = backend_event_fd,
                                                    .close = backend_close};

int sim_disk_readable(int engine)
{
    return engines[engine].in_use && engines[engine].head != engines[engine].tail;
}

/* -- landing -- */

static int64_t land(struct transfer *f)
{
    int inode = files[f->file].inode, flags = files[f->file].flags;
    unsigned char *buffer = f->t.buffer;
    if (f->copy)
        buffer = f->copy;
    int64_t result = failure(inode, f->fault);
    if (result < 0)
        return result;
    if (f->t.op == IO_READ) /* a dead process's private memory is nobody's any more */
        return land_read(&inodes[inode], f->dead && sim_is_private(buffer) ? NULL : buffer,
                         f->t.offset, f->t.bytes, f->fault);
    if (f->t.op == IO_FLUSH)
        return land_flush(inode, f->sequence, f->fault);
    if (f->dead && sim_chance(2))
        flags &= ~O_DSYNC;
    return land_write(inode, flags, buffer, f->t.offset, f->t.bytes, f->fault);
}

static void transfer_end(struct transfer *f)
{
    free(f->copy);
    f->copy = NULL;
    f->in_use = 0;
    disk.in_flight--;
    file_release(f->file);
}

int sim_disk_land_one(void)
{
    uint64_t chosen = sim_below(disk.in_flight);
    for (int i = 0; i < TRANSFERS_MAX; i++) {
        struct transfer *f = &transfers[i];
        if (!f->in_use || chosen-- > 0)
            continue;
        if (f->dead && !sim_chance(8))
            return 1; /* a dead process's I/O is slow to end */
        int64_t result = land(f);
        if (cuts(f->fault))
            disk.cut = 1;
        if (f->fault != DISK_NONE && !f->dead && sim_chance(4)) { /* before it can look */
            disk.done[DISK_KILL_AFTER]++;
            sim_doom(&sim.processes[engines[f->engine].process], 1);
        }
        sim_trace("disk: %s of %u bytes at %llu of %s ends with %lld%s",
                  f->t.op == IO_READ    ? "read"
                  : f->t.op == IO_WRITE ? "write"
                                        : "flush",
                  f->t.bytes, (unsigned long long)f->t.offset, inodes[files[f->file].inode].name,
                  (long long)result, f->dead ? " (of a dead process)" : "");
        if (!f->dead) {
            struct sim_engine *e = &engines[f->engine];
            e->finished[e->tail % ENGINE_DEPTH_MAX].tag = f->t.tag;
            e->finished[e->tail++ % ENGINE_DEPTH_MAX].result = result;
        }
        transfer_end(f);
        return 1;
    }
    return 0;
}

void sim_disk_orphan(int process)
{
    for (int i = 0; i < ENGINES_MAX; i++) {
        if (!engines[i].in_use || engines[i].process != process)
            continue;
        for (int t = 0; t < TRANSFERS_MAX; t++) {
            struct transfer *f = &transfers[t];
            if (!f->in_use || f->dead || f->engine != i)
                continue;
            f->dead = 1;
            if (f->t.op == IO_WRITE && sim_is_private(f->t.buffer)) {
                f->copy = malloc(f->t.bytes);
                memcpy(f->copy, f->t.buffer, f->t.bytes);
            }
        }
        engine_free(&engines[i]);
    }
}

/* Is shared memory the target of a transfer that has not landed? */
int sim_segment_busy(const unsigned char *begin, uint64_t bytes)
{
    for (int t = 0; t < TRANSFERS_MAX; t++) {
        const unsigned char *at = transfers[t].t.buffer;
        if (transfers[t].in_use && at >= begin && at < begin + bytes)
            return 1;
    }
    return 0;
}

/* -- power -- */

static void lose_names(void)
{
    unsigned kept_names = (unsigned)sim_below(n_names + 1);
    while (n_names > kept_names) {
        struct name_change *c = &names[--n_names];
        if (c->replaced >= 0)
            memcpy(inodes[c->replaced].name, inodes[c->inode].name, SIM_PATH_BYTES);
        memcpy(inodes[c->inode].name, c->before, SIM_PATH_BYTES);
    }
    n_names = 0;
}

static void end_transfers(void)
{
    for (int t = 0; t < TRANSFERS_MAX; t++) {
        struct transfer *f = &transfers[t];
        if (!f->in_use)
            continue;
        const unsigned char *data = f->copy ? f->copy : f->t.buffer;
        if (f->t.op == IO_WRITE && sim_chance(2))
            keep_pending(files[f->file].inode, f->t.offset, data, f->t.bytes);
        transfer_end(f);
    }
}

static void shuffle_pending(void)
{
    for (unsigned i = n_pending; i > 1; i--) {
        unsigned j = (unsigned)sim_below(i);
        struct pending swap = pending[i - 1];
        pending[i - 1] = pending[j];
        pending[j] = swap;
    }
}

/* A file grows in order: what was appended is there up to some byte, or not at all. */
static void settle_append(struct inode *n)
{
    uint64_t size = n->safe_size + sim_below(n->size - n->safe_size + 1);
    memcpy(n->safe + n->safe_size, n->now + n->safe_size, size - n->safe_size);
    n->safe_size = size;
}

void sim_disk_power_cut(void)
{
    unsigned all = (unsigned)sim_below(4); /* often everything lands, or nothing */
    end_transfers();
    shuffle_pending();
    for (unsigned i = 0; i < n_pending; i++) {
        uint64_t fate = all == 0 ? 0 : all == 1 ? 1 : sim_below(3);
        if (fate == 0)
            settle(&pending[i]);
        else if (fate == 2)
            settle_torn(&pending[i]);
    }
    n_pending = 0;
    pending_used = 0;
    lose_names();
    for (int i = 0; i < INODES_MAX; i++) {
        struct inode *n = &inodes[i];
        if (!n->in_use)
            continue;
        if (n->size > n->safe_size)
            settle_append(n);
        else if (n->size < n->safe_size && sim_chance(2))
            n->safe_size = n->size;
        n->size = n->safe_size;
        memcpy(n->now, n->safe, n->size);
    }
    for (int i = 0; i < OPEN_MAX; i++)
        files[i].refs = files[i].locked = 0;
    for (int i = 0; i < ENGINES_MAX; i++)
        engines[i].in_use = 0;
    disk.cut = 0;
    disk.in_flight = 0;
}

/* -- opening -- */

void sim_disk_open(void)
{
    pending_bytes = malloc(PENDING_BYTES);
    for (int i = 0; i < INODES_MAX; i++) {
        inodes[i].now = calloc(1, FILE_BYTES_MAX);
        inodes[i].safe = calloc(1, FILE_BYTES_MAX);
        kept[i].now = calloc(1, FILE_BYTES_MAX);
    }
}

static void forget(void)
{
    for (int t = 0; t < TRANSFERS_MAX && disk.in_flight; t++)
        if (transfers[t].in_use)
            transfer_end(&transfers[t]);
    memset(files, 0, sizeof files);
    for (int i = 0; i < ENGINES_MAX; i++)
        engines[i].in_use = 0;
    n_pending = n_names = 0;
    pending_used = sequence = 0;
    memset(&disk, 0, sizeof disk);
}

void sim_disk_format(void)
{
    forget();
    for (int i = 0; i < INODES_MAX; i++) {
        struct inode *n = &inodes[i];
        wipe(n);
        n->in_use = 0;
        n->name[0] = '\0';
    }
}

static void copy_inode(struct inode *to, const struct inode *from)
{
    unsigned char *now = to->now, *safe = to->safe;
    uint64_t high = to->high > from->size ? to->high : from->size;
    *to = *from;
    to->high = high;
    to->now = now;
    to->safe = safe;
    memcpy(now, from->now, from->size);
}

void sim_disk_keep(void)
{
    for (int i = 0; i < INODES_MAX; i++)
        copy_inode(&kept[i], &inodes[i]);
}

void sim_disk_restore(void)
{
    forget();
    for (int i = 0; i < INODES_MAX; i++) {
        struct inode *n = &inodes[i];
        if (n->high > kept[i].size) {
            memset(n->now + kept[i].size, 0, n->high - kept[i].size);
            memset(n->safe + kept[i].size, 0, n->high - kept[i].size);
        }
        copy_inode(n, &kept[i]);
        n->safe_size = n->high = n->size;
        memcpy(n->safe, n->now, n->size);
    }
}

void sim_disk_heal(void)
{
    for (int i = 0; i < INODES_MAX; i++)
        inodes[i].broken = 0;
    for (int t = 0; t < TRANSFERS_MAX; t++) /* a dead process's may still be under way */
        if (transfers[t].fault == DISK_EIO_EVER)
            transfers[t].fault = DISK_EIO;
    disk.n_plans = 0;
    disk.full_until_ns = 0;
}
