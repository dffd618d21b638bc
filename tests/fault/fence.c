/*
 * A process is killed with reads and writes in flight; its lock tells when the last has landed.
 *
 *     fence FILE own|other
 *
 * FILE has 16 blocks of 64 KiB. A child opens it, locks it, and through io_worker's engine writes
 * blocks 0 to 7 and reads blocks 8 to 15 into memory shared with its parent. The parent kills it
 * when all is submitted, reaps it, and takes the lock; then it fills the shared memory with a
 * pattern and looks for a while whether anything still changes. own: the lock is on the descriptor
 * that the I/O goes through, as in store.c; other: on another descriptor of the same file, which
 * tests show to be too weak. Prints JSON: {"locked_after_s", "changed_blocks_after_lock",
 * "changed_bytes_after_lock"}.
 */
#include "io_worker/engine.h"
#include "procs/clock.h"
#include "procs/error.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 16, BLOCK_BYTES = 65536, WRITTEN = 0x5a, REUSED = 0x11, WATCH_MS = 2500 };

static unsigned char *memory; /* BLOCKS / 2 blocks, shared: what the reads fill */

static void on_done(struct io_request *request, int result)
{
    (void)request; /* nobody lives to see it */
    (void)result;
}

static _Noreturn void child(const char *path, int own, int ready)
{
    static struct io_request requests[BLOCKS];
    struct engine *engine;
    unsigned char *buffer;
    int fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    int other = open(path, O_RDWR | O_CLOEXEC);
    struct engine_file file = {fd, path, 4096};
    struct engine_options options = {
        .kind = ENGINE_URING, .depth = BLOCKS, .files = &file, .n_files = 1};
    if (fd < 0 || other < 0 || flock(own ? fd : other, LOCK_EX | LOCK_NB) < 0 ||
        posix_memalign((void **)&buffer, 4096, BLOCK_BYTES) != 0 ||
        engine_open(&engine, &options) < 0) {
        perror(error_text());
        _exit(1);
    }
    memset(buffer, WRITTEN, BLOCK_BYTES);
    for (int i = 0; i < BLOCKS; i++) {
        int write = i < BLOCKS / 2;
        requests[i] = (struct io_request){
            .op = write ? IO_WRITE : IO_READ,
            .buffer = write ? buffer : memory + (size_t)(i - BLOCKS / 2) * BLOCK_BYTES,
            .offset = (uint64_t)i * BLOCK_BYTES,
            .bytes = BLOCK_BYTES,
            .on_done = on_done};
        (void)engine_submit(engine, &requests[i]);
    }
    (void)!write(ready, "s", 1);
    for (;;)
        (void)pause();
}

/* The first byte of each block that is written. */
static void look(int fd, unsigned char found[BLOCKS / 2], unsigned char *buffer)
{
    for (int i = 0; i < BLOCKS / 2; i++)
        found[i] = pread(fd, buffer, 4096, (off_t)i * BLOCK_BYTES) == 4096 ? buffer[0] : 0;
}

static void watch(int fd, uint64_t locked_ns, uint64_t killed_ns)
{
    const size_t bytes = (size_t)BLOCKS / 2 * BLOCK_BYTES;
    unsigned char before[BLOCKS / 2], after[BLOCKS / 2], *buffer;
    unsigned blocks = 0, scribbled = 0;
    if (posix_memalign((void **)&buffer, 4096, 4096) != 0)
        exit(1);
    memset(memory, REUSED, bytes);
    look(fd, before, buffer);
    (void)usleep(WATCH_MS * 1000);
    look(fd, after, buffer);
    for (int i = 0; i < BLOCKS / 2; i++)
        blocks += before[i] != after[i];
    for (size_t i = 0; i < bytes; i++)
        scribbled += memory[i] != REUSED;
    (void)printf("{\"locked_after_s\": %.3f, \"changed_blocks_after_lock\": %u, "
                 "\"changed_bytes_after_lock\": %u}\n",
                 (double)(locked_ns - killed_ns) * 1e-9, blocks, scribbled);
}

int main(int argc, char **argv)
{
    int ready[2];
    char c;
    if (argc != 3 || pipe(ready) < 0)
        return 2;
    memory = mmap(NULL, (size_t)BLOCKS / 2 * BLOCK_BYTES, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 1;
    pid_t pid = fork();
    if (pid == 0)
        child(argv[1], strcmp(argv[2], "own") == 0, ready[1]);
    (void)close(ready[1]);
    if (pid < 0 || read(ready[0], &c, 1) != 1)
        return 1;
    (void)usleep(100000); /* the kernel has handed them on */
    (void)kill(pid, SIGKILL);
    uint64_t killed_ns = clock_now_ns();
    if (waitpid(pid, NULL, 0) != pid)
        return 1;
    int fd = open(argv[1], O_RDWR | O_DIRECT | O_CLOEXEC);
    while (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
        (void)usleep(2000);
    watch(fd, clock_now_ns(), killed_ns);
    return fd < 0;
}
