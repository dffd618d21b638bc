/*
 * Preloaded into a run with the sync engine: a drive that lies about one page image.
 *
 *     TEST_DISK_LIE=read:PAGE:VERSION:TIMES:PATH    the first TIMES reads of that version of that
 * page come with one bit changed TEST_DISK_LIE=write:PAGE:VERSION:TIMES:PATH   the first TIMES
 * writes of it say "done" and never happen
 *
 * Times are counted over all processes, by files PATH.0, PATH.1, ...
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/page_image.h"

enum { CHANGED_BYTE = 5000 }; /* of the image: in its weights */

/* 1: this transfer is one to lie about, and has been counted. */
static int lie(const char *what, const void *image, ssize_t bytes)
{
    const char *text = getenv("TEST_DISK_LIE");
    struct page_image_header header;
    size_t n = strlen(what);
    char *end = NULL, path[512];
    if (!text || bytes <= CHANGED_BYTE || strncmp(text, what, n) != 0)
        return 0;
    unsigned long long page = strtoull(text + n + 1, &end, 10);
    unsigned long long version = strtoull(end + 1, &end, 10);
    long times = strtol(end + 1, &end, 10);
    memcpy(&header, image, sizeof header);
    if (header.layout_version != PAGE_IMAGE_LAYOUT_VERSION || header.page != page ||
        header.version != version)
        return 0;
    for (long i = 0; i < times; i++) {
        (void)snprintf(path, sizeof path, "%s.%ld", end + 1, i);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0) {
            (void)close(fd);
            return 1;
        }
    }
    return 0;
}

ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset)
{
    ssize_t (*real)(int, void *, size_t, off_t) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "pread"); /* as POSIX has it */
    ssize_t n = real(fd, buffer, bytes, offset);
    if (lie("read", buffer, n))
        ((unsigned char *)buffer)[CHANGED_BYTE] ^= 4;
    return n;
}

ssize_t pwrite(int fd, const void *buffer, size_t bytes, off_t offset)
{
    ssize_t (*real)(int, const void *, size_t, off_t) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "pwrite");
    return lie("write", buffer, (ssize_t)bytes) ? (ssize_t)bytes : real(fd, buffer, bytes, offset);
}
