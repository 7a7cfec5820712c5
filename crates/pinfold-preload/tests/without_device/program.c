/*
 * Legal programs that a library in their process may break and that need no device: libibverbs is stood in for.
 *
 *   program CASE [ARGUMENT]
 */

#include "verbs.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <mqueue.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 64 << 10 };

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition,         \
				strerror(errno));                                                  \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

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

static void filter(struct sock_filter *rules, size_t count, int by_prctl)
{
	struct sock_fprog program = { count, rules };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	if (by_prctl)
		CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
	else
		CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define ON(number, action) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, action)
#define OTHERWISE(action) BPF_STMT(BPF_RET | BPF_K, action)
#define LENGTH(array) (sizeof(array) / sizeof(*(array)))

/* As a container does it: the program begins under a filter. */
static void begin_again_in_a_container(const char *name)
{
	static struct sock_filter rules[] = { OTHERWISE(SECCOMP_RET_ALLOW) };

	filter(rules, LENGTH(rules), 0);
	execl("/proc/self/exe", arguments[0], name, arguments[2], NULL);
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

static void exits_elsewhere(void)
{
	char path[] = "/tmp/without_device.XXXXXX";

	begin();
	registered(4);
	CHECK(mkdtemp(path) && !chroot(path) && !chdir("/"));
	puts(getuid() ? "" : "done");
	exit(0);
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
	return __libc_malloc(bytes);
}

void *realloc(void *block, size_t bytes)
{
	count_others();
	return __libc_realloc(block, bytes);
}

void *calloc(size_t count, size_t bytes)
{
	count_others();
	return __libc_calloc(count, bytes);
}
#endif

/* Loads many libraries with variables of threads: the arguments' directory has them. */
static void loads_many(void)
{
	char path[4096];

	begin();
	registered(4);
	for (int i = 0; i < 64; i++) {
		int (*count)(void);
		void *handle;

		snprintf(path, sizeof(path), "%s/tls%d.so", arguments[2], i);
		CHECK((handle = dlopen(path, RTLD_NOW)));
		CHECK((count = (int (*)(void))dlsym(handle, "count_up")) && count() == 1);
	}
	__atomic_store_n(&is_counting, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < 20; i++) {
		CHECK(!munmap(memory, BYTES));
		memory = map();
		registered(4 << (i / 2));
		usleep(20000);
	}
	printf("asked by others %ld\n", asked_by_others);
	count_others();
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

static void registered_with(char *address, size_t length, int access, int times)
{
	for (int i = 0; i < times; i++)
		CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, address, length, access)));
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
	CHECK(!close_range(3, arguments[2] ? 99 : ~0U, 0));
	pd = ibv_alloc_pd(ibv_open_device(NULL));
	for (int i = 0; i < 8; i++)
		CHECK((own[i] = ibv_reg_mr(pd, map(), BYTES, 1)));
	for (int i = 0; i < 4; i++) {
		registered(2);
		usleep(20000);
	}
	CHECK(!munmap(other, BYTES));
	for (int i = 0; i < 4; i++) {
		registered(2);
		usleep(20000);
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

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "in_the_container", in_the_container },
	{ "sandboxed_in_a_container", sandboxed_in_a_container },
	{ "kept_in_the_container", kept_in_the_container },
	{ "sandboxed_after_the_first_kept", sandboxed_after_the_first_kept },
	{ "asks_for_filters", asks_for_filters },
	{ "exits_in_a_sandbox", exits_in_a_sandbox },
	{ "exits_under_a_limit", exits_under_a_limit },
	{ "exits_elsewhere", exits_elsewhere },
	{ "loads_many", loads_many },
	{ "loads_a_plugin", loads_a_plugin },
	{ "awaits_a_message", awaits_a_message },
	{ "holds_until_the_end", holds_until_the_end },
	{ "threads_begin_at_once", threads_begin_at_once },
	{ "registers_nothing", registers_nothing },
	{ "registers_once", registers_once },
	{ "not_kept", not_kept },
	{ "many", many },
	{ "closes_everything", closes_everything },
	{ "child_changes", child_changes },
	{ "changes_without_room", changes_without_room },
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
