/*
 * Legal programs that a library in their process may break and that need no device: libibverbs is stood in for.
 *
 *   program CASE [ARGUMENT]
 */

#include "../check.h"
#include "filter.h"
#include "verbs.h"
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/audit.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <mqueue.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { BYTES = 64 << 10 };

static struct ibv_pd *pd;
static char *memory;
static char **arguments;

static void *map(void)
{
	void *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(mapped != MAP_FAILED);
	return mapped;
}

static void registered(int times)
{
	for (int i = 0; i < times; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, 1);

		CHECK(mr && !ibv_dereg_mr(mr));
	}
}

static void begin(void)
{
	pd = ibv_alloc_pd(ibv_open_device(NULL));
	memory = map();
}

#ifdef __aarch64__
#define RESULT regs[0]
#else
#define RESULT gregs[REG_RAX]
#endif

/* As a container does it: the program begins under a filter. */
static void begin_again_in_a_container(const char *name)
{
	static struct sock_filter rules[] = { OTHERWISE(SECCOMP_RET_ALLOW) };

	filter(rules, LENGTH(rules), 0);
	execl("/proc/self/exe", arguments[0], name, arguments[2], NULL);
	CHECK(!"executed");
}

/* Memory that changes, and a table of descriptors of its own. */
static void changes_in_the_container(void)
{
	begin();
	registered(4);
	munmap(memory, BYTES);
	memory = map();
	registered(4);
	CHECK(!syscall(SYS_close_range, ~0U, ~0U, 2 /* CLOSE_RANGE_UNSHARE */));
	registered(4);
	puts("done");
}

/* The container refuses what the library's threads begin with. */
static void in_a_strict_container(void)
{
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_pidfd_getfd, SECCOMP_RET_ERRNO | EPERM),
		ON(SYS_unshare, SECCOMP_RET_ERRNO | EPERM),
		OTHERWISE(SECCOMP_RET_ALLOW),
	};

	filter(rules, LENGTH(rules), 0);
	execl("/proc/self/exe", arguments[0], "changes_in_the_container", NULL);
	CHECK(!"executed");
}

static void no_more_files(int by_prctl)
{
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_openat, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_userfaultfd, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_clone, SECCOMP_RET_KILL_PROCESS),
		ON(SYS_clone3, SECCOMP_RET_KILL_PROCESS),
		OTHERWISE(SECCOMP_RET_ALLOW),
	};

	filter(rules, LENGTH(rules), by_prctl);
}

static int by_prctl(void)
{
	return arguments[2] && !strcmp(arguments[2], "prctl");
}

/* Started under a filter, it adds one of its own between its first registration and its second. */
static void in_the_container(void)
{
	begin();
	registered(1);
	no_more_files(by_prctl());
	registered(4);
	puts("done");
}

static void sandboxed_in_a_container(void)
{
	begin_again_in_a_container("in_the_container");
}

/* The same, once something was kept: memory that is being discarded meanwhile is proved by what is in /proc. */
static void kept_in_the_container(void)
{
	begin();
	registered(4);
	no_more_files(by_prctl());
	for (int i = 0; i < 20; i++) {
		CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
		registered(3);
	}
	puts("done");
}

static void sandboxed_after_the_first_kept(void)
{
	begin_again_in_a_container("kept_in_the_container");
}

/* Asks whether there are filters, as libraries do: nothing is restricted by that. */
static void asks_for_filters(void)
{
	CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL) == -1 && errno == EFAULT);
	CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL) == -1 && errno == EFAULT);
	begin();
	registered(4);
	puts("done");
}

/* Forks. The parent says that its child has ended well. */
static int has_a_child_that_ends(void)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child)
		return 0;
	CHECK(waitpid(child, &status, 0) == child && !status);
	puts("done");
	return 1;
}

/* A child of `vfork` restricts itself and executes another program: its parent is as free as before, also where that is
 * a forked child. */
static void restricts_another_program(void)
{
	static struct sock_filter rules[] = { OTHERWISE(SECCOMP_RET_ALLOW) };
	static struct sock_fprog program = { LENGTH(rules), rules };
	int status;
	pid_t child;

	if (arguments[2]) {
		begin();
		registered(4);
		if (has_a_child_that_ends())
			return;
	}
	begin();
	registered(1);
	child = vfork();
	if (!child) {
		if (!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
			execl("/bin/true", "true", NULL);
		_exit(1);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	registered(4);
	if (!arguments[2])
		puts("done");
}

/* A program that does nothing any more but exit. */
static void exits_in_a_sandbox(void)
{
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_exit_group, SECCOMP_RET_ALLOW),
		ON(SYS_write, SECCOMP_RET_ALLOW),
		ON(SYS_fstat, SECCOMP_RET_ALLOW),
		OTHERWISE(SECCOMP_RET_KILL_PROCESS),
	};

	begin();
	registered(4);
	puts("done");
	fflush(stdout);
	filter(rules, LENGTH(rules), by_prctl());
	exit(0);
}

static void exits_under_a_limit(void)
{
	struct rlimit limit = { 0, 0 };

	begin();
	registered(4);
	puts("done");
	fflush(stdout);
	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
	exit(0);
}

/* The summary's file takes a part of the report alone; the signal would end the process. */
static void reports_under_a_limit(void)
{
	struct rlimit limit;
	struct stat file;

	begin();
	registered(1);
	puts("done");
	fflush(stdout);
	CHECK(!stat(getenv("PINFOLD_SUMMARY"), &file));
	limit.rlim_cur = limit.rlim_max = file.st_size + 20;
	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
	exit(0);
}

static void is_killed(void)
{
	begin();
	registered(1);
	kill(getpid(), SIGKILL);
}

static void exits_elsewhere(void)
{
	char path[] = "/tmp/without_device.XXXXXX";

	begin();
	registered(4);
	CHECK(mkdtemp(path) && !chroot(path) && !chdir("/"));
	puts(getuid() ? "" : "done");
	exit(0);
}

/* How often the library's thread that deregisters gave its processor away so far; -1 without such a thread. */
static long switches_of_reclaimer(void)
{
	DIR *threads = opendir("/proc/self/task");
	struct dirent *entry;
	char path[300], line[256];
	long switches = -1;

	CHECK(threads);
	while ((entry = readdir(threads))) {
		int is_reclaimer = 0;
		FILE *status;

		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		if (!(status = fopen(path, "r")))
			continue;
		while (fgets(line, sizeof(line), status)) {
			is_reclaimer |= !strcmp(line, "Name:\tpinfold-reclaim\n");
			if (is_reclaimer)
				sscanf(line, "voluntary_ctxt_switches: %ld", &switches);
		}
		fclose(status);
	}
	closedir(threads);
	return switches;
}

static long nanoseconds(void)
{
	struct timespec now;

	CHECK(!clock_gettime(CLOCK_MONOTONIC, &now));
	return 1000000000L * now.tv_sec + now.tv_nsec;
}

static void registered_with(char *address, size_t length, int access, int times)
{
	for (int i = 0; i < times; i++)
		CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, address, length, access)));
}

static char *discarded;

/* Keeps a registration in a mapping of which another page may be discarded. */
static void begin_discards(void)
{
	discarded = map();
	registered_with(discarded, 4096, 1, 4);
}

/* Waits until the library's thread that deregisters has looked at all that has changed by now. It sleeps twice for each
 * look, and a discard wakes it: with the third time that it sleeps from here on, one look has begun and ended. */
static void await_look(void)
{
	long from = switches_of_reclaimer(), deadline = nanoseconds() + 60 * 1000000000L;

	CHECK(from >= 0);
	while (switches_of_reclaimer() < from + 3) {
		CHECK(nanoseconds() < deadline);
		CHECK(!madvise(discarded + BYTES - 4096, 4096, MADV_DONTNEED));
		sched_yield();
	}
}

/* What its allocator does under its lock, while it is asked to: it moves pages from one place to another, which is one
 * mapping or, where `moved_bytes` is more than that, two of which one is watched. */
static char *moved_from, *moved_to;
static size_t moved_bytes, grown_bytes;
static int move_flags;

static void move_pages(void)
{
	static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;

	if (!__atomic_load_n(&moved_from, __ATOMIC_ACQUIRE))
		return;
	CHECK(!pthread_mutex_lock(&lock));
	CHECK(mremap(moved_from, moved_bytes, grown_bytes, move_flags, moved_to) != MAP_FAILED);
	__atomic_store_n(&moved_from, NULL, __ATOMIC_RELAXED);
	CHECK(!pthread_mutex_unlock(&lock));
}

/* Reports each of what its allocator is asked for by a thread that is not its own. */
static long asked_by_others;
static int is_counting;
void *__libc_malloc(size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);

static void count_others(void)
{
	if (__atomic_load_n(&is_counting, __ATOMIC_RELAXED) && gettid() != getpid())
		__atomic_add_fetch(&asked_by_others, 1, __ATOMIC_RELAXED);
}

#ifdef COUNTS
void *malloc(size_t bytes)
{
	count_others();
	move_pages();
	return __libc_malloc(bytes);
}

void *realloc(void *block, size_t bytes)
{
	count_others();
	move_pages();
	return __libc_realloc(block, bytes);
}

void *calloc(size_t count, size_t bytes)
{
	count_others();
	move_pages();
	return __libc_calloc(count, bytes);
}
#endif

/* Libraries with variables of threads: the arguments' directory has them. */
static void load_many(void)
{
	char path[4096];

	for (int i = 0; i < 64; i++) {
		int (*count)(void);
		void *handle;

		snprintf(path, sizeof(path), "%s/tls%d.so", arguments[2], i);
		CHECK((handle = dlopen(path, RTLD_NOW)));
		CHECK((count = (int (*)(void))dlsym(handle, "count_up")) && count() == 1);
	}
}

static void loads_many(void)
{
	begin();
	registered(4);
	begin_discards();
	load_many();
	__atomic_store_n(&is_counting, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < 20; i++) {
		CHECK(!munmap(memory, BYTES));
		/* Before a call of the program's deregisters what has changed. */
		await_look();
		memory = map();
		registered(4 << (i / 2));
	}
	printf("asked by others %ld\n", asked_by_others);
	count_others();
	move_pages();
}

static sem_t may_allocate;

static void *allocates_when_told(void *unused)
{
	void *volatile block;

	(void)unused;
	CHECK(!sem_wait(&may_allocate));
	block = malloc(10);
	free(block);
	return NULL;
}

/* Its allocator moves pages, on a thread that is older than many libraries with variables of threads: the first use of one
 * has the C library ask the same allocator. The kernel may move several mappings by such a call, or refuses them at first. */
static void moves_in_its_allocator(void)
{
	enum { ALL = PROT_READ | PROT_WRITE };
	const int is_fixed = !strcmp(arguments[3], "fixed");
	char *from = mmap(NULL, 3 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t thread;

	begin();
	CHECK(from != MAP_FAILED && !sem_init(&may_allocate, 0, 0));
	CHECK(!pthread_create(&thread, NULL, allocates_when_told, NULL));
	memory = from;
	CHECK(!mprotect(memory, BYTES, ALL));
	registered(4);
	/* Beside what is watched: a mapping of its own until the watch ends. */
	CHECK(!mprotect(from + BYTES, BYTES, ALL));
	load_many();
	moved_to = is_fixed ? map() : NULL;
	moved_bytes = is_fixed ? BYTES : 2 * BYTES;
	grown_bytes = is_fixed ? BYTES : 4 * BYTES;
	move_flags = MREMAP_MAYMOVE | (is_fixed ? MREMAP_FIXED : 0);
	__atomic_store_n(&moved_from, from, __ATOMIC_RELEASE);
	CHECK(!sem_post(&may_allocate) && !pthread_join(thread, NULL) && !moved_from);
	puts("done");
}

/* Loads a library whose constructor registers on another thread: nothing is registered before. */
static void loads_a_plugin(void)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/plugin.so", arguments[2]);
	CHECK(ibv_open_device(NULL) && dlopen(path, RTLD_NOW));
	puts("done");
}

static volatile sig_atomic_t notified;

static void note(int signal)
{
	notified = signal;
}

/* A notification of a message queue ends whenever a thread of the process closes a number of the queue. */
static void awaits_a_message(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
	struct mq_attr attributes = { .mq_maxmsg = 1, .mq_msgsize = 1 };
	char name[32];
	mqd_t queue;

	snprintf(name, sizeof(name), "/without_device.%d", getpid());
	queue = mq_open(name, O_CREAT | O_EXCL | O_RDWR, 0600, &attributes);
	if (queue < 0) {
		puts("no message queues");
		return;
	}
	CHECK(!mq_unlink(name));
	CHECK(signal(SIGUSR1, note) != SIG_ERR && !mq_notify(queue, &event));
	begin();
	registered(4);
	CHECK(!mq_send(queue, "", 1, 0));
	puts(notified ? "done" : "not notified");
}

#ifdef STATIC_TLS
static __thread volatile char of_threads[STATIC_TLS];
#else
static __thread volatile char of_threads[1];
#endif

/* With variables of threads for which the C library takes room from each thread's stack. Memory changes, and what is
 * registered of it is deregistered by the library's thread: the other half stays. */
static void has_variables_of_threads(void)
{
	of_threads[0] = 1;
	begin();
	registered(4);
	for (int i = 0; i < 4; i++) {
		CHECK(!munmap(memory, BYTES));
		memory = map();
		registered(4 << i);
	}
	puts("done");
}

/* Keeps registrations until it ends, and leaks nothing of its own. */
static void holds_until_the_end(void)
{
	begin();
	registered(4);
	for (int i = 0; i < 64; i++)
		for (int k = 0; k < 3; k++)
			CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, memory + i * 512, 4096, 1)));
	puts("done");
}

static pthread_barrier_t together;

static void *begins_with_others(void *own)
{
	struct ibv_mr *mr;

	pthread_barrier_wait(&together);
	CHECK((mr = ibv_reg_mr(pd, own, 512, 1)) && !ibv_dereg_mr(mr));
	return NULL;
}

/* The first registrations of a process, by many threads at once, of which nothing is kept: how many high numbers of
 * files are taken then. */
static void threads_begin_at_once(void)
{
	enum { THREADS = 16 };
	pthread_t threads[THREADS];
	int high = 0;

	begin();
	CHECK(!pthread_barrier_init(&together, NULL, THREADS));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, begins_with_others, memory + i * 4096));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	for (int number = 1000; number < 1100; number++)
		high += fcntl(number, F_GETFD) >= 0;
	printf("%d\n", high);
}

/* Registrations that are not kept, of each kind another number: what the programs can do without a device. */
static void not_kept(void)
{
	enum { LOCAL_WRITE = 1, REMOTE_WRITE = 2, MW_BIND = 16, ON_DEMAND = 64 };
	char *shared = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(shared != MAP_FAILED);
	begin();
	registered_with(memory, BYTES, LOCAL_WRITE | REMOTE_WRITE, 2);
	registered_with(memory, BYTES, LOCAL_WRITE | ON_DEMAND, 3);
	registered_with(memory, BYTES, LOCAL_WRITE | MW_BIND, 4);
	registered_with(memory, 0, LOCAL_WRITE, 5);
	/* The first of each is one use too few. */
	registered_with(shared, BYTES, LOCAL_WRITE, 1 + 6);
	registered_with(memory, 2 * BYTES, LOCAL_WRITE, 1 + 7);
	registered_with(memory, BYTES, LOCAL_WRITE, 1 + 1);
	puts("done");
}

/* An arena that is registered page by page as it grows: each page would stay a mapping of its own, and a process may have
 * 65,530. */
static void grows_an_arena(void)
{
	enum { PAGES = 70000, PAGE = 4096 };
	char *arena = mmap(NULL, (size_t)PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	CHECK(arena != MAP_FAILED);
	begin();
	for (size_t i = 0; i < PAGES; i++) {
		char *page = arena + i * PAGE;

		CHECK(!mprotect(page, PAGE, PROT_READ | PROT_WRITE));
		page[0] = 1;
		registered_with(page, PAGE, 1, 3);
	}
	puts("done");
}

/* What is pinned of a pool is missing in it, though the program has unmapped it. */
static void uses_huge_pages(void)
{
	enum { HUGE_PAGE = 2 << 20 };
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB;
	char *huge = mmap(NULL, HUGE_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);

	if (huge == MAP_FAILED) {
		puts("no huge pages");
		return;
	}
	begin();
	registered_with(huge, HUGE_PAGE, 1, 1 + 3);
	registered_with(huge + BYTES, BYTES, 1, 1 + 4);
	puts("done");
}

/* Watched memory changes often, of which nothing is kept, while something next to it is: the thread that deregisters
 * looks once in a while, and not at each change. */
static void changes_often(void)
{
	enum { CHANGES = 1000, PAGE = 4096, LOOK = 10000000, APART = 500 };
	long before, after, most, from;

	begin();
	registered_with(memory, PAGE, 1, 4);
	/* It gives itself its name. */
	while ((before = switches_of_reclaimer()) < 0)
		sched_yield();
	from = nanoseconds();
	for (int i = 0; i < CHANGES; i++) {
		CHECK(!madvise(memory + BYTES - PAGE, PAGE, MADV_DONTNEED));
		/* Changes without an end have it wait for the end of one. */
		usleep(APART);
	}
	after = switches_of_reclaimer();
	/* It waits for a change, then for others to gather, and perhaps for a change to end. */
	most = 4 * ((nanoseconds() - from) / LOOK + 2);
	if (after - before <= most)
		puts("done");
	else
		printf("%ld times in %d changes, and at most %ld are needed\n", after - before, CHANGES, most);
}

static void registers_nothing(void)
{
	begin();
	puts("done");
}

/* One rank of a job, and a child of it that registers nothing. */
static void registers_once(void)
{
	begin();
	registered(1);
	if (!fork())
		exit(0);
	wait(NULL);
	puts("done");
}

/* As many registrations, live at once, as the argument says, twice. */
static void many(void)
{
	long count = atol(arguments[2]);
	struct ibv_mr **all = calloc(count, sizeof(*all));
	long i;

	begin();
	for (int round = 0; round < 2; round++) {
		for (i = 0; i < count; i++)
			CHECK((all[i] = ibv_reg_mr(pd, memory + i % 64 * 512, 4096 - i / 64 % 4000, 1)));
		for (i = 0; i < count; i++)
			CHECK(!ibv_dereg_mr(all[i * 7919 % count]));
	}
	puts("done");
	free(all);
}

/* A daemon closes all that it does not know, and opens the device anew: with the old number, and numbers of
 * registrations that begin anew. All that it has there stays. */
static void closes_everything(void)
{
	struct ibv_mr *own[8];
	char *other;
	int here = 0;

	begin();
	registered(4);
	other = memory;
	memory = map();
	registered(4);
	begin_discards();
	CHECK(!close_range(3, arguments[2] ? 99 : ~0U, 0));
	pd = ibv_alloc_pd(ibv_open_device(NULL));
	for (int i = 0; i < 8; i++)
		CHECK((own[i] = ibv_reg_mr(pd, map(), BYTES, 1)));
	for (int i = 0; i < 4; i++) {
		registered(2);
		await_look();
	}
	CHECK(!munmap(other, BYTES));
	for (int i = 0; i < 4; i++) {
		registered(2);
		await_look();
	}
	/* Room is made of what is idle. */
	verbs_limit(0);
	CHECK(!ibv_reg_mr(pd, other, BYTES, 1));
	for (int i = 0; i < 8; i++)
		here += verbs_has(pd->context->cmd_fd, own[i]->handle);
	printf("%d\n", here);
}

/* What a child changes is not its parent's any more. */
static void child_changes(void)
{
	struct ibv_mr *mr;
	uint32_t key;
	pid_t child;
	int status;

	begin();
	registered(4);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
	key = mr->lkey;
	CHECK((child = fork()) >= 0);
	if (!child)
		_exit(ibv_rereg_mr(mr, 1, NULL, map(), BYTES, 1) != 0);
	CHECK(waitpid(child, &status, 0) == child && !status);
	ibv_dereg_mr(mr);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
	puts(mr->lkey == key ? "again" : "anew");
}

/* What is kept ends by a handle of the program's own, as a library's does, and then something else has its place and its
 * numbers: other bytes, or the same with other rights, which only libibverbs knows of. */
static void ends_by_a_handle(void)
{
	void *own = dlopen("libreusing.so.1", RTLD_LAZY);
	__typeof__(&ibv_dereg_mr) dereg = (__typeof__(&ibv_dereg_mr))dlsym(own, "ibv_dereg_mr");
	int is_other = !strcmp(arguments[2], "bytes");
	struct ibv_mr *mr, *later;
	void *place;

	CHECK(dereg);
	begin();
	registered(1);
	CHECK((place = mr = ibv_reg_mr(pd, memory, BYTES, 1)) && !dereg(mr));
	CHECK((later = ibv_reg_mr(pd, is_other ? map() : memory, BYTES, is_other ? 1 : 7)));
	CHECK(later == place && !ibv_dereg_mr(later));
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
	puts(mr->addr == memory && verbs_rights(mr) == 1 ? "its own" : "another");
}

struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle) __attribute__((weak));

/* A second structure of the domain. */
static void imports_its_domain(void)
{
	struct ibv_pd *own;

	begin();
	own = pd;
	CHECK((pd = ibv_import_pd(own->context, own->handle)));
	registered(4);
	puts(ibv_dealloc_pd(own) ? "in use" : "deallocated");
	ibv_unimport_pd(pd);
}

/* A child uses its parent's domain, and exits: with what is idle, with what is not any more because its memory has gone,
 * or with a library that gives back what it has. */
static void child_uses_its_domain(void)
{
	pid_t child;
	int status;

	begin();
	CHECK((child = fork()) >= 0);
	if (!child) {
		registered(4);
		if (!strcmp(arguments[2], "unmapped")) {
			begin_discards();
			CHECK(!munmap(memory, BYTES));
			await_look();
		} else if (!strcmp(arguments[2], "late")) {
			verbs_has_until_the_end(ibv_reg_mr(pd, memory, BYTES, 1));
		}
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
	puts(ibv_dealloc_pd(pd) ? "in use" : "deallocated");
}

/* A device with the descriptor of the one that was closed: what is kept there is the child's, whatever its parent has under
 * its numbers. */
static void opens_anew(int descriptor, struct ibv_pd *other)
{
	struct ibv_mr *mr;

	begin();
	CHECK(pd->context->cmd_fd == descriptor);
	registered(4);
	CHECK((mr = ibv_reg_mr(pd, map(), BYTES, 1)));
	CHECK(ibv_dealloc_pd(other) == EBUSY && verbs_has(descriptor, mr->handle));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
}

/* A child closes a device of its parent's two, and wants to be rid of a domain of the other one. */
static void child_closes_a_device(void)
{
	struct ibv_pd *closed;
	pid_t child;
	int status;

	begin();
	registered(4);
	closed = pd;
	begin();
	registered(4);
	for (int how = 0; how < 3; how++) {
		int descriptor = closed->context->cmd_fd;

		CHECK((child = fork()) >= 0);
		if (!child) {
			CHECK(!(how < 2 ? ibv_close_device(closed->context) : close(descriptor)));
			CHECK(ibv_dealloc_pd(pd) == EBUSY);
			if (how)
				opens_anew(descriptor, pd);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && !status);
	}
	CHECK(!ibv_dealloc_pd(pd));
	puts(ibv_dealloc_pd(closed) ? "in use" : "deallocated");
}

/* Room is made of what is idle. */
static void changes_without_room(void)
{
	struct ibv_mr *mr;

	begin();
	CHECK((mr = ibv_reg_mr(pd, map(), 4096, 1)));
	registered(4);
	verbs_limit(BYTES + 4096);
	CHECK(!ibv_rereg_mr(mr, 1, NULL, map(), BYTES, 1));
	verbs_limit(4096);
	CHECK(ibv_rereg_mr(mr, 1, NULL, map(), BYTES, 1) && errno == ENOMEM);
	puts("done");
}

#pragma weak ibv_reg_mr_ex
#pragma weak ibv_reg_buf_mr

/* By the functions of the latest versions: room is made of what is idle, and nothing is kept. */
static void registers_otherwise_without_room(void)
{
	struct ibv_mr_init_attr attributes = { BYTES, 1, 0, 0, map() };
	struct ibv_mr *mr;

	begin();
	CHECK(ibv_reg_mr_ex && ibv_reg_buf_mr);
	verbs_limit(BYTES + 4096);
	for (int i = 0; i < 4; i++) {
		registered(4);
		mr = i & 1 ? ibv_reg_mr_ex(pd, &attributes) : ibv_reg_buf_mr(pd, NULL, attributes.addr, BYTES, 1);
		CHECK(mr && verbs_has(pd->context->cmd_fd, mr->handle));
		CHECK(!ibv_reg_mr_ex(pd, &attributes) && errno == ENOMEM);
		CHECK(!ibv_dereg_mr(mr) && !verbs_has(pd->context->cmd_fd, mr->handle));
	}
	puts("done");
}

int interposed_registrations(void) __attribute__((weak));
int interposed_deregistrations(void) __attribute__((weak));

/* What comes to a library that stands before libibverbs. */
static void interposed(void)
{
	begin();
	registered(4);
	CHECK(interposed_registrations && interposed_deregistrations);
	printf("%d registered, %d deregistered\n", interposed_registrations(), interposed_deregistrations());
}

static pthread_t first;
static pthread_key_t own_key;

static void say_at_exit(void)
{
	sigset_t blocked;
	char deep[1 << 20];

	CHECK(!pthread_sigmask(SIG_BLOCK, NULL, &blocked));
	memset(deep, 1, sizeof(deep));
	printf("at exit, USR1 %d, TERM %d, %d\n", sigismember(&blocked, SIGUSR1), sigismember(&blocked, SIGTERM),
	       deep[getpid() % sizeof(deep)]);
}

static void say_of_key(void *value)
{
	printf("key %s\n", (char *)value);
}

static void *ends_last(void *unused)
{
	CHECK(!pthread_join(first, NULL));
	registered(4);
	puts("the first thread has ended");
	/* So long that it would be noticed if the process ended too early. */
	if (!arguments[2])
		usleep(300000);
	puts("last");
	return unused;
}

static void leave(void)
{
	sigset_t usr1;

	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	CHECK(!pthread_sigmask(SIG_BLOCK, &usr1, NULL));
	CHECK(!atexit(say_at_exit) && !pthread_key_create(&own_key, say_of_key));
	CHECK(!pthread_setspecific(own_key, "destroyed"));
	begin();
}

/* `main` leaves, and no other thread goes on. */
static void leaves_alone(void)
{
	leave();
	registered(4);
	pthread_exit(NULL);
}

/* The same with such variables. */
static void leaves_variables_of_threads(void)
{
	of_threads[0] = 1;
	leave();
	registered(4);
	pthread_exit(NULL);
}

/* `main` leaves before another thread does; what registers first is the one or the other. */
static void leaves_first(void)
{
	pthread_t thread;

	leave();
	first = pthread_self();
	registered(arguments[2] ? 0 : 4);
	CHECK(!pthread_create(&thread, NULL, ends_last, NULL));
	pthread_exit(NULL);
}

/* The same in a child, whose first thread is another one of its parent's. */
static void *leaves_in_a_child(void *unused)
{
	pid_t child = fork();
	int status = -1;

	CHECK(child >= 0);
	if (!child && arguments[2])
		leaves_first();
	if (!child)
		leaves_alone();
	CHECK(waitpid(child, &status, 0) == child);
	printf("status %d\n", status);
	return unused;
}

static void child_leaves(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, leaves_in_a_child, NULL) && !pthread_join(thread, NULL));
}

/* A thread whose children are to have another pid namespace starts no thread more. */
static void keeps_after_unshare(void)
{
	begin();
	if (unshare(CLONE_NEWPID) && unshare(CLONE_NEWUSER | CLONE_NEWPID)) {
		puts("refused");
		return;
	}
	registered(4);
	puts("done");
}

static void say_that_it_ends(void)
{
	puts("at exit");
}

static long addresses(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long pages;

	CHECK(file && fscanf(file, "%ld", &pages) == 1 && !fclose(file));
	return pages * sysconf(_SC_PAGESIZE);
}

static void *ends_later(void *unused)
{
	CHECK(!pthread_join(first, NULL));
	puts("last");
	return unused;
}

static sem_t leaves;

static void say_that_it_leaves(void *unused)
{
	(void)unused;
	CHECK(!sem_post(&leaves));
}

/* As `ends_later`, but the first thread need not have ended. */
static void *ends_behind(void *unused)
{
	CHECK(!sem_wait(&leaves));
	puts("last");
	return unused;
}

/* `main` leaves where no thread with a stack of the usual length can begin, or, with an argument, none at all: as many
 * as that are allowed. */
static void leaves_under_a_limit(void)
{
	long left = 4 << 20;
	pthread_attr_t small;
	pthread_t thread;
	struct rlimit limit;

	begin();
	first = pthread_self();
	registered(4);
	CHECK(!atexit(say_that_it_ends) && dlopen("libgcc_s.so.1", RTLD_NOW));
	CHECK(!pthread_attr_init(&small) && !pthread_attr_setstacksize(&small, 65536));
	CHECK(!sem_init(&leaves, 0, 0) && !pthread_key_create(&own_key, say_that_it_leaves));
	CHECK(!pthread_setspecific(own_key, &leaves));
	CHECK(!pthread_create(&thread, &small, arguments[2] ? ends_behind : ends_later, NULL));
	if (arguments[2]) {
		limit.rlim_cur = limit.rlim_max = atol(arguments[2]);
		/* No number is too high for root. */
		CHECK(getuid() || !setuid(54321));
		CHECK(!setrlimit(RLIMIT_NPROC, &limit));
	} else {
		limit.rlim_cur = limit.rlim_max = addresses() + left;
		CHECK(!setrlimit(RLIMIT_AS, &limit));
	}
	pthread_exit(NULL);
}

static int rounds;

static void destroy_again(void *value)
{
	rounds++;
	CHECK(!pthread_setspecific(own_key, value));
}

static void say_rounds(void)
{
	printf("%d rounds\n", rounds);
}

/* `main` leaves, and destroys a key as often as the C library has it do that. */
static void destroys_a_key(void)
{
	begin();
	registered(4);
	CHECK(!atexit(say_rounds) && !pthread_key_create(&own_key, destroy_again));
	CHECK(!pthread_setspecific(own_key, &own_key));
	/* The library's threads give themselves their names. */
	while (switches_of_reclaimer() < 0 && arguments[2])
		sched_yield();
	pthread_exit(NULL);
}

/* The ways in which a program changes what it may do with its memory; without a key of the processor's for the second. */
static void protect(const char *way, int rights)
{
	if (!strcmp(way, "mprotect"))
		CHECK(!mprotect(memory, BYTES, rights));
	else if (!strcmp(way, "pkey_mprotect"))
		CHECK(!pkey_mprotect(memory, BYTES, rights, -1));
	else if (!strcmp(way, "by_number"))
		CHECK(!syscall(SYS_mprotect, memory, (size_t)BYTES, rights));
	else
		CHECK(!syscall(SYS_pkey_mprotect, memory, (size_t)BYTES, rights, -1));
}

/* libibverbs is asked whether it registers what the program may not use any more. */
static void protects(void)
{
	struct ibv_mr *mr;
	uint32_t handle;

	begin();
	registered(4);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
	handle = mr->handle;
	CHECK(!ibv_dereg_mr(mr));
	protect(arguments[2], PROT_NONE);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
	puts(mr->handle == handle ? "found" : "registered");
	CHECK(!ibv_dereg_mr(mr));
	protect(arguments[2], PROT_READ | PROT_WRITE);
	registered(2);
}

/* Moves two pieces of memory at once, one of which is registered: two mappings, or one that is joined before it is moved;
 * by the function or by its number, as the hooks of UCX and Open MPI call it. What the kernel says to two is its own; what
 * it leaves where is said, too. */
static void moves(int is_joined, int is_second, int grows, int cut, int is_numbered)
{
	enum { ALL = PROT_READ | PROT_WRITE, FIXED = MREMAP_MAYMOVE | MREMAP_FIXED };
	const size_t length = 2 * BYTES - cut, new_length = (2 + grows) * BYTES;
	char *room = mmap(NULL, 5 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *to = mmap(NULL, 4 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	/* Not next to what lies below, which may be a library's variables: memory that has joined those joins nothing else. */
	char *from = room + BYTES;
	char *other = from + (is_second ? 0 : BYTES);
	unsigned char resident[16];
	void *moved;

	CHECK(room != MAP_FAILED && to != MAP_FAILED);
	/* Below them, so that what was never registered lies among what was. */
	memory = map();
	registered(4);
	memory = from + (is_second ? BYTES : 0);
	CHECK(!mprotect(memory, BYTES, ALL));
	if (!is_joined)
		CHECK(!mprotect(other, BYTES, PROT_READ));
	memset(memory, 1, BYTES);
	registered(4);
	if (is_joined)
		CHECK(!mprotect(other, BYTES, ALL));
	errno = 0;
	moved = is_numbered ? (void *)syscall(SYS_mremap, from, length, new_length, FIXED, to)
			    : mremap(from, length, new_length, FIXED, to);
	printf("%s: %s, ", moved == to ? "moved" : "refused", strerror(errno));
	printf("%d left\n", !mincore(from, BYTES, resident) + !mincore(from + BYTES, BYTES, resident));
	if (moved == to) {
		memory = to + (memory - from);
		CHECK(memory[0] == 1);
	}
	registered(2);
}

/* Moves what is registered to where nothing is mapped, by its knowledge, and might be: it is as long as what the library maps
 * for a while. */
static void moves_to_a_hole(void)
{
	enum { LENGTH = 256 << 10, FIXED = MREMAP_MAYMOVE | MREMAP_FIXED };
	char *from = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	/* The library has it look for a libfabric, with much stack. */
	int (*open_fabric)(void *, void **, void *);

	begin();
	CHECK(from != MAP_FAILED);
	open_fabric = (__typeof__(open_fabric))dlsym(RTLD_DEFAULT, "fi_fabric");
	for (int i = 0; i < 8; i++) {
		char *to;

		if (i % 4 == 0)
			registered_with(from, LENGTH, 1, 3);
		else if (open_fabric)
			CHECK(open_fabric(NULL, NULL, NULL) == -ENOSYS);
		to = mmap(NULL, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(to != MAP_FAILED && !munmap(to, LENGTH));
		*from = 1;
		CHECK(mremap(from, LENGTH, LENGTH, FIXED, to) == to && *to == 1);
		from = to;
	}
	puts("done");
}

/* The same of many mappings, as Linux moves them since 6.17: a list of them takes memory, of which the library has more or
 * less in stock behind as many other registrations as the argument says. */
static void moves_many_to_a_hole(void)
{
	enum { PARTS = 5000, PART = 8192, ALL = PROT_READ | PROT_WRITE, PLAIN = MAP_PRIVATE | MAP_ANONYMOUS };
	const size_t length = (size_t)PARTS * PART;
	char *from = mmap(NULL, length, ALL, PLAIN, -1, 0), *to = NULL;

	begin();
	CHECK(from != MAP_FAILED);
	memset(from, 1, length);
	for (int i = 0; i < atoi(arguments[2]); i++)
		registered_with(from + i * 4096, 4096, 1, 2);
	for (int i = 0; i < PARTS; i += 2)
		CHECK(!madvise(from + i * PART, PART, MADV_NOHUGEPAGE));
	for (int round = 0; round < 3; round++) {
		registered_with(from, 4096, 1, 3);
		to = mmap(NULL, length, PROT_NONE, PLAIN, -1, 0);
		CHECK(to != MAP_FAILED && !munmap(to, length));
		if (mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to) {
			puts("refused");
			return;
		}
		for (size_t i = 0; i < length; i += 4096)
			CHECK(to[i] == 1);
		from = to;
	}
	puts("moved");
}

static void answers_for_the_kernel(int unused, siginfo_t *call, void *context)
{
	(void)unused, (void)call;
	((ucontext_t *)context)->uc_mcontext.RESULT = -EPERM;
}

/* Its own filter hands moves to a handler, which answers them. */
static void moves_by_a_handler(void)
{
	enum { FIXED = MREMAP_MAYMOVE | MREMAP_FIXED };
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_mremap, SECCOMP_RET_TRAP),
		OTHERWISE(SECCOMP_RET_ALLOW),
	};
	struct sigaction action = { .sa_sigaction = answers_for_the_kernel, .sa_flags = SA_SIGINFO };
	char *to = map();

	begin();
	registered(4);
	CHECK(!sigaction(SIGSYS, &action, NULL));
	filter(rules, LENGTH(rules), by_prctl());
	CHECK(mremap(memory, BYTES, BYTES, FIXED, to) == MAP_FAILED && errno == EPERM);
	puts("done");
}

/* Registers other bytes of the mapping whenever it is asked to. */
static atomic_long rounds_begun, rounds_ended;
static char *const moved_piece = (char *)0x200000000000, *const moved_there = (char *)0x210000000000;

static void *registers_beside(void *unused)
{
	long seen = 0;

	(void)unused;
	while (seen >= 0) {
		const long begun = rounds_begun;

		if (begun == seen)
			continue;
		seen = begun;
		for (int i = 0; seen > 0 && i < 4; i++)
			registered_with(moved_piece + 8 * BYTES + 4096 * i, 4096, 1, 1);
		rounds_ended = seen;
	}
	return NULL;
}

/* Moves two mappings, of which the second goes on behind what is moved, while another thread registers there: all is moved,
 * at whatever moment. */
static void moves_beside_registrations(void)
{
	enum { ALL = PROT_READ | PROT_WRITE, PLACED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED };
	const size_t piece = 4 * BYTES;
	unsigned seed = 1;
	pthread_t thread;
	int failed = 0;

	begin();
	CHECK(!pthread_create(&thread, NULL, registers_beside, NULL));
	for (int i = 0; i < atoi(arguments[2]); i++) {
		CHECK(mmap(moved_piece, 3 * piece, ALL, PLACED, -1, 0) == moved_piece);
		/* Two mappings, also where nothing is watched. */
		CHECK(!madvise(moved_piece, piece, MADV_NOHUGEPAGE));
		memset(moved_piece, 1, 3 * piece);
		rounds_begun++;
		for (volatile int pause = rand_r(&seed) % 20000; pause > 0; pause--)
			;
		failed += mremap(moved_piece, 2 * piece, 2 * piece, MREMAP_MAYMOVE | MREMAP_FIXED, moved_there)
			== MAP_FAILED;
		while (rounds_ended != rounds_begun)
			;
	}
	rounds_begun = -1;
	CHECK(!pthread_join(thread, NULL));
	printf("%s\n", failed ? "some failed" : "all moved");
}

static void moves_mappings(void)
{
	int which = atoi(arguments[2]);

	begin();
	/* The kernel moves whole pages, whatever part of the last one is named. */
	moves(which & 1, which >> 1 & 1, which >> 2 & 1, which >> 3 & 1, which >> 4);
	errno = EXDEV;
	CHECK(mremap(memory, 0, 0, 0) == MAP_FAILED && errno == EINVAL);
}

/* Does what it likes with a part of a mapping of which another part was kept, and none beyond that. */
static void uses_the_rest(void)
{
	enum { ALL = PROT_READ | PROT_WRITE, MISSING = UFFDIO_REGISTER_MODE_MISSING };
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
	struct uffdio_api api = { .api = UFFD_API };
	char *all = mmap(NULL, 8 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *to = mmap(NULL, 4 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *rest = all + 3 * BYTES;
	struct uffdio_register neighbour = { .range = { (uintptr_t)rest + 2 * BYTES, BYTES }, .mode = MISSING };
	struct uffdio_register own = { .range = { (uintptr_t)rest, BYTES }, .mode = MISSING };
	struct uffdio_range both = { (uintptr_t)rest + BYTES, 2 * BYTES };

	begin();
	/* Which way it takes is said, and nothing else. */
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api)) {
		puts("without a userfaultfd");
		return;
	}
	CHECK(all != MAP_FAILED && to != MAP_FAILED);
	memory = all + BYTES;
	CHECK(!mprotect(memory, 4 * BYTES, ALL) && !mprotect(rest + 2 * BYTES, BYTES, PROT_READ));
	memset(memory, 1, 4 * BYTES);
	CHECK(!ioctl(uffd, UFFDIO_REGISTER, &neighbour));
	registered(4);
	switch (atoi(arguments[2])) {
	case 0:
		errno = 0;
		ioctl(uffd, UFFDIO_REGISTER, &own);
		break;
	case 1:
		errno = 0;
		ioctl(uffd, UFFDIO_UNREGISTER, &both);
		break;
	case 2:
		CHECK(!ioctl(uffd, UFFDIO_UNREGISTER, &neighbour.range));
		CHECK(!mprotect(rest + BYTES, BYTES, PROT_READ));
		errno = 0;
		mremap(rest, 2 * BYTES, 2 * BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	}
	puts(strerror(errno));
	registered(2);
}

/* Moves memory that was never used beside some that was never used, far from what is kept: both become one, and are moved
 * as one. */
static void joins_what_was_never_used(void)
{
	enum { ALL = PROT_READ | PROT_WRITE, FIXED = MREMAP_MAYMOVE | MREMAP_FIXED };
	char *room, *to;

	begin();
	registered(4);
	room = mmap(NULL, 16 * BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(room != MAP_FAILED);
	to = room + 4 * BYTES;
	CHECK(!mprotect(room + BYTES, BYTES, ALL) && !mprotect(to + BYTES, BYTES, ALL));
	CHECK(mremap(room + BYTES, BYTES, BYTES, FIXED, to) == to);
	errno = 0;
	mremap(to, 2 * BYTES, 3 * BYTES, FIXED, room + 8 * BYTES);
	puts(strerror(errno));
}

static int ignores(struct dl_phdr_info *module, size_t bytes, void *unused)
{
	(void)module, (void)bytes, (void)unused;
	return 0;
}

static void *asks_for_modules(void *unused)
{
	for (;;)
		dl_iterate_phdr(ignores, unused);
	return NULL;
}

/* Children find the dynamic linker's lock taken, by a thread that they do not have. */
static void forks_beside_the_linker(void)
{
	pthread_t thread;
	int status;

	begin();
	if (arguments[2])
		registered(4);
	for (int i = 0; i < 2; i++)
		CHECK(!pthread_create(&thread, NULL, asks_for_modules, NULL));
	for (int i = 0; i < 40; i++) {
		pid_t child = fork();

		if (!child) {
			registered(4);
			_exit(0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	}
	puts("done");
}

#pragma weak ibv_reg_mr_iova
#pragma weak ibv_reg_mr_iova2
#pragma weak ibv_unimport_pd

/* Asks for functions that an old libibverbs lacks, and registers with what there is. */
static void asks_for_later_functions(void)
{
	enum { RELAXED_ORDERING = 1 << 20 };
	struct ibv_mr *mr;

	begin();
	for (int i = 0; i < 4; i++) {
		if (ibv_reg_mr_iova2)
			mr = ibv_reg_mr_iova2(pd, memory, BYTES, (uintptr_t)memory, 1 | RELAXED_ORDERING);
		else
			mr = ibv_reg_mr(pd, memory, BYTES, 1);
		CHECK(mr && verbs_has(pd->context->cmd_fd, mr->handle) && !ibv_dereg_mr(mr));
		if (ibv_reg_mr_iova)
			mr = ibv_reg_mr_iova(pd, memory, 4096, (uintptr_t)memory, 1);
		else
			mr = ibv_reg_mr(pd, memory, 4096, 1);
		CHECK(mr && verbs_has(pd->context->cmd_fd, mr->handle) && !ibv_dereg_mr(mr));
		/* What cannot be done without them says so. */
		errno = 0;
		CHECK(!ibv_reg_mr_iova2 || (!ibv_reg_mr_iova2(pd, memory, BYTES, 0, 1) && errno == EOPNOTSUPP));
		errno = 0;
		CHECK(!ibv_reg_mr_iova || (!ibv_reg_mr_iova(pd, memory, BYTES, 0, 1) && errno == EOPNOTSUPP));
		errno = 0;
		CHECK(!ibv_reg_mr_ex || (!ibv_reg_mr_ex(pd, NULL) && errno == EOPNOTSUPP));
		errno = 0;
		CHECK(!ibv_reg_buf_mr || (!ibv_reg_buf_mr(pd, NULL, memory, BYTES, 1) && errno == EOPNOTSUPP));
	}
	if (ibv_unimport_pd)
		ibv_unimport_pd(pd);
	registered(1);
	puts("done");
}

/* How many threads of the process have the file of `number` open under that number. */
static int holders(int number)
{
	struct stat file, held;
	char path[64];
	DIR *threads = opendir("/proc/self/task");
	struct dirent *thread;
	int count = 0;

	CHECK(threads && !fstat(number, &file));
	while ((thread = readdir(threads))) {
		if (*thread->d_name == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%.20s/fd/%d", thread->d_name, number);
		count += !stat(path, &held) && held.st_dev == file.st_dev && held.st_ino == file.st_ino;
	}
	closedir(threads);
	return count;
}

/* With a table of descriptors of its own, by either call: what it closes is closed, and what it has locked it may lock
 * again. */
static void unshares_files(void)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10 };
	char name[] = "/tmp/pinfold.XXXXXX";
	struct pollfd end;
	int ends[2], locked;

	begin();
	CHECK(!pipe(ends) && (locked = mkstemp(name)) >= 0 && !unlink(name));
	CHECK(!fcntl(locked, F_SETLK, &lock));
	registered(4);
	if (!strcmp(arguments[2], "unshare"))
		CHECK(!unshare(CLONE_FILES));
	else
		CHECK(!syscall(SYS_close_range, ~0U, ~0U, 2 /* CLOSE_RANGE_UNSHARE */));
	printf("lock %d, ", fcntl(locked, F_SETLK, &lock));
	printf("device held by %d, ", holders(pd->context->cmd_fd));
	end = (struct pollfd){ ends[0], POLLIN, 0 };
	close(ends[1]);
	printf("%s\n", poll(&end, 1, 0) == 1 ? "end of file" : "no end");
}

/* What is closed right after the first kept registration has no other holder. */
static void closes_at_once(void)
{
	struct pollfd end;
	int ends[2];

	begin();
	CHECK(!pipe(ends));
	registered(2);
	close(ends[1]);
	end = (struct pollfd){ ends[0], POLLIN, 0 };
	printf("%s\n", poll(&end, 1, 0) == 1 ? "end of file" : "no end");
}

/* With a directory and a namespace of its own: it leaves the one, and enters the other, as a program of one thread. */
static void leaves_its_directory(void)
{
	char name[] = "/tmp/pinfold.XXXXXX", path[64], link[64];
	DIR *threads = opendir("/proc/self/task");
	int mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), stayed = 0;
	struct dirent *thread;

	begin();
	CHECK(threads && mounts >= 0 && mkdtemp(name) && !chdir(name));
	registered(4);
	errno = 0;
	printf("setns %d ", setns(mounts, CLONE_NEWNS));
	printf("(%d), ", errno);
	CHECK(!unshare(CLONE_FS) && !chdir("/"));
	while ((thread = readdir(threads))) {
		ssize_t length;

		snprintf(path, sizeof(path), "/proc/self/task/%.20s/cwd", thread->d_name);
		length = readlink(path, link, sizeof(link));
		stayed += length == (ssize_t)strlen(name) && !strncmp(link, name, length);
	}
	CHECK(!rmdir(name));
	printf("%d there\n", stayed);
}

/* How many lines a file has; 0 if it is not there. */
static int lines_of(const char *path)
{
	FILE *file = fopen(path, "r");
	int lines = 0, read;

	while (file && (read = getc(file)) != EOF)
		lines += read == '\n';
	if (file)
		fclose(file);
	return lines;
}

/* Where a process that is in `directory` reports to: the second argument, with its number for the mark. */
static void path_of_reports(char path[4096], const char *directory)
{
	const char *number = strstr(arguments[2], "%p");

	CHECK(number);
	snprintf(path, 4096, "%s/%.*s%d%s", directory, (int)(number - arguments[2]), arguments[2], getpid(), number + 2);
}

/* Has the library report, for the time of this number in this process. */
static void asked_for_report(const char *path, int number)
{
	CHECK(!raise(SIGUSR1));
	while (lines_of(path) < number)
		sched_yield();
}

/* Has the library report while its file is open, and once it was closed with all that the program does not know, by a
 * program that has gone elsewhere. */
static void asks_for_reports(void)
{
	char path[4096], directory[2048];

	CHECK(getcwd(directory, sizeof(directory)));
	path_of_reports(path, directory);
	begin();
	registered(1);
	CHECK(!chdir("/usr"));
	asked_for_report(path, 1);
	CHECK(!close_range(3, ~0U, 0));
	asked_for_report(path, 2);
	CHECK(!unlink(path));
	puts("done");
	fflush(stdout);
	_exit(0);
}

/* Each process that registers has reports of its own, in a line of forks: the first asks again when its child has ended. */
static void children_ask_for_reports(void)
{
	char path[4096];
	pid_t child = 0;
	int status, generation;

	begin();
	for (generation = 0; generation < 3 && !child; generation++) {
		path_of_reports(path, ".");
		registered(2);
		asked_for_report(path, 1);
		CHECK((child = fork()) >= 0);
	}
	if (!child)
		_exit(0);
	CHECK(waitpid(child, &status, 0) == child && !status);
	asked_for_report(path, 2);
	CHECK(!unlink(path));
	if (generation == 1)
		puts("done");
	fflush(stdout);
	_exit(0);
}

/* What is undone when the last thread ends that has a part in it. */
static void undoes_semaphores(void)
{
	struct sembuf raise = { 0, 1, SEM_UNDO };
	int semaphores = semget(IPC_PRIVATE, 1, 0600);

	begin();
	CHECK(semaphores >= 0 && !semop(semaphores, &raise, 1));
	registered(4);
	CHECK(!unshare(CLONE_SYSVSEM));
	printf("%d\n", semctl(semaphores, 0, GETVAL));
	semctl(semaphores, 0, IPC_RMID);
}

/* Nothing that the program did has failed. */
static void asks_for_linker_errors(void)
{
	const char *before = dlerror(), *after;

	printf("%s, ", before ? before : "none");
	begin();
	registered(4);
	after = dlerror();
	printf("%s\n", after ? after : "none");
}

/* Its environment is its own: it writes over the strings, as programs do that show a title of their own in `ps`, or changes
 * what the library reads, or empties all, and at last there is none that can be read. */
static void replaces_its_environment(void)
{
	if (!strcmp(arguments[2], "strings"))
		for (char **variable = environ; *variable; variable++)
			memset(*variable, 'x', strlen(*variable));
	else if (!strcmp(arguments[2], "cleared"))
		CHECK(!clearenv());
	else
		CHECK(!setenv("PINFOLD_CACHE", "off", 1) && !unsetenv("PINFOLD_STATISTICS"));
	if (strcmp(arguments[2], "changed"))
		environ = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	begin();
	registered(4);
	puts("done");
}

/* Opens a device anew again and again, under one number, and each time registers the same bytes twice in it: all that it
 * opened before went with the descriptors that it does not know. Each device that is not known any more has its registration
 * found. */
static void closes_everything_again_and_again(void)
{
	int found = 0;

	memory = map();
	for (int i = 0; i < 200; i++) {
		struct ibv_mr *mr;
		uint32_t key;

		pd = ibv_alloc_pd(ibv_open_device(NULL));
		registered(2);
		CHECK((mr = ibv_reg_mr(pd, memory, BYTES, 1)));
		key = mr->lkey;
		CHECK(!ibv_dereg_mr(mr) && (mr = ibv_reg_mr(pd, memory, BYTES, 1)));
		found += mr->lkey == key;
		CHECK(verbs_has(pd->context->cmd_fd, mr->handle));
		CHECK(!ibv_dereg_mr(mr) && !close(pd->context->cmd_fd));
	}
	printf("%d found\n", found);
}

static void leaves_by_exit(int signal)
{
	(void)signal;
	exit(3);
}

static void closes_the_device(void)
{
	struct ibv_context *device = pd->context;

	ibv_dealloc_pd(pd);
	ibv_close_device(device);
}

/* Registers until a signal comes, in the middle of a call mostly. */
static void registers_until_a_signal(int number)
{
	struct itimerval timer = { .it_value = { .tv_usec = 2000 + 37 * number } };

	begin();
	CHECK(!atexit(closes_the_device));
	registered(3);
	CHECK(signal(SIGALRM, leaves_by_exit) != SIG_ERR && !setitimer(ITIMER_REAL, &timer, NULL));
	for (;;)
		registered(1000);
}

/* The same where one registration may be idle: each call ends another one. Without a function of its own at the exit, which
 * would find the locks of the C library and of libibverbs taken. */
static void evicts_until_a_signal(int number)
{
	unsigned seed = number;
	struct itimerval timer = { .it_value = { .tv_usec = 500 + rand_r(&seed) % 1500 } };

	begin();
	registered(3);
	CHECK(signal(SIGALRM, leaves_by_exit) != SIG_ERR && !setitimer(ITIMER_REAL, &timer, NULL));
	for (int i = 0;; i = (i + 4096) % BYTES)
		registered_with(memory + i, 4096, 1, 1);
}

/* Processes that a handler ends by `exit`: each ends. */
static void all_exit(void (*until_a_signal)(int), int processes)
{
	for (int i = 0; i < processes; i++) {
		const struct timespec pause = { .tv_nsec = 1000000 };
		pid_t child = fork(), ended = 0;
		int status;

		CHECK(child >= 0);
		if (!child)
			until_a_signal(i);
		for (int j = 0; j < 10000 && !ended; j++) {
			CHECK(!nanosleep(&pause, NULL) && (ended = waitpid(child, &status, WNOHANG)) >= 0);
		}
		if (!ended)
			kill(child, SIGKILL);
		CHECK(ended && WIFEXITED(status) && WEXITSTATUS(status) == 3);
	}
	puts("done");
}

/* They give back at their exit what they have. */
static void exits_in_a_handler(void)
{
	all_exit(registers_until_a_signal, 40);
}

static void exits_while_it_evicts(void)
{
	all_exit(evicts_until_a_signal, atoi(arguments[2]));
}

/* Has a userfaultfd of the program's own watch `length` bytes from `start` on; -1 where that is refused. */
static int watch(int uffd, char *start, size_t length)
{
	struct uffdio_register request = { .range = { (uintptr_t)start, length }, .mode = UFFDIO_REGISTER_MODE_MISSING };

	return ioctl(uffd, UFFDIO_REGISTER, &request);
}

static int unwatch(int uffd, char *start, size_t length)
{
	struct uffdio_range range = { (uintptr_t)start, length };

	return ioctl(uffd, UFFDIO_UNREGISTER, &range);
}

static int userfaultfd_with(unsigned long features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	CHECK(uffd >= 0 && !ioctl(uffd, UFFDIO_API, &api));
	return uffd;
}

static int own_userfaultfd(void)
{
	return userfaultfd_with(0);
}

static void *moves_what_is_watched(void *from)
{
	void *to = map();

	CHECK(mremap(from, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
	return NULL;
}

/* Before it reads that one thread moves what its own userfaultfd watches, for which that thread waits, another has it
 * watch what is kept. */
static void watches_beside_a_move(void)
{
	int uffd = userfaultfd_with(UFFD_FEATURE_EVENT_REMAP);
	struct pollfd event = { uffd, POLLIN, 0 };
	struct uffd_msg message;
	pthread_t thread;
	void *moved;

	begin();
	registered(4);
	CHECK(!watch(uffd, moved = map(), BYTES));
	CHECK(!pthread_create(&thread, NULL, moves_what_is_watched, moved));
	CHECK(poll(&event, 1, -1) == 1 && event.revents == POLLIN);
	CHECK(!watch(uffd, memory, BYTES));
	CHECK(read(uffd, &message, sizeof(message)) == sizeof(message) && message.event == UFFD_EVENT_REMAP);
	CHECK(!pthread_join(thread, NULL));
	puts("done");
}

static sem_t is_kept;

static void *watches_what_is_kept(void *kept)
{
	CHECK(!sem_wait(&is_kept) && !watch(own_userfaultfd(), kept, BYTES));
	return NULL;
}

/* Allows itself what these cases need by themselves, on all threads. */
static void allows_a_few_calls(void)
{
	static struct sock_filter rules[] = {
		NUMBER,
		ON(SYS_ioctl, SECCOMP_RET_ALLOW),
		ON(SYS_write, SECCOMP_RET_ALLOW),
		ON(SYS_fstat, SECCOMP_RET_ALLOW),
		ON(SYS_futex, SECCOMP_RET_ALLOW),
		ON(SYS_exit, SECCOMP_RET_ALLOW),
		ON(SYS_exit_group, SECCOMP_RET_ALLOW),
		ON(SYS_clock_nanosleep, SECCOMP_RET_ALLOW),
		OTHERWISE(SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { LENGTH(rules), rules };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
}

static void *ends_the_process(void *unused)
{
	CHECK(!sem_post(&leaves));
	usleep(200000);
	CHECK(write(1, "done\n", 5) == 5);
	_exit(unused != NULL);
}

static void *ends_by_itself(void *unused)
{
	pthread_exit(unused);
}

/* A program that registers nothing, and allows itself a few calls: none is made that it does not make itself. */
static void registers_nothing_in_a_sandbox(void)
{
	int uffd = own_userfaultfd(), is_leaving = !strcmp(arguments[2], "leaves");
	pthread_t thread;

	memory = map();
	CHECK(!watch(uffd, memory, BYTES));
	/* Loads what the C library needs for it. */
	CHECK(!pthread_create(&thread, NULL, ends_by_itself, NULL) && !pthread_join(thread, NULL));
	CHECK(!sem_init(&leaves, 0, 0));
	CHECK(!is_leaving || (!pthread_create(&thread, NULL, ends_the_process, NULL) && !sem_wait(&leaves)));
	allows_a_few_calls();
	if (is_leaving)
		pthread_exit(NULL);
	CHECK(!unwatch(uffd, memory, BYTES) && !watch(uffd, memory, BYTES));
	CHECK(watch(uffd, NULL, BYTES) == -1);
	CHECK(write(1, "done\n", 5) == 5);
	exit(0);
}

enum { PART = 4 * BYTES };

static _Atomic long asked, answered;

static void *registers_when_asked(void *parts)
{
	for (long seen = 0;; answered = seen) {
		while (asked == seen)
			;
		if ((seen = asked) < 0)
			return NULL;
		for (int i = 0; i < 4; i++)
			registered_with((char *)parts + 2 * PART + i * 4096, 4096, 1, 1);
	}
}

/* Has a userfaultfd of its own watch one part of a mapping, in whose other part another thread registers meanwhile. */
static void watches_beside_registrations(void)
{
	enum { WHOLE = 3 * PART };
	char *place = mmap((void *)0x200000000000, WHOLE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int uffd = own_userfaultfd(), refused = 0;
	pthread_t thread;
	unsigned seed = 1;

	begin();
	CHECK(place != MAP_FAILED && !pthread_create(&thread, NULL, registers_when_asked, place));
	for (int i = 0; i < 1000; i++) {
		CHECK(mmap(place, WHOLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place);
		CHECK(!madvise(place, PART, MADV_NOHUGEPAGE));
		memset(place, 1, WHOLE);
		asked++;
		for (volatile int pause = rand_r(&seed) % 20000; pause; pause--)
			;
		if (watch(uffd, place + PART, PART))
			refused++;
		else
			CHECK(!unwatch(uffd, place + PART, PART));
		while (answered != asked)
			;
	}
	asked = -1;
	CHECK(!pthread_join(thread, NULL));
	printf("%d refused\n", refused);
}

/* The first threads of a child have the stacks, and so the names, of threads that the library had in its parent. They are
 * the program's: what the library watches is theirs to watch. */
static void child_has_threads(void)
{
	enum { THREADS = 4 };
	pthread_t threads[THREADS];
	char *kept[THREADS];
	pthread_attr_t small;

	begin();
	registered(4);
	if (has_a_child_that_ends())
		return;
	CHECK(!sem_init(&is_kept, 0, 0) && !pthread_attr_init(&small));
	CHECK(!pthread_attr_setstacksize(&small, 256 << 10));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], &small, watches_what_is_kept, kept[i] = map()));
	begin();
	for (int i = 0; i < THREADS; i++)
		registered_with(kept[i], BYTES, 1, 4);
	for (int i = 0; i < THREADS; i++)
		CHECK(!sem_post(&is_kept));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	_exit(0);
}

static void *sleeps_a_little(void *unused)
{
	usleep(10000);
	return unused;
}

/* Each generation keeps something, and forks the next; `main` of the last one leaves before another thread does. */
static void generations_leave(void)
{
	int status;

	begin();
	registered(4);
	for (int generation = 0; generation < 10; generation++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (child) {
			CHECK(waitpid(child, &status, 0) == child && !status);
			if (!generation)
				puts("done");
			return;
		}
		begin();
		registered(4);
	}
	CHECK(!pthread_create(&first, NULL, sleeps_a_little, NULL));
	pthread_exit(NULL);
}

/* The C library has memory in stock, and no addresses are left but as many as the argument says: pages are registered,
 * many at once, changed, and registered again, also in a child. */
static void has_no_more_addresses(void)
{
	enum { COUNT = 3000, POOL = 32 << 20, PAGE = 4096 };
	static struct ibv_mr *all[COUNT];
	struct rlimit few = { 0, RLIM_INFINITY };
	char *pages = mmap(NULL, 2 * COUNT * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *pool;
	pid_t child;
	int status;

	begin();
	registered(4);
	for (int i = 0; i < COUNT; i++)
		CHECK(!mprotect(pages + 2 * i * PAGE, PAGE, PROT_READ | PROT_WRITE));
	CHECK(mallopt(M_TRIM_THRESHOLD, 2 * POOL) && mallopt(M_MMAP_THRESHOLD, 2 * POOL) && (pool = malloc(POOL)));
	free(pool);
	few.rlim_cur = addresses() + atol(arguments[2]);
	CHECK(!setrlimit(RLIMIT_AS, &few));
	CHECK((child = fork()) >= 0);
	for (int round = 0; round < 4; round++) {
		for (int i = 0; i < COUNT; i++)
			CHECK((all[i] = ibv_reg_mr(pd, pages + 2 * i * PAGE, PAGE, 1)));
		for (int i = 0; i < COUNT; i++)
			CHECK(!ibv_dereg_mr(all[i]));
		for (int i = 0; round == 2 && i < COUNT; i++)
			CHECK(!madvise(pages + 2 * i * PAGE, PAGE, MADV_DONTNEED));
	}
	if (!child)
		exit(0);
	CHECK(waitpid(child, &status, 0) == child && !status && !ibv_dealloc_pd(pd));
	puts("done");
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "has_no_more_addresses", has_no_more_addresses },
	{ "in_the_container", in_the_container },
	{ "sandboxed_in_a_container", sandboxed_in_a_container },
	{ "kept_in_the_container", kept_in_the_container },
	{ "sandboxed_after_the_first_kept", sandboxed_after_the_first_kept },
	{ "asks_for_filters", asks_for_filters },
	{ "restricts_another_program", restricts_another_program },
	{ "exits_in_a_sandbox", exits_in_a_sandbox },
	{ "exits_under_a_limit", exits_under_a_limit },
	{ "reports_under_a_limit", reports_under_a_limit },
	{ "is_killed", is_killed },
	{ "exits_elsewhere", exits_elsewhere },
	{ "exits_in_a_handler", exits_in_a_handler },
	{ "exits_while_it_evicts", exits_while_it_evicts },
	{ "loads_many", loads_many },
	{ "moves_in_its_allocator", moves_in_its_allocator },
	{ "moves_to_a_hole", moves_to_a_hole },
	{ "moves_many_to_a_hole", moves_many_to_a_hole },
	{ "moves_by_a_handler", moves_by_a_handler },
	{ "moves_beside_registrations", moves_beside_registrations },
	{ "loads_a_plugin", loads_a_plugin },
	{ "awaits_a_message", awaits_a_message },
	{ "holds_until_the_end", holds_until_the_end },
	{ "threads_begin_at_once", threads_begin_at_once },
	{ "changes_often", changes_often },
	{ "grows_an_arena", grows_an_arena },
	{ "uses_huge_pages", uses_huge_pages },
	{ "registers_nothing", registers_nothing },
	{ "registers_once", registers_once },
	{ "not_kept", not_kept },
	{ "many", many },
	{ "closes_everything", closes_everything },
	{ "child_changes", child_changes },
	{ "ends_by_a_handle", ends_by_a_handle },
	{ "imports_its_domain", imports_its_domain },
	{ "child_uses_its_domain", child_uses_its_domain },
	{ "child_closes_a_device", child_closes_a_device },
	{ "changes_without_room", changes_without_room },
	{ "registers_otherwise_without_room", registers_otherwise_without_room },
	{ "interposed", interposed },
	{ "moves_mappings", moves_mappings },
	{ "protects", protects },
	{ "uses_the_rest", uses_the_rest },
	{ "joins_what_was_never_used", joins_what_was_never_used },
	{ "forks_beside_the_linker", forks_beside_the_linker },
	{ "leaves_alone", leaves_alone },
	{ "leaves_first", leaves_first },
	{ "child_leaves", child_leaves },
	{ "keeps_after_unshare", keeps_after_unshare },
	{ "leaves_under_a_limit", leaves_under_a_limit },
	{ "destroys_a_key", destroys_a_key },
	{ "asks_for_later_functions", asks_for_later_functions },
	{ "changes_in_the_container", changes_in_the_container },
	{ "in_a_strict_container", in_a_strict_container },
	{ "unshares_files", unshares_files },
	{ "closes_at_once", closes_at_once },
	{ "leaves_its_directory", leaves_its_directory },
	{ "asks_for_reports", asks_for_reports },
	{ "children_ask_for_reports", children_ask_for_reports },
	{ "undoes_semaphores", undoes_semaphores },
	{ "has_variables_of_threads", has_variables_of_threads },
	{ "leaves_variables_of_threads", leaves_variables_of_threads },
	{ "asks_for_linker_errors", asks_for_linker_errors },
	{ "replaces_its_environment", replaces_its_environment },
	{ "closes_everything_again_and_again", closes_everything_again_and_again },
	{ "child_has_threads", child_has_threads },
	{ "registers_nothing_in_a_sandbox", registers_nothing_in_a_sandbox },
	{ "watches_beside_a_move", watches_beside_a_move },
	{ "watches_beside_registrations", watches_beside_registrations },
	{ "generations_leave", generations_leave },
};

int main(int count, char **given)
{
	arguments = given;
	for (size_t i = 0; count > 1 && i < LENGTH(cases); i++)
		if (!strcmp(given[1], cases[i].name)) {
			cases[i].run();
			return 0;
		}
	return 2;
}
