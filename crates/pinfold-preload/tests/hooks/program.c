/*
 * What the hooks on the C library's memory functions do, seen from a program.
 *
 *   program standing      what the hooks say of themselves
 *   program reach [FILE]  every way to call, FILE being a library to load: how many calls were told
 *   program answers SEED  results and error numbers of many calls, good and bad: the lines must be the
 *                         same with and without the library
 *   program storm         calls on all threads and in signal handlers at once, none lost
 *   program fork          children made in the middle of that, and a vfork child
 *   program early         called from an initialiser, before main
 *   program cancel        a thread whose cancellation is pending during the calls
 *   program unwind        a thread cancelled inside syscall(), and a stack looked at from a handler
 *   program stack         bytes of stack that a call takes
 *   program time          nanoseconds of a call, medians
 */

#include "../programs/depth.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UFFDIO_REGISTER_REQUEST 0xc020aa00ul
#define UFFDIO_UNREGISTER_REQUEST 0x8010aa01ul

enum { PAGE = 4096, GUARD_INSTALL = 102, GUARD_REMOVE = 103 };

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
			_exit(3);                                                                  \
		}                                                                                  \
	} while (0)

/* As the library lays it out. */
struct record {
	char magic[8];
	uint32_t standing, unused;
	_Atomic uint64_t told;
	const char *owner;
};

static struct record *record;

static uint64_t told(void)
{
	return record ? atomic_load(&record->told) : 0;
}

static char *map(size_t bytes)
{
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

static uint64_t told_early;

__attribute__((constructor(101))) static void before_main(void)
{
	uint64_t before;

	record = dlsym(RTLD_DEFAULT, "pinfold_process_hooks");
	before = told();
	madvise(map(PAGE), PAGE, GUARD_INSTALL);
	told_early = told() - before;
}

static int standing(void)
{
	if (!record)
		puts("absent");
	else if (record->standing < 2)
		puts(record->standing ? "active" : "untested");
	else
		printf("withdrawn %u %s\n", record->standing - 2, record->owner ? record->owner : "?");
	return 0;
}

/* Says how many calls were told since the last time. */
static void say(const char *what)
{
	static uint64_t before;
	uint64_t now = told();

	if (what)
		printf("%s %llu\n", what, (unsigned long long)(now - before));
	before = told();
}

static int reach(const char *library)
{
	char *memory = map(8 * PAGE);
	int segment = shmget(IPC_PRIVATE, 2 * PAGE, 0600), self = syscall(SYS_pidfd_open, getpid(), 0);
	struct iovec part = { memory, PAGE };
	uint64_t watched[2] = { (uintptr_t)memory, PAGE };
	int (*found)(void *, size_t, int);
	ssize_t (*of_process)(int, const struct iovec *, size_t, int, unsigned) =
		(ssize_t(*)(int, const struct iovec *, size_t, int, unsigned))dlsym(RTLD_DEFAULT, "process_madvise");

	CHECK(segment >= 0);
	say(NULL);
	madvise(memory, PAGE, GUARD_INSTALL);
	say("madvise");
	of_process(self, &part, 1, GUARD_INSTALL, 0);
	say("process_madvise");
	CHECK(shmat(segment, memory, SHM_REMAP) == memory);
	say("shmat");
	syscall(SYS_madvise, memory, (size_t)PAGE, GUARD_INSTALL);
	say("syscall madvise");
	syscall(SYS_process_madvise, self, &part, 1L, GUARD_INSTALL, 0);
	say("syscall process_madvise");
	CHECK(syscall(SYS_shmat, segment, memory, SHM_REMAP) == (long)memory);
	say("syscall shmat");
	CHECK(ioctl(-1, UFFDIO_UNREGISTER_REQUEST, watched) == -1 && errno == EBADF);
	say("ioctl UNREGISTER");
	CHECK(syscall(SYS_ioctl, -1, UFFDIO_UNREGISTER_REQUEST, watched) == -1 && errno == EBADF);
	say("syscall ioctl UNREGISTER");
	found = (int (*)(void *, size_t, int))dlsym(RTLD_DEFAULT, "madvise");
	found(memory, PAGE, GUARD_INSTALL);
	say("dlsym");
	if (library) {
		void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
		void (*guard)(void *, size_t) = handle ? (void (*)(void *, size_t))dlsym(handle, "guard") : NULL;

		CHECK(guard);
		say(NULL); /* its initialiser */
		guard(memory, PAGE);
		say("a loaded library");
		handle = dlmopen(LM_ID_NEWLM, library, RTLD_NOW);
		guard = handle ? (void (*)(void *, size_t))dlsym(handle, "guard") : NULL;
		CHECK(guard);
		guard(memory, PAGE);
		say("a library with a second C library");
	}
	madvise(memory + 4 * PAGE, PAGE, MADV_DONTNEED);
	madvise(memory, PAGE, GUARD_REMOVE);
	syscall(SYS_madvise, memory + 4 * PAGE, (size_t)PAGE, MADV_DONTNEED);
	CHECK(shmat(segment, NULL, 0) != (void *)-1);
	munmap(memory, 8 * PAGE);
	free(malloc(1 << 20));
	say("what others tell");
	found = (int (*)(void *, size_t, int))dlsym(dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD), "madvise");
	found(map(PAGE), PAGE, GUARD_INSTALL);
	say("the C library's own");
	shmctl(segment, IPC_RMID, NULL);
	return 0;
}

static uint64_t state;

static uint32_t any(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 20) % below;
}

#define ONE_OF(list) ((list)[any(sizeof(list) / sizeof(*(list)))])

/* A result that does not depend on where the kernel maps things. */
static void answer(const char *call, long result, int error, const char *region)
{
	if (result > 0 && result != (long)region && result > 1 << 20)
		result = 1;
	else if (result == (long)region)
		result = 2;
	printf("%s %ld errno %d\n", call, result, error);
}

static int answers(const char *seed)
{
	int both_ends[2] = { -1, -1 }, made = pipe(both_ends);
	char *region = mmap((void *)0x200000000000, 16 * PAGE, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	int segment = shmget(IPC_PRIVATE, 2 * PAGE, 0600), self = syscall(SYS_pidfd_open, getpid(), 0), i;
	char *starts[] = { region,	  region + 4 * PAGE,	  region + 1,	   NULL,
			   (char *)1,	  (char *)-1,		  (char *)-PAGE,   region + 15 * PAGE,
			   region - PAGE, (char *)0xffff800000000000, region + 16 * PAGE };
	size_t lengths[] = { 0, 1, PAGE, 3 * PAGE + 5, 32 * PAGE, (size_t)-1, (size_t)-PAGE };
	uint64_t ready[16] = { 0 };
	/* Not 100 and 101, which give real memory up for broken. */
	int advices[] = { -1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
			  20, 21, 22, 23, 24, 25, 26, 99, GUARD_INSTALL, GUARD_REMOVE, 104, 1 << 30 };
	int processes[] = { self, -1, 0, 9999, -10000 };
	struct iovec parts[] = { { region + 8 * PAGE, PAGE }, { region + 9 * PAGE, PAGE }, { (void *)-1, PAGE } };
	struct iovec *part_lists[] = { parts, NULL, (struct iovec *)-1, parts + 2 };
	size_t counts[] = { 0, 1, 2, 3, 1025, (size_t)-1 };
	int segments[] = { segment, -1, 1 << 30 };
	int flags[] = { 0, SHM_REMAP, SHM_RND, SHM_RDONLY, SHM_REMAP | SHM_RND, SHM_EXEC | SHM_REMAP, -1 };
	long numbers[] = { -1, 9999, SYS_close, SYS_getppid, 1l << 40 };
	char *protected[] = { region, region + 3 * PAGE, region + 5 * PAGE + 1, NULL, (char *)-PAGE, (char *)1 };
	int rights[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_WRITE, PROT_EXEC, 1 << 20, -1 };
	int keys[] = { -1, 0, 1, 15, 16, -2, 1 << 30 };
	int files[] = { -1, both_ends[0], both_ends[1], 0, 9999 };
	unsigned long requests[] = { FIONREAD, TCGETS, 0, UFFDIO_REGISTER_REQUEST, UFFDIO_UNREGISTER_REQUEST, -1ul };
	ssize_t (*of_process)(int, const struct iovec *, size_t, int, unsigned) =
		(ssize_t(*)(int, const struct iovec *, size_t, int, unsigned))dlsym(RTLD_DEFAULT, "process_madvise");

	CHECK(region != MAP_FAILED && segment >= 0 && !made);
	state = strtoull(seed, NULL, 0) * 2 + 1;
	for (i = 0; i < 20000; i++) {
		char *start = ONE_OF(starts);
		size_t length = ONE_OF(lengths);
		int advice = ONE_OF(advices), process = ONE_OF(processes), flag = ONE_OF(flags), id = ONE_OF(segments);
		struct iovec *list = ONE_OF(part_lists);
		size_t count = ONE_OF(counts);
		long result;

		/* That would discard the whole program. */
		if (!start && length == (size_t)-PAGE)
			length = PAGE;
		errno = 77;
		switch (any(10)) {
		case 0:
			result = madvise(start, length, advice);
			answer("madvise", result, errno, region);
			break;
		case 1:
			result = syscall(SYS_madvise, start, length, advice);
			answer("syscall madvise", result, errno, region);
			break;
		case 2:
			result = of_process(process, list, count, advice, any(2));
			answer("process_madvise", result, errno, region);
			break;
		case 3:
			result = syscall(SYS_process_madvise, process, list, count, advice, 0);
			answer("syscall process_madvise", result, errno, region);
			break;
		case 4:
		case 5:
			result = any(2) ? (long)shmat(id, start, flag) : syscall(SYS_shmat, id, start, flag);
			answer("shmat", result, errno, region);
			if (result != -1 && result != (long)region)
				shmdt((void *)result);
			break;
		case 6:
			result = syscall(ONE_OF(numbers), -1, 0, 0);
			answer("syscall", result > 0 ? 0 : result, errno, region);
			break;
		case 7:
			/* Six arguments, each of which matters. */
			result = syscall(SYS_mmap, region, (size_t)16 * PAGE, PROT_READ | PROT_WRITE,
					 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, any(2) ? 0L : 5L);
			answer("syscall mmap", result, errno, region);
			break;
		case 8:
			start = ONE_OF(protected);
			length = any(3) ? PAGE : (size_t)any(4) * 1000;
			flag = ONE_OF(rights);
			if (any(2))
				result = any(2) ? mprotect(start, length, flag) : syscall(SYS_mprotect, start, length, flag);
			else
				result = any(2) ? pkey_mprotect(start, length, flag, ONE_OF(keys)) :
						  syscall(SYS_pkey_mprotect, start, length, flag, ONE_OF(keys));
			answer("mprotect", result, errno, region);
			break;
		case 9:
			result = any(4) ? ioctl(ONE_OF(files), ONE_OF(requests), any(2) ? (void *)&ready : (void *)ONE_OF(starts)) :
					  ioctl(ONE_OF(files), FIOCLEX);
			answer("ioctl", result, errno, region);
			break;
		}
	}
	shmctl(segment, IPC_RMID, NULL);
	return 0;
}

enum { THREADS = 4, CALLS = 20000 };
static _Atomic uint64_t made;
static atomic_int storming;
static char *handler_page;

static void guard_once(char *page, int by_number)
{
	int before = errno;

	/* Counted by who made it, before and not after: a child may be forked in between. */
	atomic_fetch_add(&made, 1);
	if (by_number)
		syscall(SYS_madvise, page, (size_t)PAGE, GUARD_INSTALL);
	else
		madvise(page, PAGE, GUARD_INSTALL);
	errno = before;
}

static void on_signal(int signal)
{
	(void)signal;
	guard_once(handler_page, 1);
	guard_once(handler_page, 0);
}

static void *stormy(void *unused)
{
	char *page = map(PAGE);
	int i;

	for (i = 0; i < CALLS; i++) {
		void *block = malloc(100 + i % 5000);

		errno = 7777;
		guard_once(page, i & 1);
		CHECK(errno == 7777);
		madvise(page, PAGE, GUARD_REMOVE);
		if (i % 16 == 0)
			pthread_kill(pthread_self(), SIGUSR1);
		free(block);
	}
	atomic_fetch_sub(&storming, 1);
	return unused;
}

static void start_storm(pthread_t *threads)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	int i;

	handler_page = map(PAGE);
	CHECK(!sigaction(SIGUSR1, &action, NULL));
	atomic_store(&storming, THREADS);
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, stormy, NULL));
}

static int storm(void)
{
	pthread_t threads[THREADS];
	uint64_t before = told();
	int i;

	start_storm(threads);
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("made %llu told %llu\n", (unsigned long long)made, (unsigned long long)(told() - before));
	return record && made != told() - before;
}

static int forks(void)
{
	pthread_t threads[THREADS];
	char *page = map(PAGE);
	uint64_t before;
	int children = 0, i;
	pid_t child;

	start_storm(threads);
	while (atomic_load(&storming)) {
		int status;

		child = fork();
		CHECK(child >= 0);
		if (!child) {
			/* Whatever the other threads were in the middle of, nothing here waits for it. */
			uint64_t mine = told();

			alarm(20);
			madvise(page, PAGE, GUARD_INSTALL);
			syscall(SYS_madvise, page, (size_t)PAGE, GUARD_INSTALL);
			_exit(record && told() - mine != 2);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		children++;
	}
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	before = told();
	child = vfork();
	if (!child) {
		madvise(page, PAGE, GUARD_INSTALL);
		_exit(0);
	}
	CHECK(waitpid(child, NULL, 0) == child);
	printf("%s, vfork told %llu\n", children ? "children" : "no child", (unsigned long long)(told() - before));
	return 0;
}

static atomic_int waiting;

static void *wait_for_ever(void *unused)
{
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
	atomic_store(&waiting, 1);
	for (;;)
		syscall(SYS_ppoll, NULL, 0L, NULL, NULL, 8L);
	return unused;
}

static sig_atomic_t depth;

static void on_look(int signal)
{
	void *frames[64];

	(void)signal;
	depth = backtrace(frames, 64);
}

/* None of them is a point at which a thread is cancelled, nor becomes one. */
static void *cancelled_meanwhile(void *unused)
{
	char *page = map(PAGE);
	ssize_t (*of_process)(int, const struct iovec *, size_t, int, unsigned) =
		(ssize_t(*)(int, const struct iovec *, size_t, int, unsigned))dlsym(RTLD_DEFAULT, "process_madvise");
	uint64_t range[4] = { (uintptr_t)page, PAGE, 1, 0 };

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	while (!atomic_load(&waiting))
		sched_yield();
	pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
	madvise(page, PAGE, GUARD_INSTALL);
	madvise(page, PAGE, GUARD_REMOVE);
	of_process(-1, NULL, 0, GUARD_INSTALL, 0);
	shmat(-1, page, SHM_REMAP);
	mprotect(page, PAGE, PROT_NONE);
	mprotect(page, PAGE, PROT_READ | PROT_WRITE);
	pkey_mprotect(page, PAGE, PROT_READ | PROT_WRITE, -1);
	ioctl(-1, UFFDIO_REGISTER_REQUEST, range);
	syscall(SYS_madvise, page, (size_t)PAGE, GUARD_INSTALL);
	syscall(SYS_getppid);
	atomic_store(&waiting, 2);
	pthread_testcancel();
	atomic_store(&waiting, 3);
	return unused;
}

static int cancel(void)
{
	pthread_t thread;
	void *result;

	CHECK(!pthread_create(&thread, NULL, cancelled_meanwhile, NULL) && !pthread_cancel(thread));
	atomic_store(&waiting, 1);
	CHECK(!pthread_join(thread, &result));
	printf("all made %d cancelled %d\n", atomic_load(&waiting) == 2, result == PTHREAD_CANCELED);
	return 0;
}

static int unwind(void)
{
	struct sigaction action = { .sa_handler = on_look };
	struct timespec nap = { 0, 1000000 };
	pthread_t thread;
	void *result, *warm[4];

	CHECK(!pthread_create(&thread, NULL, wait_for_ever, NULL));
	while (!atomic_load(&waiting))
		sched_yield();
	CHECK(!pthread_cancel(thread) && !pthread_join(thread, &result));
	printf("cancelled %d\n", result == PTHREAD_CANCELED);
	backtrace(warm, 4);
	CHECK(!sigaction(SIGALRM, &action, NULL));
	while (!depth) {
		ualarm(2000, 0);
		syscall(SYS_nanosleep, &nap, NULL);
		syscall(SYS_ppoll, NULL, 0L, &nap, NULL, 8L);
	}
	/* Handler, its return, (syscall,) this function, main, and what is below main. */
	printf("deep enough %d\n", depth >= 5);
	return 0;
}

static int by_value(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e9 + now.tv_nsec;
}

#define TIMED(name, call)                                                                          \
	do {                                                                                       \
		double rounds[41];                                                                 \
		int round, turn;                                                                   \
                                                                                                   \
		for (round = 0; round < 41; round++) {                                             \
			double start = now_ns();                                                   \
                                                                                                   \
			for (turn = 0; turn < 20000; turn++)                                       \
				call;                                                              \
			rounds[round] = (now_ns() - start) / 20000;                                \
		}                                                                                  \
		qsort(rounds, 41, sizeof(*rounds), by_value);                                      \
		printf("%s %.1f ns\n", name, rounds[20]);                                          \
	} while (0)

static int times(void)
{
	char *page = map(PAGE);

	TIMED("madvise, empty", madvise(page, 0, MADV_NORMAL));
	TIMED("madvise DONTNEED", madvise(page, PAGE, MADV_DONTNEED));
	TIMED("madvise GUARD_INSTALL", madvise(page, PAGE, GUARD_INSTALL));
	TIMED("syscall getppid", syscall(SYS_getppid));
	TIMED("syscall madvise, empty", syscall(SYS_madvise, page, 0l, MADV_NORMAL));
	TIMED("syscall bad", syscall(-1l));
	return 0;
}

static char *page;

static void guarded(void) { madvise(page, PAGE, GUARD_INSTALL); }
static void discarded(void) { madvise(page, PAGE, MADV_DONTNEED); }
static void guarded_by_process(void) { process_madvise(-1, NULL, 0, GUARD_INSTALL, 0); }
static void attached_over(void) { shmat(-1, page, SHM_REMAP); }
static void protected(void) { mprotect(page, PAGE, PROT_READ); }
static void protected_by_key(void) { pkey_mprotect(page, PAGE, PROT_READ, 0); }
static void guarded_by_number(void) { syscall(SYS_madvise, page, PAGE, GUARD_INSTALL); }
static void other_number(void) { syscall(SYS_getppid); }
static void other_request(void) { ioctl(-1, 1, 0); }

static void unregistered(void)
{
	uint64_t range[2] = { (uintptr_t)page, PAGE };

	ioctl(-1, UFFDIO_UNREGISTER_REQUEST, range);
}

/* What a handler on a small stack of its own has to have for a call. */
static int stack(void)
{
	static const struct {
		const char *name;
		void (*call)(void);
	} calls[] = {
		{ "madvise", discarded }, { "madvise, guard", guarded }, { "process_madvise, guard", guarded_by_process },
		{ "shmat, over", attached_over }, { "mprotect", protected },
		{ "pkey_mprotect", protected_by_key }, { "ioctl", other_request },
		{ "ioctl, unregister", unregistered }, { "syscall", other_number }, { "syscall, guard", guarded_by_number },
	};
	size_t i;

	page = map(PAGE);
	for (i = 0; i < sizeof(calls) / sizeof(*calls); i++)
		printf("%zu %s\n", depth_of(calls[i].call), calls[i].name);
	return 0;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	if (!strcmp(what, "standing"))
		return standing();
	if (!strcmp(what, "reach"))
		return reach(argc > 2 ? argv[2] : NULL);
	if (!strcmp(what, "answers"))
		return answers(argc > 2 ? argv[2] : "1");
	if (!strcmp(what, "storm"))
		return storm();
	if (!strcmp(what, "fork"))
		return forks();
	if (!strcmp(what, "early")) {
		printf("before main %llu\n", (unsigned long long)told_early);
		return 0;
	}
	if (!strcmp(what, "cancel"))
		return cancel();
	if (!strcmp(what, "unwind"))
		return unwind();
	if (!strcmp(what, "stack"))
		return stack();
	if (!strcmp(what, "time"))
		return times();
	fputs("usage: program standing|reach|answers|storm|fork|early|cancel|unwind|stack|time\n", stderr);
	return 2;
}
