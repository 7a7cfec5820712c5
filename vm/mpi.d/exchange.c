/* A legal MPI program that moves its memory between messages, and checks every byte that arrives.
 *
 * usage: mpirun -n 2 exchange send|put|sleep|sleep-put MESSAGES BYTES REUSE SEED [MARK]
 *
 * Rank 0 sends to rank 1. Each rank has a few buffers of BYTES; before a message each rank either uses its
 * buffer as it is (in REUSE of 100 messages), or first replaces the pages behind the same address, by one of
 * six routes: free and malloc, unmap and map, map over, discard, and the last three by instructions of the
 * kernel that no library sees (`syscall`). `put` writes into a window of rank 1, whose memory stays. `sleep` is `send`
 * by ranks that sleep for a millisecond between two looks: then what they take is work, and not the wait for each other,
 * which ranks that look all the time spend instructions on. `sleep-put` is `put` by such ranks: its fences, which do not
 * sleep, are messages of no bytes, and rank 0 has the window locked throughout.
 *
 * Rank 1 prints one line: {"messages":N,"wrong":N,"first_wrong":"route","seconds":N,"threads":[{...},{...}]}. The last
 * has for each rank and each name of a thread how long it ran between the first message and the last, in nanoseconds,
 * and how often it was put on a processor: "name":[N,N]. The exit status is 0 also if bytes are wrong: the caller
 * judges. Everything follows from SEED. After a quarter of the messages each rank writes its process's number to the file
 * MARK.RANK and goes on: from then on a caller that kills something knows that it does so in the middle. */

#define _GNU_SOURCE
#include <dirent.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BUFFERS = 3, PAGE = 4096 };

enum route { KEEP, MALLOC, REMAP, MAP_OVER, DISCARD, RAW_REMAP, RAW_MAP_OVER, RAW_DISCARD, ROUTES };

static const char *const NAMES[ROUTES] = {
    "keep", "malloc", "unmap and map", "map over", "discard",
    "unmap and map by system call", "map over by system call", "discard by system call",
};

struct buffer {
    unsigned char *at;
    int is_heap;
};

static size_t bytes;

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void give_up(const char *what)
{
    perror(what);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

static size_t mapped(void) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static void *map(void *at, int flags)
{
    void *got = mmap(at, mapped(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (got == MAP_FAILED)
        give_up("mmap");
    return got;
}

static void *raw_map(void *at, int flags)
{
    long got = syscall(SYS_mmap, at, mapped(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0L);
    if (got == -1)
        give_up("mmap");
    return (void *)got;
}

/* A buffer on the heap has its address from malloc; one that was unmapped asks for the same address again,
 * which it gets unless a thread of a library was faster. */
static void replace(struct buffer *buffer, enum route route)
{
    void *at = buffer->at;
    switch (route == KEEP || !buffer->is_heap ? route : MALLOC) {
    case MALLOC:
        free(at);
        buffer->at = malloc(bytes);
        if (!buffer->at)
            give_up("malloc");
        break;
    case REMAP:
        munmap(at, mapped());
        buffer->at = map(at, 0);
        break;
    case MAP_OVER:
        map(at, MAP_FIXED);
        break;
    case DISCARD:
        madvise(at, mapped(), MADV_DONTNEED);
        break;
    case RAW_REMAP:
        syscall(SYS_munmap, at, mapped());
        buffer->at = raw_map(at, 0);
        break;
    case RAW_MAP_OVER:
        raw_map(at, MAP_FIXED);
        break;
    case RAW_DISCARD:
        syscall(SYS_madvise, at, mapped(), MADV_DONTNEED);
        break;
    default:
        break;
    }
}

static void fill(unsigned char *at, uint64_t key)
{
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = next(&key);
        size_t left = bytes - i;
        memcpy(at + i, &word, left < sizeof word ? left : sizeof word);
    }
}

/* Looks at all of it, also behind a wrong word: what a wrong message takes is what a right one does. */
static int holds(const unsigned char *at, uint64_t key)
{
    int wrong = 0;
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = next(&key);
        size_t left = bytes - i;
        wrong |= memcmp(at + i, &word, left < sizeof word ? left : sizeof word) != 0;
    }
    return !wrong;
}

/* What the kernel counts of each thread of this process: nanoseconds on a processor, and how often it came there. */
enum { THREADS = 32, TEXT = 4096 };

struct thread {
    int number;
    char name[16];
    unsigned long ran, times;
};

static int text_of(int number, const char *file, const char *form, void *first, void *second)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", number, file);
    FILE *stream = fopen(path, "r");
    if (!stream)
        return 0;
    int got = fscanf(stream, form, first, second);
    fclose(stream);
    return got;
}

static int read_threads(struct thread *threads)
{
    DIR *directory = opendir("/proc/self/task");
    struct dirent *entry;
    int count = 0;
    while (directory && count < THREADS && (entry = readdir(directory))) {
        struct thread *thread = &threads[count];
        thread->number = atoi(entry->d_name);
        if (thread->number > 0 && text_of(thread->number, "comm", "%15[^\n]%*c", thread->name, NULL) == 1 &&
            text_of(thread->number, "schedstat", "%lu %*u %lu", &thread->ran, &thread->times) == 2)
            count++;
    }
    if (directory)
        closedir(directory);
    return count;
}

static void describe_threads(char *text, const struct thread *before, int befores)
{
    struct thread now[THREADS];
    int nows = read_threads(now);
    size_t used = (size_t)snprintf(text, TEXT, "{");
    for (int i = 0; i < nows; i++) {
        for (int j = 0; j < befores; j++)
            if (before[j].number == now[i].number) {
                now[i].ran -= before[j].ran;
                now[i].times -= before[j].times;
            }
        used += (size_t)snprintf(text + used, TEXT - used, "%s\"%s\":[%lu,%lu]", i ? "," : "", now[i].name, now[i].ran,
                                 now[i].times);
    }
    snprintf(text + used, TEXT - used, "}");
}

static void await_asleep(MPI_Request *request)
{
    for (int done = 0; MPI_Test(request, &done, MPI_STATUS_IGNORE), !done;)
        usleep(1000);
}

static void say_where(const char *mark, int rank)
{
    char path[TEXT];
    snprintf(path, sizeof path, "%s.%d", mark, rank);
    FILE *file = fopen(path, "w");
    if (!file || fprintf(file, "%d\n", (int)getpid()) < 0 || fclose(file))
        give_up(path);
}

/* Message from one rank to the other. */
static void pass(int rank, int from, int sleeps, void *at, int count)
{
    MPI_Request request;
    if (!sleeps && rank == from) {
        MPI_Send(at, count, MPI_BYTE, !from, 0, MPI_COMM_WORLD);
    } else if (!sleeps) {
        MPI_Recv(at, count, MPI_BYTE, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        if (rank == from)
            MPI_Isend(at, count, MPI_BYTE, !from, 0, MPI_COMM_WORLD, &request);
        else
            MPI_Irecv(at, count, MPI_BYTE, from, 0, MPI_COMM_WORLD, &request);
        await_asleep(&request);
    }
}

/* Rank 1 has looked at what the window held before. */
static void open_window(MPI_Win window, int rank, int sleeps)
{
    if (sleeps)
        pass(rank, 1, sleeps, NULL, 0);
    else
        MPI_Win_fence(0, window);
}

static void put(void *at, MPI_Win window, int sleeps)
{
    MPI_Request request;
    if (!sleeps) {
        MPI_Put(at, (int)bytes, MPI_BYTE, 1, 0, (int)bytes, MPI_BYTE, window);
        return;
    }
    MPI_Rput(at, (int)bytes, MPI_BYTE, 1, 0, (int)bytes, MPI_BYTE, window, &request);
    await_asleep(&request);
    MPI_Win_flush(1, window);
}

/* What was put is in the window of rank 1. */
static void close_window(MPI_Win window, int rank, int sleeps)
{
    if (!sleeps) {
        MPI_Win_fence(0, window);
        return;
    }
    pass(rank, 0, sleeps, NULL, 0);
    if (rank == 1)
        MPI_Win_sync(window);
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 6 || argc > 7 || ranks != 2) {
        fprintf(stderr, "usage: mpirun -n 2 exchange send|put|sleep|sleep-put MESSAGES BYTES REUSE SEED [MARK]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    int puts = !!strstr(argv[1], "put"), sleeps = !!strstr(argv[1], "sleep");
    long messages = atol(argv[2]);
    bytes = strtoul(argv[3], NULL, 10);
    unsigned reuse = (unsigned)atoi(argv[4]);
    /* Each rank draws its own changes; the content of message n is the same word on both. */
    uint64_t content = strtoull(argv[5], NULL, 10), draws = content * 2 + 1 + (uint64_t)rank;

    struct buffer buffers[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        buffers[i].is_heap = i == 0;
        buffers[i].at = i == 0 ? malloc(bytes) : map(NULL, 0);
    }
    unsigned char *shown = map(NULL, 0);
    MPI_Win window = MPI_WIN_NULL;
    if (puts)
        MPI_Win_create(shown, (MPI_Aint)bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    if (puts && sleeps)
        MPI_Win_lock_all(MPI_MODE_NOCHECK, window);

    long wrong = 0;
    const char *first = "";
    struct thread before[THREADS];
    MPI_Barrier(MPI_COMM_WORLD);
    int befores = read_threads(before);
    double began = MPI_Wtime();
    for (long n = 0; n < messages; n++) {
        if (argc == 7 && n == messages / 4)
            say_where(argv[6], rank);
        uint64_t key = next(&content);
        struct buffer *buffer = &buffers[next(&draws) % BUFFERS];
        enum route route = next(&draws) % 100 < reuse ? KEEP : REMAP + (enum route)(next(&draws) % (ROUTES - REMAP));
        replace(buffer, route);
        if (puts) {
            open_window(window, rank, sleeps);
            if (rank == 0) {
                fill(buffer->at, key);
                put(buffer->at, window, sleeps);
            }
            close_window(window, rank, sleeps);
        } else {
            if (rank == 0)
                fill(buffer->at, key);
            else
                memset(buffer->at, 0, bytes);
            pass(rank, 0, sleeps, buffer->at, (int)bytes);
        }
        if (rank == 1 && !holds(puts ? shown : buffer->at, key)) {
            if (!wrong)
                first = puts ? "put" : NAMES[route];
            wrong++;
        }
    }
    double seconds = MPI_Wtime() - began;
    char threads[2][TEXT];
    describe_threads(threads[rank], before, befores);
    if (rank == 0)
        MPI_Send(threads[0], TEXT, MPI_CHAR, 1, 1, MPI_COMM_WORLD);
    else
        MPI_Recv(threads[0], TEXT, MPI_CHAR, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1)
        printf("{\"messages\":%ld,\"wrong\":%ld,\"first_wrong\":\"%s\",\"seconds\":%.3f,\"threads\":[%s,%s]}\n",
               messages, wrong, first, seconds, threads[0], threads[1]);
    if (puts && sleeps)
        MPI_Win_unlock_all(window);
    if (puts)
        MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
