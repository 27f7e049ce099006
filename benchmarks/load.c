/* An HTTP/1.1 load generator for `python -m benchmarks`: one thread, epoll, keep-alive, one request at a time per
 * connection, and an Idempotency-Key of its own for every request where that is asked for.
 *
 *   load --port N --mode bare|first|replay|mix [--host 127.0.0.1] [--connections 64] [--seconds 5] [--warmup 1]
 *        [--path /payments] [--body JSON] [--run HEX12] [--keys 1000]
 *
 * Modes: no key at all; a new key with every request; keys that were primed, over and over (--keys 1: one hot key);
 * nine new keys and one that was primed. Phases: prime (replay and mix: every key once, none counted), warm up, measure,
 * drain. Prints one line of JSON, and
 * ends with status 1 when anything but a 2xx came back or a connection was lost. Talks to 127.0.0.0/8 only.
 *
 * Keys look like random UUIDs, as those of real clients do: the run's 12 hex digits, then a counter under a mixing
 * function that maps no two counters to one value. So none repeats, and none falls next to the one before it in an
 * index.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { IN_MAX = 65536, OUT_MAX = 131072, KEY_LEN = 36, DRAIN_SECONDS = 10, PRIME_SECONDS = 60 };
enum { MIX_OF = 10 }; /* in mix, one request of so many is a replay */
enum mode { BARE, FIRST, REPLAY, MIX };
enum chunk { WHOLE, SIZE, EXTENSION, DATA, AFTER_DATA, TRAILER, IN_TRAILER, LAST }; /* WHOLE: it has a length */
enum phase { PRIME, WARM, MEASURE, DRAIN };
static const char *const MODES[] = {"bare", "first", "replay", "mix"};

struct conn {
    int fd;
    bool waiting;      /* a request is out, its response not yet complete */
    size_t sent;       /* of this connection's request */
    double began;      /* when the request was started */
    size_t have;       /* bytes of a head that is not complete yet */
    bool in_body;
    long long body_left; /* of the body, or of the chunk that is being read */
    enum chunk chunk;
    int status;
    bool replayed;
    char *out;         /* the request; the key is written over its place in it */
    char in[IN_MAX];
};

static enum mode mode = BARE;
static enum phase phase = WARM;
static const char *host = "127.0.0.1", *path = "/payments", *run = "000000000000";
static const char *body = "{\"amount\":1299,\"currency\":\"EUR\",\"recipient\":\"acct_42\"}";
static long port = 0, connections = 64, keys = 1000;
static double seconds = 5, warmup = 1;

static size_t request_len, key_at; /* key_at 0: the request carries no key */
static uint64_t counter;           /* of keys given out */
static long primed, outstanding, alive;
static uint64_t by_status[600], total, replayed_total, errors, answered; /* answered: in every phase */
static uint32_t *samples; /* microseconds, of the measured requests */
static size_t samples_size;

static _Noreturn void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(2);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* ---- requests ---------------------------------------------------------------------------------------------- */

static size_t build_request(char *into) {
    int n = snprintf(into, OUT_MAX,
                     "POST %s HTTP/1.1\r\nHost: %s:%ld\r\nAuthorization: Bearer tenant-a\r\n"
                     "Content-Type: application/json\r\nContent-Length: %zu\r\n",
                     path, host, port, strlen(body));
    if (n > 0 && n < OUT_MAX && mode != BARE) {
        key_at = (size_t)n + strlen("Idempotency-Key: \"");
        n += snprintf(into + n, (size_t)(OUT_MAX - n), "Idempotency-Key: \"%0*d\"\r\n", KEY_LEN, 0);
    }
    if (n > 0 && n < OUT_MAX)
        n += snprintf(into + n, (size_t)(OUT_MAX - n), "\r\n%s", body);
    if (n <= 0 || n >= OUT_MAX)
        die("path and body are too long: %d bytes hold the whole request", OUT_MAX);
    return (size_t)n;
}

/* The finalizer of splitmix64: a bijection, so that counters never meet. */
static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void write_key(char *at, uint64_t number) {
    char text[KEY_LEN + 1];
    uint64_t m = mixed(number + 1);
    snprintf(text, sizeof text, "%.8s-%.4s-4%03x-%04x-%012llx", run, run + 8, (unsigned)(m >> 52),
             0x8000u | (unsigned)(m >> 48 & 0xf), (unsigned long long)(m & UINT64_C(0xffffffffffff)));
    memcpy(at, text, KEY_LEN);
}

static void lost(struct conn *c, const char *why) {
    if (errors++ == 0)
        fprintf(stderr, "load: a connection was lost: %s\n", why);
    close(c->fd);
    c->fd = -1;
    alive--;
    outstanding -= c->waiting;
    c->waiting = false;
}

static void flush_request(struct conn *c, int epoll) {
    bool stalled = c->sent > 0;
    while (c->sent < request_len) {
        ssize_t n = send(c->fd, c->out + c->sent, request_len - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN) {
            lost(c, strerror(errno));
            return;
        }
        if (n < 0)
            break;
        c->sent += (size_t)n;
    }
    if (c->sent < request_len || stalled) { /* seldom: the socket's buffer was full */
        struct epoll_event e = {.events = EPOLLIN | (c->sent < request_len ? EPOLLOUT : 0), .data.ptr = c};
        epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &e);
    }
}

/* Which key the n-th request carries. The first `keys` of replay and mix are those that are primed. */
static uint64_t key_number(uint64_t n) {
    uint64_t primed_keys = (uint64_t)keys;
    if (mode == REPLAY)
        return n % primed_keys;
    return mode == MIX && n >= primed_keys && n % MIX_OF == 0 ? n / MIX_OF % primed_keys : n;
}

static void start_request(struct conn *c, int epoll, double at) {
    if (c->fd < 0 || phase == DRAIN || (phase == PRIME && counter >= (uint64_t)keys))
        return;
    if (key_at) {
        write_key(c->out + key_at, key_number(counter++));
    }
    c->sent = c->have = 0;
    c->in_body = c->replayed = false;
    c->waiting = true;
    c->began = at;
    outstanding++;
    flush_request(c, epoll);
}

/* ---- responses --------------------------------------------------------------------------------------------- */

/* The value of a header in head[0..end), or NULL. */
static const char *header(const char *head, const char *end, const char *name) {
    size_t n = strlen(name);
    for (const char *line = head; (line = memmem(line, (size_t)(end - line), "\r\n", 2)) != NULL;) {
        line += 2;
        if ((size_t)(end - line) > n && strncasecmp(line, name, n) == 0 && line[n] == ':')
            return line + n + 1 + strspn(line + n + 1, " \t");
    }
    return NULL;
}

/* The head ends at `end`, with an empty line. Whatever we do not read properly ends the run. */
static void parse_head(struct conn *c, const char *end) {
    const char *value;
    if (c->have < 12 || strncmp(c->in, "HTTP/1.1 ", 9) != 0)
        die("not an HTTP/1.1 response: %.40s", c->in);
    c->status = atoi(c->in + 9);
    if (c->status < 200 || c->status > 599)
        die("status %d is not one that this generator understands", c->status);
    if ((value = header(c->in, end, "Connection")) && strncasecmp(value, "close", 5) == 0)
        die("the server closes its connections (status %d), so this would measure connecting", c->status);
    if (!(value = header(c->in, end, "Idempotency-Replayed")))
        value = header(c->in, end, "Idempotent-Replayed"); /* as Stripe spells it */
    c->replayed = value && strncasecmp(value, "true", 4) == 0;
    value = header(c->in, end, "Transfer-Encoding");
    c->chunk = value ? SIZE : WHOLE;
    if (value && strncasecmp(value, "chunked\r", 8) != 0)
        die("a Transfer-Encoding that is not chunked");
    value = header(c->in, end, "Content-Length");
    if (!value && c->chunk == WHOLE && c->status != 204 && c->status != 304)
        die("the response (status %d) has no Content-Length", c->status);
    c->body_left = value ? atoll(value) : 0;
    if (c->body_left < 0)
        die("Content-Length is negative");
}

/* Takes the next bytes of a chunked body; c->chunk is LAST when it has ended. */
static void read_chunks(struct conn *c, const char *at, const char *end) {
    for (; at < end && c->chunk != LAST; at++) {
        switch (c->chunk) {
        case SIZE: {
            const char *digits = "0123456789abcdef", *digit = strchr(digits, *at | 0x20);
            if (*at == '\n')
                c->chunk = c->body_left ? DATA : TRAILER;
            else if (*at == ';')
                c->chunk = EXTENSION;
            else if (*at != '\r' && (!digit || !*digit || (c->body_left = c->body_left * 16 + (digit - digits)) > IN_MAX * 64))
                die("a chunk's size cannot be read");
            break;
        }
        case EXTENSION:
            if (*at == '\n')
                c->chunk = c->body_left ? DATA : TRAILER;
            break;
        case DATA: {
            long long here = end - at < c->body_left ? end - at : c->body_left;
            at += here - 1;
            if ((c->body_left -= here) == 0)
                c->chunk = AFTER_DATA;
            break;
        }
        case AFTER_DATA:
            if (*at == '\n')
                c->chunk = SIZE;
            break;
        case TRAILER: /* the start of a line: an empty one ends it all */
            c->chunk = *at == '\n' ? LAST : *at == '\r' ? TRAILER : IN_TRAILER;
            break;
        default:
            if (*at == '\n')
                c->chunk = TRAILER;
        }
    }
    if (at < end)
        die("more bytes came than the chunks said");
}

static void finished(struct conn *c, int epoll, double at) {
    c->waiting = false;
    outstanding--;
    answered++;
    if (phase == PRIME)
        primed++;
    if (phase == MEASURE) {
        if (total == samples_size) {
            samples_size = samples_size ? samples_size * 2 : 1 << 16;
            if (!(samples = realloc(samples, samples_size * sizeof *samples)))
                die("out of memory");
        }
        samples[total++] = (uint32_t)((at - c->began) * 1e6);
        replayed_total += c->replayed;
    }
    if (phase == MEASURE || c->status / 100 != 2) /* a failure counts in every phase */
        by_status[c->status]++;
    start_request(c, epoll, at);
}

static void readable(struct conn *c, int epoll) {
    ssize_t n = recv(c->fd, c->in + c->have, IN_MAX - 1 - c->have, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        lost(c, n ? strerror(errno) : "closed by the server");
        return;
    }
    if (!c->waiting)
        die("bytes that no request asked for");
    const char *body_at = c->in, *read_to = c->in + c->have + n;
    if (!c->in_body) {
        static bool told;
        c->have += (size_t)n;
        c->in[c->have] = '\0';
        const char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
        if (!end && c->have == IN_MAX - 1)
            die("the head of a response is longer than %d bytes", IN_MAX);
        if (!end)
            return;
        parse_head(c, end);
        if (c->status / 100 != 2 && !told) {
            told = true;
            fprintf(stderr, "load: not a 2xx:\n%.1500s\n", c->in);
        }
        body_at = end + 4;
        c->in_body = true;
        c->have = 0;
    }
    if (c->chunk != WHOLE)
        read_chunks(c, body_at, read_to);
    else if ((c->body_left -= read_to - body_at) < 0)
        die("more bytes came than Content-Length said");
    if (c->chunk == LAST || (c->chunk == WHOLE && c->body_left == 0))
        finished(c, epoll, now());
}

/* ---- the run ----------------------------------------------------------------------------------------------- */

static double number(const char *name, const char *text, double least, double most) {
    char *end;
    double value = strtod(text, &end);
    if (*end || end == text || !(value >= least && value <= most))
        die("%s takes a number from %g to %g, not '%s'", name, least, most, text);
    return value;
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (i + 1 >= argc)
            die("%s needs a value", name);
        if (!strcmp(name, "--host")) host = value;
        else if (!strcmp(name, "--port")) port = (long)number(name, value, 1, 65535);
        else if (!strcmp(name, "--connections")) connections = (long)number(name, value, 1, 1024);
        else if (!strcmp(name, "--seconds")) seconds = number(name, value, 0.1, 120);
        else if (!strcmp(name, "--warmup")) warmup = number(name, value, 0, 30);
        else if (!strcmp(name, "--keys")) keys = (long)number(name, value, 1, 100000);
        else if (!strcmp(name, "--path")) path = value;
        else if (!strcmp(name, "--body")) body = value;
        else if (!strcmp(name, "--run")) run = value;
        else if (!strcmp(name, "--mode")) {
            for (mode = BARE; strcmp(MODES[mode], value) != 0;)
                if (++mode > MIX)
                    die("--mode takes bare, first, replay or mix, not '%s'", value);
        } else
            die("unknown option %s", name);
    }
    if (!port)
        die("--port is needed");
    if (strlen(run) != 12 || strspn(run, "0123456789abcdef") != 12)
        die("--run takes 12 hex digits");
    if (path[0] != '/' || strpbrk(path, " \r\n"))
        die("--path starts with / and has no spaces");
}

static struct sockaddr_in loopback(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1 || (ntohl(to.sin_addr.s_addr) >> 24) != 127)
        die("only loads 127.0.0.0/8, not '%s'", host);
    return to;
}

static struct conn *open_all(int epoll, struct sockaddr_in to, const char *request) {
    struct conn *all = calloc((size_t)connections, sizeof *all);
    for (long i = 0; all && i < connections; i++) {
        int one = 1;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = &all[i]};
        all[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (all[i].fd < 0 || connect(all[i].fd, (struct sockaddr *)&to, sizeof to) != 0)
            die("cannot connect to %s:%ld: %s", host, port, strerror(errno));
        setsockopt(all[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(all[i].fd, F_SETFL, O_NONBLOCK);
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, all[i].fd, &e) != 0 || !(all[i].out = malloc(request_len)))
            die("cannot set up a connection: %s", strerror(errno));
        memcpy(all[i].out, request, request_len);
        alive++;
    }
    if (!all)
        die("out of memory");
    return all;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile(double share) { /* nearest rank, in milliseconds */
    size_t at = (size_t)(share * (double)total);
    return total ? samples[at < total ? at : total - 1] / 1e3 : 0;
}

static void report(double window, double cpu_used) {
    qsort(samples, total, sizeof *samples, ascending);
    printf("{\"mode\":\"%s\",\"connections\":%ld,\"seconds\":%.3f,\"requests\":%llu,\"answered\":%llu,\"rps\":%.1f,"
           "\"statuses\":{",
           MODES[mode], connections, window, (unsigned long long)total, (unsigned long long)answered, window > 0 ? (double)total / window : 0);
    for (int s = 0, some = 0; s < 600; s++)
        if (by_status[s])
            printf("%s\"%d\":%llu", some++ ? "," : "", s, (unsigned long long)by_status[s]);
    printf("},\"replayed\":%llu,\"errors\":%llu,\"unanswered\":%ld,\"latency_ms\":{\"p50\":%.3f,\"p90\":%.3f,"
           "\"p99\":%.3f,\"max\":%.3f},\"cpu_share\":%.3f}\n",
           (unsigned long long)replayed_total, (unsigned long long)errors, outstanding, percentile(0.5),
           percentile(0.9), percentile(0.99), percentile(1), window > 0 ? cpu_used / window : 0);
}

int main(int argc, char **argv) {
    static char request[OUT_MAX];
    read_options(argc, argv);
    struct sockaddr_in to = loopback();
    request_len = build_request(request);
    int epoll = epoll_create1(0);
    struct conn *all = open_all(epoll, to, request);
    double next = now() + warmup, began = 0, ended = 0, cpu_began = 0, cpu_ended = 0;
    if (mode == REPLAY || mode == MIX) {
        phase = PRIME;
        next = now() + PRIME_SECONDS;
    }
    for (long i = 0; i < connections; i++)
        start_request(&all[i], epoll, now());
    while (alive > 0) {
        double at = now();
        if (phase == PRIME && primed == keys) {
            phase = WARM;
            next = at + warmup;
            for (long i = 0; i < connections; i++)
                start_request(&all[i], epoll, at);
        } else if (phase == PRIME && at >= next)
            die("priming %ld keys took longer than %d s", keys, PRIME_SECONDS);
        if (phase == WARM && at >= next) {
            phase = MEASURE;
            next = (began = at) + seconds;
            cpu_began = cpu();
        } else if (phase == MEASURE && at >= next) {
            phase = DRAIN;
            next = (ended = at) + DRAIN_SECONDS;
            cpu_ended = cpu();
        }
        if (phase == DRAIN && (outstanding == 0 || at >= next))
            break;
        struct epoll_event ready[128];
        int n = epoll_wait(epoll, ready, 128, 5);
        for (int i = 0; i < n; i++) {
            struct conn *c = ready[i].data.ptr;
            if (c->fd >= 0 && ready[i].events & EPOLLOUT)
                flush_request(c, epoll);
            if (c->fd >= 0 && ready[i].events & ~(uint32_t)EPOLLOUT)
                readable(c, epoll);
        }
    }
    report(ended - began, cpu_ended - cpu_began);
    bool good = total > 0 && errors == 0 && outstanding == 0 && phase == DRAIN;
    for (int s = 0; s < 600; s++)
        good = good && (s / 100 == 2 || by_status[s] == 0);
    return good ? 0 : 1;
}
