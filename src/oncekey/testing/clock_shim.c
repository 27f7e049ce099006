/* A wall clock that a test can turn: this preloaded library adds an offset to the time of the C library.

   The offset, in nanoseconds, is the first eight bytes of the file that ONCEKEY_CLOCK names. The file is mapped and
   shared, so a change applies at once, in this process and in all that it forks. The monotonic clock does not change,
   as when an operator or NTP sets the time. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static volatile int64_t *offset;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void prepare(void) {
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("ONCEKEY_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped != MAP_FAILED) offset = mapped;
    }
}

static void turn(struct timespec *now) {
    int64_t all = now->tv_sec * SECOND + now->tv_nsec + (offset ? *offset : 0);
    now->tv_sec = all / SECOND;
    now->tv_nsec = all % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) prepare();
    int failed = real_clock_gettime(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) turn(now);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return (time_t)-1;
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
