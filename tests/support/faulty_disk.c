/* A library for LD_PRELOAD that counts, records and disturbs the file operations of a process below one folder.

   Nothing happens before `faults_arm`. From then on every operation below the folder that belongs to a kind in `kinds`
   gets a number from 1 on, and those numbered first .. first + count - 1 are disturbed: the process kills itself (a
   write is torn in the middle), stops itself, waits, gets an error, or sees another time of day from then on. With a
   log, every operation that changes files is recorded with its data after it has succeeded (support/faulty_disk.py
   reads it). Reads and the clock are never recorded. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN_WRITE = 1, WRITE = 2, TRUNCATE = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, FSYNC = 64, READ = 128,
       OPEN_READ = 256, LINK = 512 };
enum { RECORD, KILL, FAIL, DELAY, CLOCK, STOP };
enum { MAX_FDS = 65536 };

static int armed, action, kinds, error_number, log_fd = -1;
static long first, count, number, struck, delay_us;
static long long clock_offset_s;
static volatile int clock_moved;
static char root[PATH_MAX];
static size_t root_length;
static unsigned char tracked[MAX_FDS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...) \
    static type (*real_##name)(__VA_ARGS__); \
    if (!real_##name) real_##name = dlsym(RTLD_NEXT, #name)

void faults_arm(const char *folder, const char *log, int what, int which, long from, long many, int error, long us,
                long long offset_s) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    if (log) log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
    action = what, kinds = which, first = from, count = many, error_number = error, delay_us = us;
    clock_offset_s = offset_s;
    armed = 1;
}

long faults_number(void) { return number; }
long faults_struck(void) { return struck; }

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The absolute path; 0 if it is not below the folder. */
static int absolute(int folder, const char *path, char *out) {
    if (!armed || !path) return 0;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return 0;
        strcpy(out, path);
    } else {
        char link[64];
        if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
        if (length < 0 || length + strlen(path) + 2 > PATH_MAX) return 0;
        out[length] = '/';
        strcpy(out + length + 1, path);
    }
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/') out[--length] = 0;
    return below(out);
}

static int is_tracked(int fd) { return armed && fd >= 0 && fd < MAX_FDS && tracked[fd]; }

static void put(const void *data, size_t size) {
    while (size > 0) {
        ssize_t done = syscall(SYS_write, log_fd, data, size);
        if (done <= 0) abort();
        data = (const char *)data + done, size -= (size_t)done;
    }
}

/* Record: kind, flags, inode, offset, time, two lengths, path (or nothing), data or second path. */
static void record(int kind, int flags, uint64_t inode, int64_t offset, const char *path, const void *data, size_t size) {
    if (log_fd < 0) return;
    int saved = errno;
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    struct { int32_t kind, flags; uint64_t inode; int64_t offset; double time_s; uint32_t path, data; } head = {
        kind, flags, inode, offset, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec,
        path ? (uint32_t)strlen(path) : 0, (uint32_t)size };
    pthread_mutex_lock(&mutex);
    put(&head, sizeof head);
    if (path) put(path, strlen(path));
    if (size) put(data, size);
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

static uint64_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) ? 0 : (uint64_t)status.st_ino;
}

/* Count an operation and disturb it if it is its turn. Returns 1 if it must fail, 2 if a write is to be torn. */
static int disturb(int kind) {
    if (!(kinds & kind)) return 0;
    pthread_mutex_lock(&mutex);
    long mine = ++number;
    int turn = mine >= first && (count < 0 || mine < first + count);
    if (turn) struck++;
    pthread_mutex_unlock(&mutex);
    if (!turn) return 0;
    switch (action) {
    case KILL:
        if (kind == WRITE) return 2;
        raise(SIGKILL);
        break;
    case STOP: raise(SIGSTOP); break;
    case DELAY: {
        struct timespec wait = { delay_us / 1000000, delay_us % 1000000 * 1000 };
        nanosleep(&wait, NULL);
        break;
    }
    case CLOCK: clock_moved = 1; break;
    case FAIL: errno = error_number; return 1;
    }
    return 0;
}


static int open_at(int folder, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    int inside = absolute(folder, path, whole);
    if (inside) {
        int kind = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT ? OPEN_WRITE : flags & O_DIRECTORY ? 0 : OPEN_READ;
        if (kind && disturb(kind) == 1) return -1;
    }
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && fd < MAX_FDS) tracked[fd] = (unsigned char)inside;
    if (fd >= 0 && inside) record(OPEN_WRITE, flags, inode_of(fd), 0, whole, NULL, 0);  /* folders too: fsync names inodes */
    return fd;
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_at(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_at(folder, path, flags | O_LARGEFILE, mode); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int fd) {
    if (fd == log_fd && log_fd >= 0) { errno = EBADF; return -1; }  /* whoever closes every descriptor */
    if (fd >= 0 && fd < MAX_FDS) tracked[fd] = 0;
    REAL(int, close, int);
    return real_close(fd);
}

static void tear(void) { raise(SIGKILL); for (;;) pause(); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (!is_tracked(fd)) return real_write(fd, data, size);
    int verdict = disturb(WRITE);
    if (verdict == 1) return -1;
    if (verdict == 2) { real_write(fd, data, size / 2); tear(); }
    ssize_t done = real_write(fd, data, size);
    if (done > 0) record(WRITE, 0, inode_of(fd), lseek(fd, 0, SEEK_CUR) - done, NULL, data, (size_t)done);
    return done;
}

static ssize_t pwrite_any(int fd, const void *data, size_t size, off_t offset) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off_t);
    if (!is_tracked(fd)) return real_pwrite64(fd, data, size, offset);
    int verdict = disturb(WRITE);
    if (verdict == 1) return -1;
    if (verdict == 2) { real_pwrite64(fd, data, size / 2, offset); tear(); }
    ssize_t done = real_pwrite64(fd, data, size, offset);
    if (done > 0) record(WRITE, 0, inode_of(fd), offset, NULL, data, (size_t)done);
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite_any(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite_any(fd, data, size, offset); }

/* What the kernel wrote by itself (vectors, copies), read back for the log. */
static void record_range(int fd, int64_t offset, size_t size) {
    if (log_fd < 0 || !size) return;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int again = (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0);
    char *data = malloc(size);
    if (again < 0 || !data || syscall(SYS_pread64, again, data, size, offset) != (ssize_t)size) abort();
    record(WRITE, 0, inode_of(fd), offset, NULL, data, size);
    free(data);
    syscall(SYS_close, again);
}

ssize_t writev(int fd, const struct iovec *parts, int many) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    if (!is_tracked(fd)) return real_writev(fd, parts, many);
    int verdict = disturb(WRITE);
    if (verdict == 1) return -1;
    if (verdict == 2) { real_writev(fd, parts, many / 2); tear(); }
    ssize_t done = real_writev(fd, parts, many);
    if (done > 0) record_range(fd, lseek(fd, 0, SEEK_CUR) - done, (size_t)done);
    return done;
}

ssize_t sendfile64(int out, int in, off_t *offset, size_t size) {
    REAL(ssize_t, sendfile64, int, int, off_t *, size_t);
    if (!is_tracked(out)) return real_sendfile64(out, in, offset, size);
    int verdict = disturb(WRITE);
    if (verdict == 1) return -1;
    if (verdict == 2) tear();
    ssize_t done = real_sendfile64(out, in, offset, size);
    if (done > 0) record_range(out, lseek(out, 0, SEEK_CUR) - done, (size_t)done);
    return done;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile64(out, in, offset, size); }

ssize_t copy_file_range(int in, off_t *in_offset, int out, off_t *out_offset, size_t size, unsigned flags) {
    (void)in, (void)in_offset, (void)out, (void)out_offset, (void)size, (void)flags;
    errno = ENOSYS;  /* callers fall back on sendfile or write */
    return -1;
}

ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    if (is_tracked(fd) && disturb(READ) == 1) return -1;
    return real_read(fd, data, size);
}
ssize_t pread64(int fd, void *data, size_t size, off_t offset) {
    REAL(ssize_t, pread64, int, void *, size_t, off_t);
    if (is_tracked(fd) && disturb(READ) == 1) return -1;
    return real_pread64(fd, data, size, offset);
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

int ftruncate64(int fd, off_t size) {
    REAL(int, ftruncate64, int, off_t);
    if (!is_tracked(fd)) return real_ftruncate64(fd, size);
    if (disturb(TRUNCATE) == 1) return -1;
    int status = real_ftruncate64(fd, size);
    if (!status) record(TRUNCATE, 0, inode_of(fd), size, NULL, NULL, 0);
    return status;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_any(int fd, int call) {
    if (is_tracked(fd) && disturb(FSYNC) == 1) return -1;
    int status = (int)syscall(call, fd);
    if (is_tracked(fd) && !status) record(FSYNC, 0, inode_of(fd), 0, NULL, NULL, 0);
    return status;
}
int fsync(int fd) { return sync_any(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_any(fd, SYS_fdatasync); }

static int rename_any(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int inside = absolute(from_folder, from, a) & absolute(to_folder, to, b);
    if (inside && disturb(RENAME) == 1) return -1;
    int status = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (inside && !status) record(RENAME, (int)flags, 0, 0, a, b, strlen(b));
    return status;
}
int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_any(a, from, b, to, flags); }

int unlinkat(int folder, const char *path, int flags) {
    char whole[PATH_MAX];
    int inside = absolute(folder, path, whole);
    if (inside && disturb(UNLINK) == 1) return -1;
    int status = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (inside && !status) record(UNLINK, flags, 0, 0, whole, NULL, 0);
    return status;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    int status = unlink(path);
    return status && (errno == EISDIR || errno == EPERM) ? rmdir(path) : status;
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int inside = absolute(from_folder, from, a) & absolute(to_folder, to, b);
    if (inside && disturb(LINK) == 1) return -1;
    int status = (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
    if (inside && !status) record(LINK, flags, 0, 0, a, b, strlen(b));
    return status;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char whole[PATH_MAX];
    int inside = absolute(folder, path, whole);
    if (inside && disturb(MKDIR) == 1) return -1;
    int status = (int)syscall(SYS_mkdirat, folder, path, mode);
    if (inside && !status) record(MKDIR, 0, 0, 0, whole, NULL, 0);
    return status;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    int status = real_clock_gettime(clock, now);
    if (clock_moved && !status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += clock_offset_s;
    return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
