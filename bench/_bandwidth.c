// How fast this machine streams memory into its cores: each thread sums its share of a buffer.
// Usage: bandwidth THREADS BYTES PASSES; prints the bytes per second of every pass but the first.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
    double start, end;
} Span;

typedef struct {
    const uint64_t *from;
    size_t words;
    int passes;
    pthread_barrier_t *barrier;
    Span *spans;
} Share;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *stream(void *given) {
    const Share *share = given;
    for (int pass = 0; pass < share->passes; pass++) {
        pthread_barrier_wait(share->barrier);
        share->spans[pass].start = now();
        uint64_t sum = 0;
        for (size_t i = 0; i < share->words; i++) sum += share->from[i];
        // The sum must count as used, and no pass may be folded into another.
        __asm__ volatile("" : : "r"(sum) : "memory");
        share->spans[pass].end = now();
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const int threads = atoi(argv[1]), passes = atoi(argv[3]);
    const size_t words = strtoull(argv[2], NULL, 10) / sizeof(uint64_t) / (size_t)threads;
    const size_t bytes = words * sizeof(uint64_t) * (size_t)threads;
    const size_t huge = 2u << 20;
    uint64_t *buffer = aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
    Span *spans = calloc((size_t)threads * (size_t)passes, sizeof(Span));
    if (!buffer || !spans) return 1;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    memset(buffer, 1, bytes);

    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    pthread_t handles[threads];
    Share shares[threads];
    for (int t = 0; t < threads; t++) {
        shares[t] = (Share){buffer + (size_t)t * words, words, passes, &barrier, spans + t * passes};
        if (pthread_create(&handles[t], NULL, stream, &shares[t])) return 1;
    }
    for (int t = 0; t < threads; t++) pthread_join(handles[t], NULL);

    for (int pass = 1; pass < passes; pass++) {
        Span whole = spans[pass];
        for (int t = 1; t < threads; t++) {
            const Span one = spans[t * passes + pass];
            if (one.start < whole.start) whole.start = one.start;
            if (one.end > whole.end) whole.end = one.end;
        }
        printf("%.0f\n", (double)bytes / (whole.end - whole.start));
    }
    return 0;
}
