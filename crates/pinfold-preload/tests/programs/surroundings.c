/*
 * What legal programs do to the process and the machine around their registrations: the lines must be the
 * same with and without a library that keeps some of them.
 *
 *   surroundings CASE [ARGUMENT]
 *
 * Each case is a process of its own. What a machine may do differently each time goes to standard error.
 */

#include "cases.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

static char *memory;

/* Runs `body` in a child, which has the device and the domain of its parent; how it ended. */
static void in_a_child(const char *name, void (*body)(void))
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		body();
		fflush(stdout);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	SAY("%s: status %d, signal %d", name, WEXITSTATUS(status), WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

/* --- libraries ---------------------------------------------------------------------------------- */

static void *beside_the_program(const char *name)
{
	char path[4096];
	ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 64);
	void *handle;

	CHECK(length > 0);
	path[length] = 0;
	strcpy(strrchr(path, '/') + 1, name);
	handle = dlopen(path, RTLD_NOW);
	if (!handle)
		fprintf(stderr, "%s\n", dlerror());
	return handle;
}

/* A library whose variables of threads must lie in what the C library has set aside for such: a little. */
static void static_thread_storage(void)
{
	struct ibv_context *context = begin();
	void *handle;
	int (*count)(void);

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK((handle = beside_the_program("tls.so")));
	CHECK((count = (int (*)(void))dlsym(handle, "count_up")));
	SAY("%d %d", count(), count());
	registered_often(pd, memory, BYTES);
	end(context);
}

/* A plugin that uses verbs comes and goes. */
static void plugins(void)
{
	int i;

	for (i = 0; i < 10; i++) {
		void *handle = beside_the_program("plugin.so");
		int (*use)(void);

		CHECK(handle && (use = (int (*)(void))dlsym(handle, "use_verbs")));
		SAY("%d", use());
		CHECK(!dlclose(handle));
	}
}

/* --- signals ------------------------------------------------------------------------------------ */

static volatile sig_atomic_t ticks;

static void tick(int unused)
{
	(void)unused;
	ticks++;
}

static void *stormed(void *unused)
{
	int i;

	for (i = 0; i < 60; i++) {
		char *own = map(BYTES);

		registered_often(pd, own, BYTES);
		munmap(own, BYTES);
	}
	return unused;
}

/* Signals at any moment; where statistics at a signal are asked for, that one too. */
static void signal_storm(void)
{
	struct sigaction action = { .sa_handler = tick };
	struct itimerval timer = { { 0, 5000 }, { 0, 5000 } };
	const char *statistics = getenv("PINFOLD_STATISTICS_SIGNAL");
	struct ibv_context *context = begin();
	pthread_t threads[2];
	int i;

	CHECK(!sigaction(SIGALRM, &action, NULL));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&threads[i], NULL, stormed, NULL));
	for (i = 0; i < 200; i++) {
		if (statistics)
			kill(getpid(), SIGUSR1);
		registered_often(pd, memory + i % 16 * 4096 / 2, BYTES / 2);
	}
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(threads[i], NULL));
	timer = (struct itimerval){ 0 };
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	SAY("ticked %d", ticks > 0);
	end(context);
}

/* --- sandboxes ---------------------------------------------------------------------------------- */

#define REFUSED(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)

/* A filter that ends the process at what a program has no use for once it has started. */
static void forbid(unsigned flags)
{
	static struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		REFUSED(SYS_userfaultfd),
		REFUSED(SYS_clone),
		REFUSED(SYS_clone3),
		REFUSED(SYS_openat),
		REFUSED(SYS_bpf),
		REFUSED(SYS_socket),
		REFUSED(SYS_pipe2),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(*filter), filter };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program));
}

/* What a program goes on to do once it is in a sandbox. */
static void go_on_under(unsigned flags)
{
	forbid(flags);
	registered_often(pd, memory, BYTES);
	munmap(memory, BYTES);
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("dealloc_pd %d", ibv_dealloc_pd(pd));
	_exit(0);
}

static void register_in_a_sandbox(void)
{
	go_on_under(0);
}

static void deadly_sandbox_first(void)
{
	begin();
	memory = map(BYTES);
	in_a_child("sandbox before any registration", register_in_a_sandbox);
}

static void deadly_sandbox_later(void)
{
	begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	register_in_a_sandbox();
}

static void deadly_sandbox_for_all(void)
{
	begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	go_on_under(SECCOMP_FILTER_FLAG_TSYNC);
}

/* A program that does nothing any more but exit. */
static void end_in_a_sandbox(void)
{
	static struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(*filter), filter };

	registered_often(pd, memory, BYTES);
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
	exit(3);
}

static void end_without_files(void)
{
	struct rlimit limit = { 0, 0 };

	registered_often(pd, memory, BYTES);
	CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
	exit(4);
}

static void end_elsewhere(void)
{
	char path[] = "/tmp/surroundings.XXXXXX";

	registered_often(pd, memory, BYTES);
	CHECK(mkdtemp(path) && !chroot(path) && !chdir("/"));
	CHECK(!setgid(1000) && !setuid(1000));
	exit(5);
}

/* What a library does when the process exits must be what the program may do by then. */
static void ends(void)
{
	begin();
	memory = map(BYTES);
	in_a_child("in a sandbox", end_in_a_sandbox);
	in_a_child("without files", end_without_files);
	in_a_child("elsewhere", end_elsewhere);
}

/* Started under a filter, as in a container, it adds a deadly one. */
static void in_the_container(void)
{
	begin();
	memory = map(BYTES);
	register_in_a_sandbox();
}

static void kept_in_the_container(void)
{
	begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	register_in_a_sandbox();
}

static void begin_again(const char *name)
{
	static struct sock_filter filter[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
	struct sock_fprog program = { 1, filter };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
	execl("/proc/self/exe", "surroundings", name, NULL);
	CHECK(!"executed");
}

static void container_first(void) { begin_again("in_the_container"); }
static void container_later(void) { begin_again("kept_in_the_container"); }

static void deadly_sandbox_in_a_container(void)
{
	in_a_child("before any registration", container_first);
	in_a_child("after the first kept", container_later);
}

/* --- users and limits --------------------------------------------------------------------------- */

/* All threads of the process become another user's. */
static void becomes_another_user(void)
{
	struct ibv_context *context = begin();
	char path[64], line[256];
	DIR *tasks;
	int others = 0;

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("setgid %d setuid %d", setgid(1000), setuid(1000));
	CHECK((tasks = opendir("/proc/self/task")));
	for (struct dirent *entry; (entry = readdir(tasks));) {
		FILE *file;

		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%.20s/status", entry->d_name);
		CHECK((file = fopen(path, "r")));
		while (fgets(line, sizeof(line), file))
			others += !strncmp(line, "Uid:", 4) && strcmp(line, "Uid:\t1000\t1000\t1000\t1000\n");
		fclose(file);
	}
	closedir(tasks);
	SAY("threads of another user: %d", others);
	registered_often(pd, memory, BYTES);
	munmap(memory, BYTES);
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	end(context);
}

static const struct {
	const char *name;
	int which;
	rlim_t limit;
} lowered[] = {
	{ "addresses", RLIMIT_AS, 64 << 20 }, { "data", RLIMIT_DATA, 24 << 20 }, { "threads", RLIMIT_NPROC, 1 },
	{ "pinned", RLIMIT_MEMLOCK, 192 << 10 }, { "stack", RLIMIT_STACK, 64 << 10 },
	{ "file size", RLIMIT_FSIZE, 0 }, { "signals", RLIMIT_SIGPENDING, 0 }, { "priority", RLIMIT_NICE, 0 },
};

static size_t limit_at_hand;

static void under_a_limit(void)
{
	struct rlimit limit = { lowered[limit_at_hand].limit, lowered[limit_at_hand].limit };
	int i, failures = 0, blocks = 0;
	struct ibv_context *context;
	struct ibv_mr *mr;

	if (lowered[limit_at_hand].which == RLIMIT_MEMLOCK || lowered[limit_at_hand].which == RLIMIT_NPROC)
		CHECK(!setgid(1000) && !setuid(1000));
	CHECK(!setrlimit(lowered[limit_at_hand].which, &limit));
	context = begin();
	memory = map(BYTES);
	for (i = 0; i < 12; i++) {
		/* Each of these leaves nothing behind that the program has. */
		mr = ibv_reg_mr(pd, memory + i % 3 * 4096, BYTES / 2, LOCAL);
		failures += !mr || ibv_dereg_mr(mr);
		mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);
		failures += !mr || ibv_dereg_mr(mr);
		if (i % 4 == 3) {
			munmap(memory, BYTES);
			memory = map(BYTES);
		}
	}
	while (blocks < 64 && malloc(4 << 20))
		blocks++;
	fprintf(stderr, "%s: %d blocks\n", lowered[limit_at_hand].name, blocks);
	/* The library may take less than 4 MiB, which is one of them: 14 alone under the limit of addresses, and 13. */
	SAY("%d failures, blocks %d", failures, (blocks + 1) / 2);
	end(context);
}

static void lowered_limits(void)
{
	for (limit_at_hand = 0; limit_at_hand < sizeof(lowered) / sizeof(*lowered); limit_at_hand++)
		in_a_child(lowered[limit_at_hand].name, under_a_limit);
}

/* What is left of a limited address space when registrations have come and gone: to 16 MiB. */
static void address_space_left(void)
{
	struct ibv_context *context = begin();
	struct rlimit limit = { (status_of("VmSize:") << 10) + (200 << 20), RLIM_INFINITY };
	int i, blocks = 0;

	CHECK(!setrlimit(RLIMIT_AS, &limit));
	for (i = 0; i < 5; i++) {
		memory = map(BYTES);
		registered_often(pd, memory, BYTES);
		munmap(memory, BYTES);
		await_pinned_kib(0);
	}
	while (mmap(NULL, 16 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED)
		blocks++;
	SAY("%d blocks", blocks);
	end(context);
}

/* A program that is executed has what it would have. */
static void executes_another(void)
{
	struct ibv_context *context = begin();
	int status;
	pid_t child;

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK((child = fork()) >= 0);
	if (!child) {
		execl("/bin/bash", "bash", "-c", "ls /proc/self/fd | wc -l; cat < /dev/null; echo $?", NULL);
		_exit(127);
	}
	CHECK(waitpid(child, &status, 0) == child);
	SAY("status %d", status);
	end(context);
}

/* --- numbers of files --------------------------------------------------------------------------- */

/* Sends what memory holds to `sink`, and says whether it arrived. */
static void sent(struct loop *loop, char *sink, struct ibv_mr *target, int pattern)
{
	struct ibv_mr *mr;

	memset(memory, pattern, BYTES);
	CHECK((mr = ibv_reg_mr(loop->pd, memory, BYTES, LOCAL)));
	SAY("%s", in_words(loop_move(loop, IBV_WR_RDMA_WRITE, mr, memory, BYTES, sink, target->rkey)));
	SAY("arrived %d", !memcmp(memory, sink, BYTES));
	CHECK(!ibv_dereg_mr(mr));
}

/* Closes every number that it does not know, as daemons do, and has files of its own get them. */
static void numbers_used_again(void)
{
	struct loop loop = loop_open();
	struct rlimit limit = { 2048, 2048 };
	struct ibv_mr *target;
	char *sink = map(BYTES);
	int round, number, others = 0;

	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	for (round = 0; round < 3; round++) {
		registered_often(loop.pd, memory, BYTES);
		for (number = 3; number < 2048; number++)
			if (number != loop.context->cmd_fd && number != loop.context->async_fd)
				close(number);
		while ((number = open("/dev/null", O_RDWR)) >= 0)
			others++;
		sent(&loop, sink, target, 'a' + round);
		CHECK(!munmap(memory, BYTES));
		memory = map(BYTES);
		sent(&loop, sink, target, 'k' + round);
		CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
		sent(&loop, sink, target, 'u' + round);
	}
	SAY("files of its own %d", others);
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
}

/* A file of its own has the number of standard error when nothing can be kept: no descriptor is left. */
static void standard_error_is_a_file(void)
{
	struct ibv_context *context = begin();
	char path[] = "/tmp/surroundings.XXXXXX", text[64] = "";
	int file = mkstemp(path), before = dup(2);
	struct rlimit limit = { before + 1, before + 1 };

	CHECK(file >= 0 && before >= 0 && dup2(file, 2) == 2);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("in the file: %zd %s", pread(file, text, sizeof(text) - 1, 0), text);
	SAY("dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("close %d", ibv_close_device(context));
	CHECK(dup2(before, 2) == 2 && !close(before) && !unlink(path));
}

/* Standard error is a pipe without a reader: a write to it ends the process by a signal. */
static void no_reader_of_standard_error(void)
{
	struct ibv_context *context = begin();
	int ends[2], next;
	struct rlimit limit;

	CHECK(!pipe(ends) && dup2(ends[1], 2) == 2 && !close(ends[0]) && !close(ends[1]));
	CHECK((next = dup(0)) >= 0 && !close(next));
	limit = (struct rlimit){ next, next };
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("goes on");
	end(context);
	_exit(0);
}

/* --- forks, exits, errors ----------------------------------------------------------------------- */

static int at_forks[3];

static void count_fork(int which)
{
	char *own = map(BYTES);

	registered_often(pd, own, BYTES);
	munmap(own, BYTES);
	at_forks[which]++;
}

static void before_fork(void) { count_fork(0); }
static void after_fork(void) { count_fork(1); }

static volatile int is_over;

static void *churns(void *argument)
{
	char *own = map(BYTES);

	while (!is_over) {
		registered_often(pd, own, BYTES);
		madvise(own, BYTES, MADV_DONTNEED);
	}
	munmap(own, BYTES);
	return argument;
}

/* Children by fork and vfork while threads register, and handlers of forks that register. */
static void forks_in_a_storm(void)
{
	struct ibv_context *context = begin();
	pthread_t threads[2];
	int i, status, well = 0;

	memory = map(BYTES);
	CHECK(!pthread_atfork(before_fork, after_fork, NULL));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&threads[i], NULL, churns, NULL));
	for (i = 0; i < 24; i++) {
		pid_t child = i % 2 ? vfork() : fork();

		CHECK(child >= 0);
		if (!child && i % 4 == 0) {
			struct loop own = loop_open();

			registered_often(own.pd, memory, BYTES);
			loop_close(&own);
			_exit(0);
		}
		if (!child) {
			execl("/bin/true", "true", NULL);
			_exit(127);
		}
		registered_often(pd, memory, BYTES);
		CHECK(waitpid(child, &status, 0) == child);
		well += !status;
	}
	is_over = 1;
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(threads[i], NULL));
	SAY("%d ended well, handlers %d %d", well, at_forks[0], at_forks[1]);
	end(context);
}

static struct ibv_context *until_the_end;

static void at_the_end(void)
{
	registered_often(pd, memory, BYTES);
	munmap(memory, BYTES);
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	end(until_the_end);
}

/* Registers while it exits, also where the first that is kept is then. */
static void begins_at_the_end(void)
{
	until_the_end = begin();
	memory = map(BYTES);
	CHECK(!atexit(at_the_end));
	exit(7);
}

static void goes_on_at_the_end(void)
{
	until_the_end = begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK(!on_exit((void (*)(int, void *))at_the_end, NULL));
	exit(7);
}

static void registers_at_the_end(void)
{
	in_a_child("begins at the end", begins_at_the_end);
	in_a_child("goes on at the end", goes_on_at_the_end);
}

/* What calls that succeed leave in errno, and what those that fail do. */
static void error_numbers(void)
{
	struct ibv_context *context = begin();
	struct ibv_mr *mr;
	int i, after[4];

	memory = map(BYTES);
	for (i = 0; i < 6; i++) {
		errno = 77;
		CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
		after[0] = errno;
		errno = 78;
		CHECK(!ibv_dereg_mr(mr));
		after[1] = errno;
		if (i == 3)
			CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
		errno = 79;
		CHECK(!mprotect(memory, BYTES, i % 2 ? PROT_READ | PROT_WRITE : PROT_READ));
		after[2] = errno;
		errno = 80;
		mr = ibv_reg_mr(pd, (void *)4096, BYTES, LOCAL);
		after[3] = errno;
		SAY("%d %d %d, %d %d", after[0], after[1], after[2], !!mr, after[3]);
		CHECK(!mprotect(memory, BYTES, PROT_READ | PROT_WRITE));
	}
	errno = 81;
	CHECK(!ibv_dealloc_pd(pd));
	SAY("%d", errno);
	CHECK(!ibv_close_device(context));
}

/* --- the process -------------------------------------------------------------------------------- */

static char *others_memory;
static volatile sig_atomic_t handled;

/* What a handler may do to memory, on the least stack that there may be. */
static void change_memory(int unused)
{
	int before = errno;

	(void)unused;
	mprotect(others_memory, 4096, handled % 2 ? PROT_READ | PROT_WRITE : PROT_READ);
	madvise(others_memory + 4096, 4096, MADV_DONTNEED);
	madvise(others_memory + 8192, 4096, 102 /* MADV_GUARD_INSTALL */);
	handled++;
	errno = before;
}

static void small_stacks_of_handlers(void)
{
	struct ibv_context *context = begin();
	size_t bytes = sysconf(_SC_MINSIGSTKSZ) + 1024;
	stack_t stack = { .ss_sp = malloc(bytes), .ss_size = bytes };
	struct sigaction action = { .sa_handler = change_memory, .sa_flags = SA_ONSTACK | SA_RESTART };
	struct itimerval timer = { { 0, 3000 }, { 0, 3000 } };
	int i;

	others_memory = map(3 * 4096);
	memory = map(BYTES);
	CHECK(stack.ss_sp && !sigaltstack(&stack, NULL) && !sigaction(SIGALRM, &action, NULL));
	registered_often(pd, others_memory, 3 * 4096);
	/* The first call of a function is the dynamic linker's, which needs more. */
	change_memory(SIGALRM);
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	for (i = 0; i < 100; i++)
		registered_often(pd, memory + i % 8 * 4096, BYTES / 2);
	timer = (struct itimerval){ 0 };
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	SAY("handled %d", handled > 0);
	end(context);
}

static void registered_and_mapped_anew(void)
{
	int i;

	for (i = 0; i < 4; i++) {
		memory = map(BYTES);
		registered_often(pd, memory, BYTES);
		munmap(memory, BYTES);
	}
}

/* Memory that may not become executable, code that may be where it is. */
static void hardened(void)
{
	struct ibv_context *context;

	prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0);
	personality(ADDR_NO_RANDOMIZE);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	context = begin();
	registered_and_mapped_anew();
	end(context);
}

/* Every page stays in memory, from now on and also what is mapped later. */
static void locked(void)
{
	struct ibv_context *context;

	CHECK(!mlockall(MCL_CURRENT | MCL_FUTURE));
	context = begin();
	registered_and_mapped_anew();
	end(context);
}

/* The same, once something was kept. */
static void locked_later(void)
{
	struct ibv_context *context = begin();

	registered_and_mapped_anew();
	CHECK(!mlockall(MCL_CURRENT | MCL_FUTURE));
	registered_and_mapped_anew();
	await_pinned_kib(0);
	end(context);
}

/* Without /proc and /dev, before anything is kept and after. */
static void another_root(void)
{
	struct ibv_context *context = begin();
	char path[] = "/tmp/surroundings.XXXXXX";

	memory = map(BYTES);
	CHECK(mkdtemp(path) && !chroot(path) && !chdir("/"));
	registered_often(pd, memory, BYTES);
	munmap(memory, BYTES);
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("close %d", ibv_close_device(context));
	_exit(0);
}

static void another_root_later(void)
{
	begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK(!ibv_dealloc_pd(pd));
	another_root();
}

static void other_roots(void)
{
	in_a_child("another root", another_root);
	in_a_child("another root later", another_root_later);
}

/* --- verbs -------------------------------------------------------------------------------------- */

/* As many as a program may have. The argument says how many, for machines that are slow. */
static long number_of_registrations = 2000;

static void many_registrations(void)
{
	long count = number_of_registrations, i, failures = 0, keys = 0;
	struct ibv_mr **all = calloc(count, sizeof(*all));
	struct ibv_context *context = begin();
	uint32_t before = 0;
	int round;

	memory = map(64 * 4096);
	for (round = 0; round < 2; round++) {
		for (i = 0; i < count; i++) {
			CHECK((all[i] = ibv_reg_mr(pd, memory + i % 64 * 4096, 4096 - i / 64 % 4000, LOCAL)));
			keys += all[i]->lkey != before;
			before = all[i]->lkey;
		}
		SAY("busy %d", ibv_dealloc_pd(pd));
		for (i = 0; i < count; i++)
			failures += ibv_dereg_mr(all[i * 7919 % count]) != 0;
	}
	SAY("%ld failures, %ld keys", failures, keys);
	end(context);
	free(all);
}

static enum ibv_wc_status bound(struct loop *loop, struct ibv_mw *window, struct ibv_mr *mr, uint32_t rkey)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	int polled;

	wr.bind_mw.mw = window;
	wr.bind_mw.rkey = rkey;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)mr->addr, mr->length,
							  IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	if (ibv_post_send(loop->qp, &wr, &bad))
		return IBV_WC_GENERAL_ERR;
	while (!(polled = ibv_poll_cq(loop->cq, 1, &wc)))
		;
	return polled == 1 ? wc.status : IBV_WC_GENERAL_ERR;
}

/* A window over a region: bound, used, unbound; its region and its domain are busy meanwhile. */
static void windows_in_use(void)
{
	struct loop loop = loop_open();
	struct ibv_mr *target, *mr;
	struct ibv_mw *window;
	char *sink = map(BYTES);
	uint32_t rkey;

	memory = map(BYTES);
	registered_often(loop.pd, memory, BYTES);
	registered_often(loop.pd, sink, BYTES);
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE | IBV_ACCESS_MW_BIND)));
	window = ibv_alloc_mw(loop.pd, IBV_MW_TYPE_2);
	SAY("window %d", !!window);
	if (window) {
		rkey = ibv_inc_rkey(window->rkey);
		SAY("bound: %s", ibv_wc_status_str(bound(&loop, window, target, rkey)));
		CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		SAY("through it: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 4096, sink, rkey)));
		SAY("arrived %d", !memcmp(memory, sink, 4096));
		SAY("busy %d", ibv_dealloc_pd(loop.pd));
		SAY("dereg %d", ibv_dereg_mr(mr));
		SAY("dealloc_mw %d", ibv_dealloc_mw(window));
	}
	SAY("dereg %d", ibv_dereg_mr(target));
	loop_close(&loop);
}

static uint32_t digest(const void *start, size_t bytes)
{
	const unsigned char *byte = start;
	uint32_t sum = 2166136261u;

	while (bytes--)
		sum = (sum ^ *byte++) * 16777619u;
	return sum;
}

/* What every query says, and what it writes. */
static void every_query(void)
{
	struct loop loop = loop_open();
	struct ibv_device_attr device = { 0 };
	struct ibv_device_attr_ex extended = { 0 };
	struct ibv_port_attr port = { 0 };
	struct ibv_qp_attr attr = { 0 };
	struct ibv_qp_init_attr init = { 0 };
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq_attr srq_attr = { 0 };
	struct ibv_gid_entry entry = { 0 }, table[16] = { { { { 0 } }, 0, 0, 0, 0 } };
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_ece ece = { 0 };
	struct ibv_srq *srq;
	union ibv_gid gid = { { 0 } };
	__be16 pkey = 0;
	int i;

	pd = loop.pd;
	memory = map(BYTES);
	for (i = 0; i < 3; i++) {
		registered_often(pd, memory + i * 4096, BYTES / 2);
		SAY("device %d %x", ibv_query_device(loop.context, &device), digest(&device, sizeof(device)));
		SAY("device_ex %d %x", ibv_query_device_ex(loop.context, NULL, &extended),
		    digest(&extended.orig_attr, sizeof(extended.orig_attr)));
		SAY("port %d %x", ibv_query_port(loop.context, 1, &port), digest(&port, sizeof(port)));
		SAY("port 77 %d", ibv_query_port(loop.context, 77, &port));
		SAY("gid %d %x", ibv_query_gid(loop.context, 1, 1, &gid), digest(&gid, sizeof(gid)));
		SAY("gid_ex %d %x", ibv_query_gid_ex(loop.context, 1, 1, &entry, 0), digest(&entry, sizeof(entry)));
		SAY("gid_table %zd %x", ibv_query_gid_table(loop.context, table, 16, 0), digest(table, sizeof(table)));
		SAY("pkey %d %x", ibv_query_pkey(loop.context, 1, 0, &pkey), pkey);
		SAY("qp %d %d", ibv_query_qp(loop.qp, &attr, IBV_QP_STATE | IBV_QP_CAP | IBV_QP_PKEY_INDEX, &init),
		    attr.qp_state);
		SAY("qp %x %x", digest(&attr.cap, sizeof(attr.cap)), digest(&init.cap, sizeof(init.cap)));
		SAY("ece %d", ibv_query_ece(loop.qp, &ece));
		SAY("in order %d", ibv_query_qp_data_in_order(loop.qp, IBV_WR_RDMA_WRITE, 0));
		SAY("values %d", ibv_query_rt_values_ex(loop.context, &values));
		CHECK((srq = ibv_create_srq(pd, &srq_init)));
		SAY("srq %d %u", ibv_query_srq(srq, &srq_attr), srq_attr.max_sge);
		CHECK(!ibv_destroy_srq(srq));
	}
	loop_close(&loop);
}

static const struct a_case cases[] = {
	{ "static_thread_storage", static_thread_storage },
	{ "plugins", plugins },
	{ "signal_storm", signal_storm },
	{ "deadly_sandbox_first", deadly_sandbox_first },
	{ "deadly_sandbox_later", deadly_sandbox_later },
	{ "deadly_sandbox_for_all", deadly_sandbox_for_all },
	{ "deadly_sandbox_in_a_container", deadly_sandbox_in_a_container },
	{ "in_the_container", in_the_container },
	{ "kept_in_the_container", kept_in_the_container },
	{ "ends", ends },
	{ "becomes_another_user", becomes_another_user },
	{ "lowered_limits", lowered_limits },
	{ "address_space_left", address_space_left },
	{ "executes_another", executes_another },
	{ "many_registrations", many_registrations },
	{ "windows_in_use", windows_in_use },
	{ "every_query", every_query },
	{ "numbers_used_again", numbers_used_again },
	{ "standard_error_is_a_file", standard_error_is_a_file },
	{ "no_reader_of_standard_error", no_reader_of_standard_error },
	{ "forks_in_a_storm", forks_in_a_storm },
	{ "registers_at_the_end", registers_at_the_end },
	{ "error_numbers", error_numbers },
	{ "small_stacks_of_handlers", small_stacks_of_handlers },
	{ "hardened", hardened },
	{ "locked", locked },
	{ "locked_later", locked_later },
	{ "other_roots", other_roots },
};

int main(int argc, char **argv)
{
	if (argc > 2)
		number_of_registrations = atol(argv[2]);
	return run_case(cases, sizeof(cases) / sizeof(*cases), argc, argv);
}
