/*
 * What legal programs do that a library in their process may break: the lines must be the same with and
 * without it.
 *
 *   hostile CASE [ARGUMENT]
 *
 * Each case is a process of its own. What a machine may do differently each time (times, threads,
 * address space) goes to standard error.
 */

#include "cases.h"
#include "depth.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

/* --- cancellation ------------------------------------------------------------------------------- */

static char *memory;
static volatile int go;
static int how, done, answers[3];

static void note_cleanup(void *unused)
{
	(void)unused;
	SAY("cleaned up");
}

static void calls_of_verbs(void)
{
	struct ibv_pd *own = how == 2 ? ibv_alloc_pd(pd->context) : pd;
	struct ibv_mr *mr;

	if (how == 1)
		madvise(memory, BYTES, MADV_DONTNEED);
	mr = ibv_reg_mr(own, memory, BYTES, LOCAL);
	answers[0] = mr ? ibv_dereg_mr(mr) : -1;
	mr = ibv_reg_mr(own, memory, BYTES, LOCAL);
	answers[1] = mr ? ibv_dereg_mr(mr) : -1;
	answers[2] = own != pd ? ibv_dealloc_pd(own) : 0;
	done = 1;
}

/* A cancellation is pending from the first instruction on; nothing of verbs is a point for it, but writing
 * is. */
static void *pending(void *unused)
{
	pthread_cleanup_push(note_cleanup, unused);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	while (!go)
		sched_yield();
	pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
	calls_of_verbs();
	pthread_testcancel();
	SAY("not reached");
	pthread_cleanup_pop(0);
	return NULL;
}

static void cancelled_while_pending(void)
{
	pthread_t thread;
	void *result;

	for (how = 0; how < 4; how++) {
		struct ibv_context *context = begin();

		memory = map(BYTES);
		if (how != 3)
			registered_often(pd, memory, BYTES);
		go = done = 0;
		CHECK(!pthread_create(&thread, NULL, pending, NULL));
		CHECK(!pthread_cancel(thread));
		go = 1;
		CHECK(!pthread_join(thread, &result));
		SAY("way %d: cancelled %d, after the calls %d: %d %d %d", how, result == PTHREAD_CANCELED, done,
		    answers[0], answers[1], answers[2]);
		end(context);
		munmap(memory, BYTES);
	}
}

static void *churn(void *argument)
{
	int discards = *(int *)argument;

	for (;;) {
		char *own = map(BYTES);
		struct ibv_mr *mr;

		registered_often(pd, own, BYTES);
		CHECK((mr = ibv_reg_mr(pd, own, BYTES, LOCAL)));
		if (discards)
			madvise(own, BYTES, MADV_DONTNEED);
		CHECK(!ibv_dereg_mr(mr));
		munmap(own, BYTES);
		pthread_testcancel();
	}
	return NULL;
}

/* At any moment, asked for at a point where nothing is left behind. */
static void cancelled_in_the_middle(void)
{
	struct ibv_context *context = begin();
	int i, discards, ended = 0;

	for (i = 0; i < 40; i++) {
		pthread_t thread;
		void *result;

		discards = i % 2;
		CHECK(!pthread_create(&thread, NULL, churn, &discards));
		usleep(1000 * (i % 10));
		CHECK(!pthread_cancel(thread));
		CHECK(!pthread_join(thread, &result));
		ended += result == PTHREAD_CANCELED;
	}
	SAY("%d cancelled", ended);
	end(context);
}

/* --- fork --------------------------------------------------------------------------------------- */

/* The parent opens, the child cleans up, as daemons do; the parent only waits. */
static void cleaned_up_by_a_child(void)
{
	int live;

	for (live = 0; live < 2; live++) {
		struct ibv_context *context = begin();
		struct ibv_mr *mr = NULL;
		pid_t child;
		int status;

		memory = map(BYTES);
		registered_often(pd, memory, BYTES);
		if (live)
			CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
		CHECK((child = fork()) >= 0);
		if (!child) {
			if (mr)
				SAY("child: dereg %d", ibv_dereg_mr(mr));
			SAY("child: dealloc_pd %d", ibv_dealloc_pd(pd));
			SAY("child: close %d", ibv_close_device(context));
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		SAY("child: status %d", status);
		CHECK(!ibv_close_device(context));
		munmap(memory, BYTES);
	}
}

/* The parent's memory changes and it registers other memory, before the child cleans up what it inherited: the numbers
 * of what was idle are others' by then. */
static void cleaned_up_late_by_a_child(void)
{
	struct loop loop = loop_open();
	struct ibv_mr *target, *mr[8];
	char *sink = map(BYTES), byte;
	int ready[2], status, i;
	pid_t child;

	CHECK(!pipe(ready));
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	for (i = 0; i < 8; i++)
		registered_often(loop.pd, memory + i * BYTES / 8, BYTES / 8);
	CHECK((child = fork()) >= 0);
	if (!child) {
		CHECK(read(ready[0], &byte, 1) == 1);
		ibv_dealloc_pd(loop.pd);
		_exit(0);
	}
	CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
	/* A preload library that keeps registrations ends those in a thread of its own. */
	await_pinned_kib(BYTES >> 10);
	memset(memory, 7, BYTES);
	for (i = 0; i < 8; i++)
		CHECK((mr[i] = ibv_reg_mr(loop.pd, memory, BYTES, REMOTE)));
	CHECK(write(ready[1], "", 1) == 1 && waitpid(child, &status, 0) == child);
	SAY("child: status %d", status);
	for (i = 0; i < 8; i++) {
		memset(sink, i, BYTES);
		SAY("%s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr[i], memory, BYTES, sink, target->rkey)));
		SAY("arrived %d", !memcmp(memory, sink, BYTES));
		SAY("dereg %d", ibv_dereg_mr(mr[i]));
	}
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
}

/* A child ends the handles that it inherited when its parent has given them back, and a domain in between: what a preload
 * library has kept of them is gone then, by numbers that the parent's next registrations get. What else it keeps is not. */
static void a_child_ends_what_was_given_back(void)
{
	int turn;

	for (turn = 0; turn < 4; turn++) {
		struct loop loop = loop_open();
		char *sink = map(BYTES), *others = map(BYTES), *idle = map(BYTES), *kept[2], byte;
		int registers_others = turn & 1, ready[2], status, i;
		struct ibv_mr *target, *ended[2], *mr[8];
		struct ibv_pd *spare;
		pid_t child;

		CHECK(!pipe(ready));
		CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
		CHECK((spare = ibv_alloc_pd(loop.pd->context)));
		registered_often(loop.pd, idle, BYTES);
		for (i = 0; i < 2; i++) {
			kept[i] = map(BYTES);
			registered_often(loop.pd, kept[i], BYTES);
			CHECK((ended[i] = ibv_reg_mr(loop.pd, kept[i], BYTES, LOCAL)));
		}
		CHECK((child = fork()) >= 0);
		if (!child) {
			CHECK(read(ready[0], &byte, 1) == 1);
			ibv_dereg_mr(ended[0]);
			ibv_dealloc_pd(spare);
			ibv_dereg_mr(ended[1]);
			_exit(0);
		}
		CHECK(!ibv_dereg_mr(ended[0]) && !ibv_dereg_mr(ended[1]));
		CHECK(write(ready[1], "", 1) == 1 && waitpid(child, &status, 0) == child);
		SAY("child: status %d", status);
		/* What was ended before the domain, or behind it. */
		memory = kept[turn >> 1];
		for (i = 0; i < 8; i++)
			CHECK((mr[i] = registers_others ? ibv_reg_mr(loop.pd, others, BYTES, REMOTE) :
							  ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		if (registers_others) {
			CHECK(!munmap(memory, BYTES));
			/* A preload library that keeps registrations ends those of it in a thread of its own. */
			usleep(200000);
			memory = others;
		}
		for (i = 0; i < 8; i++) {
			memset(memory, 'a' + i, BYTES);
			SAY("%s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr[i], memory, BYTES, sink, target->rkey)));
			SAY("arrived %d", !memcmp(memory, sink, BYTES));
			SAY("dereg %d", ibv_dereg_mr(mr[i]));
		}
		CHECK(!ibv_dereg_mr(target));
		loop_close(&loop);
	}
}

/* A child ends nothing that its parent goes on with. */
static void fork_and_go_on(void)
{
	struct loop loop = loop_open();
	struct ibv_mr *target, *mr;
	char *sink = map(BYTES);
	pid_t child;
	int status, i;

	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	registered_often(loop.pd, memory, BYTES);
	for (i = 0; i < 3; i++) {
		CHECK((child = fork()) >= 0);
		if (!child)
			exit(0);
		CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		memset(memory, 'a' + i, BYTES);
		SAY("%s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, BYTES, sink, target->rkey)));
		SAY("arrived %d", !memcmp(memory, sink, BYTES));
		CHECK(waitpid(child, &status, 0) == child);
		SAY("dereg %d", ibv_dereg_mr(mr));
	}
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
}

/* Children leave what they have registered in their parent's domain, and a grandchild that was forked before cleans up
 * behind that, while the parent registers: the numbers of what a child had are the parent's by then. */
static void children_end_beside_their_parent(void)
{
	struct loop loop = loop_open();
	char *sink = map(BYTES), byte;
	struct ibv_mr *target, *mr[8];
	int status, round, i;

	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	for (round = 0; round < 4; round++) {
		int begun[2], over[2], rights = round < 2 ? REMOTE : LOCAL;
		pid_t child;

		CHECK(!pipe(begun) && !pipe(over) && (child = fork()) >= 0);
		if (!child) {
			char *own = map(BYTES);

			for (i = 0; i < 8; i++)
				registered_often(loop.pd, own + i * BYTES / 8, BYTES / 8);
			if (round % 2)
				CHECK(!munmap(own, BYTES / 2));
			CHECK((child = fork()) >= 0);
			if (child) {
				CHECK(write(begun[1], "", 1) == 1);
				exit(0);
			}
			close(over[1]);
			CHECK(!read(over[0], &byte, 1));
			ibv_dealloc_pd(loop.pd);
			CHECK(write(begun[1], "", 1) == 1);
			exit(0);
		}
		CHECK(read(begun[0], &byte, 1) == 1);
		for (i = 0; i < 4; i++)
			CHECK((mr[i] = ibv_reg_mr(loop.pd, memory, BYTES, rights)));
		CHECK(waitpid(child, &status, 0) == child);
		SAY("child: status %d", status);
		for (; i < 8; i++)
			CHECK((mr[i] = ibv_reg_mr(loop.pd, memory, BYTES, rights)));
		close(over[1]);
		CHECK(read(begun[0], &byte, 1) == 1);
		for (i = 0; i < 8; i++) {
			memset(sink, 16 * round + i, BYTES);
			SAY("%s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr[i], memory, BYTES, sink, target->rkey)));
			SAY("arrived %d", !memcmp(memory, sink, BYTES));
			SAY("dereg %d", ibv_dereg_mr(mr[i]));
		}
	}
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
}

/* A vfork child shares the memory, and execs. */
static void vforks(void)
{
	struct ibv_context *context = begin();
	int i, status, well = 0;

	memory = map(BYTES);
	for (i = 0; i < 5; i++) {
		pid_t child;

		registered_often(pd, memory, BYTES);
		child = vfork();
		if (!child) {
			execl("/bin/true", "true", NULL);
			_exit(127);
		}
		CHECK(waitpid(child, &status, 0) == child);
		well += !status;
	}
	SAY("%d ended well", well);
	end(context);
}

/* --- routes ------------------------------------------------------------------------------------- */

/* Registered through the link, deregistered through a handle of the dynamic linker. */
static void mixed_routes(void)
{
	struct loop loop = loop_open();
	void *handle = dlopen("libibverbs.so.1", RTLD_NOW);
	int (*dereg)(struct ibv_mr *) = (int (*)(struct ibv_mr *))dlsym(handle, "ibv_dereg_mr");
	void (*unimport)(struct ibv_mr *) = (void (*)(struct ibv_mr *))dlsym(handle, "ibv_unimport_mr");
	char *sink = map(BYTES), *other;
	struct ibv_mr *target, *first, *mr;
	int i;

	CHECK(handle && dereg && unimport);
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	for (i = 0; i < 4; i++) {
		registered_often(loop.pd, memory, BYTES);
		CHECK((first = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		SAY("by the handle %d", dereg(first));
		CHECK((other = malloc(15000)));
		memset(other, 0x5a, 15000);
		SAY("the other: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 100, sink, target->rkey)));
		SAY("by the link %d", ibv_dereg_mr(mr));
		CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		SAY("again: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 100, sink, target->rkey)));
		SAY("by the handle %d", dereg(mr));
		free(other);
	}
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	unimport(mr);
	CHECK((other = malloc(100)));
	free(other);
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	SAY("after unimport: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 100, sink, target->rkey)));
	SAY("by the link %d", ibv_dereg_mr(mr));
}

/* --- stacks ------------------------------------------------------------------------------------- */

static void *on_a_small_stack(void *unused)
{
	int i;

	(void)unused;
	for (i = 0; i < 40; i++) {
		registered_often(pd, memory + 4096 * i, 2 * 4096);
		if (i % 7 == 0)
			madvise(memory, 8 * 4096, MADV_DONTNEED);
	}
	return memory;
}

static void small_stacks(void)
{
	static const int sizes[] = { 16, 24, 64 };
	struct ibv_context *context = begin();
	size_t i;

	memory = map(1 << 20);
	for (i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		pthread_attr_t attributes;
		pthread_t thread;
		void *result = NULL;

		CHECK(!pthread_attr_init(&attributes));
		CHECK(!pthread_attr_setstacksize(&attributes, sizes[i] << 10));
		CHECK(!pthread_create(&thread, &attributes, on_a_small_stack, NULL));
		CHECK(!pthread_join(thread, &result));
		SAY("%d KiB: %d", sizes[i], result == memory);
	}
	end(context);
}

static void one_registration(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);

	CHECK(mr && !ibv_dereg_mr(mr));
}

static void one_of_a_peer(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, REMOTE);

	CHECK(mr && !ibv_dereg_mr(mr));
}

static void one_domain(void)
{
	struct ibv_pd *own = ibv_alloc_pd(pd->context);

	CHECK(own && !ibv_dealloc_pd(own));
}

/* The stack that calls need. */
static void stack_of_calls(void)
{
	static void (*const calls[])(void) = { one_registration, one_of_a_peer, one_domain };
	struct ibv_context *context = begin();
	size_t i, depth, most = 0;

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	for (i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
		depth = depth_of(calls[i]);
		fprintf(stderr, "stack of call %zu: %zu\n", i, depth);
		if (depth > most)
			most = depth;
	}
	fprintf(stderr, "used: stack %zu\n", most);
	end(context);
}

/* --- memory ------------------------------------------------------------------------------------- */

static const char *registration(char *start, int access)
{
	struct ibv_mr *mr;

	errno = 0;
	mr = ibv_reg_mr(pd, start, BYTES, access);
	if (!mr)
		return strerror(errno);
	CHECK(!ibv_dereg_mr(mr));
	return "registered";
}

/* A key of the processor's (x86-64): the memory stays readable and writable, and the thread may do neither. */
static void protected_by_a_key(void)
{
	int key = pkey_alloc(0, 0);

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK(!pkey_mprotect(memory, BYTES, PROT_NONE, -1));
	SAY("by pkey_mprotect: %s", registration(memory, 0));
	CHECK(!pkey_mprotect(memory, BYTES, PROT_READ | PROT_WRITE, -1));
	registered_often(pd, memory, BYTES);
	if (key < 0) {
		SAY("no keys here");
		return;
	}
	CHECK(!pkey_set(key, PKEY_DISABLE_ACCESS));
	CHECK(!pkey_mprotect(memory, BYTES, PROT_READ | PROT_WRITE, key));
	SAY("behind a key: %s", registration(memory, LOCAL));
	CHECK(!pkey_set(key, 0));
	SAY("allowed by it: %s", registration(memory, LOCAL));
	CHECK(!pkey_mprotect(memory, BYTES, PROT_READ | PROT_WRITE, 0) && !pkey_free(key));
}

/* What the program may not do with its memory, the device may not either. */
static void protected_memory(void)
{
	begin();
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK(!mprotect(memory, BYTES, PROT_NONE));
	SAY("no access, to write: %s", registration(memory, LOCAL));
	SAY("no access, to read: %s", registration(memory, 0));
	CHECK(!mprotect(memory, BYTES, PROT_READ));
	SAY("to read, to write: %s", registration(memory, LOCAL));
	SAY("to read, to read: %s", registration(memory, 0));
	CHECK(!mprotect(memory, BYTES, PROT_READ | PROT_WRITE));
	SAY("all, to write: %s", registration(memory, LOCAL));
	registered_often(pd, memory, BYTES);
	CHECK(!mprotect(memory + 4096, 4096, PROT_READ));
	SAY("a page in the middle: %s", registration(memory, LOCAL));
	protected_by_a_key();
}

/* Each handle is one registration, with keys and bounds of its own. */
static void keys_and_bounds(void)
{
	struct loop loop = loop_open();
	struct ibv_mr *target, *one, *other;
	char *sink = map(BYTES);

	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	registered_often(loop.pd, memory, 100);
	registered_often(loop.pd, memory + 200, 100);
	registered_often(loop.pd, memory, BYTES);
	CHECK((one = ibv_reg_mr(loop.pd, memory, 100, LOCAL)));
	CHECK((other = ibv_reg_mr(loop.pd, memory + 200, 100, LOCAL)));
	SAY("lkeys %d handles %d", one->lkey == other->lkey, one->handle == other->handle);
	SAY("within: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, other, memory + 200, 100, sink, target->rkey)));
	SAY("beyond: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, one, memory + 1000, 100, sink, target->rkey)));
	SAY("dereg %d %d", ibv_dereg_mr(one), ibv_dereg_mr(other));
}

static int own_userfaultfd(void)
{
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | 1);
	struct uffdio_api api = { .api = UFFD_API };

	CHECK(uffd >= 0 && !ioctl(uffd, UFFDIO_API, &api));
	return uffd;
}

static const char *watched(int uffd, void *start, size_t bytes, int mode)
{
	struct uffdio_register request = { .range = { (uintptr_t)start, bytes }, .mode = mode };

	return ioctl(uffd, UFFDIO_REGISTER, &request) ? strerror(errno) : "watched";
}

/* The program has a userfaultfd of its own. */
static void another_userfaultfd(void)
{
	struct loop loop = loop_open();
	int uffd = own_userfaultfd();
	struct ibv_mr *target, *mr;
	char *sink = map(BYTES);
	struct uffdio_range range;

	pd = loop.pd;
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("idle: %s", watched(uffd, memory, BYTES, UFFDIO_REGISTER_MODE_MISSING));
	SAY("idle, once more: %s", watched(uffd, memory, BYTES, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("live: %s", watched(uffd, memory, BYTES, UFFDIO_REGISTER_MODE_MISSING));
	CHECK(!ibv_dereg_mr(mr));
	registered_often(pd, memory, BYTES);
	range = (struct uffdio_range){ (uintptr_t)memory, BYTES };
	CHECK(!ioctl(uffd, UFFDIO_UNREGISTER, &range));
	CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
	memset(memory, 7, BYTES);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("discarded meanwhile: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, BYTES, sink, target->rkey)));
	SAY("arrived %d", !memcmp(memory, sink, BYTES));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(munmap(memory, BYTES) == 0);
}

/* What is sent from memory whose pages were replaced after its watch was ended, by one route or the other. */
static void ended_and_replaced(struct loop *loop, int uffd, int by_number, char *sink, struct ibv_mr *target)
{
	struct uffdio_range range = { 0, BYTES };
	struct ibv_mr *mr;

	memory = map(BYTES);
	range.start = (uintptr_t)memory;
	registered_often(pd, memory, BYTES);
	SAY("ended: %d", by_number ? (int)syscall(SYS_ioctl, uffd, UFFDIO_UNREGISTER, &range) :
				      ioctl(uffd, UFFDIO_UNREGISTER, &range));
	CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
	memset(memory, 7, BYTES);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("replaced: %s", in_words(loop_move(loop, IBV_WR_RDMA_WRITE, mr, memory, BYTES, sink, target->rkey)));
	SAY("arrived %d", !memcmp(memory, sink, BYTES));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(munmap(memory, BYTES) == 0);
}

/* The program ends its watch of everything that it has, and never watched some of it. */
static void ends_watches_of_others(void)
{
	struct loop loop = loop_open();
	int uffd = own_userfaultfd();
	char *sink = map(BYTES);
	struct ibv_mr *target;

	pd = loop.pd;
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	ended_and_replaced(&loop, uffd, 0, sink, target);
	ended_and_replaced(&loop, uffd, 1, sink, target);
	CHECK(ioctl(uffd, UFFDIO_UNREGISTER, (void *)1) == -1 && errno == EFAULT);
	CHECK(!ibv_dereg_mr(target));
}

/* --- the process -------------------------------------------------------------------------------- */

static const char *outcome(int result)
{
	return result ? strerror(errno) : "done";
}

/* What a process with threads, or with a shared file system structure, may not do. */
static void enters_namespaces(int is_kept)
{
	int mounts = open("/proc/self/ns/mnt", O_RDONLY), times = open("/proc/self/ns/time", O_RDONLY);
	struct ibv_mr *mr;

	begin();
	memory = map(BYTES);
	if (is_kept)
		registered_often(pd, memory, BYTES);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("setns of mounts: %s", outcome(setns(mounts, CLONE_NEWNS)));
	SAY("setns of times: %s", outcome(setns(times, 0)));
	SAY("unshare mounts: %s", outcome(unshare(CLONE_NEWNS)));
	SAY("unshare users: %s", outcome(unshare(CLONE_NEWUSER)));
	SAY("dereg %d", ibv_dereg_mr(mr));
}

static void namespaces(void) { enters_namespaces(0); }
static void namespaces_later(void) { enters_namespaces(1); }

/* Many domains, each used. What it costs goes to standard error. */
static void many_domains(void)
{
	enum { MANY = 200 };
	static struct ibv_pd *domains[MANY];
	struct ibv_context *context = begin();
	double start = now_us();
	long before = status_of("VmSize:");
	int i, failures = 0;

	memory = map(BYTES);
	for (i = 0; i < MANY; i++) {
		CHECK((domains[i] = ibv_alloc_pd(context)));
		registered_often(domains[i], memory, BYTES);
	}
	fprintf(stderr, "us %.0f threads %ld growth %ld\n", now_us() - start, status_of("Threads:"),
		status_of("VmSize:") - before);
	start = now_us();
	munmap(memory, BYTES);
	for (i = 0; i < MANY; i++)
		failures += ibv_dealloc_pd(domains[i]) != 0;
	fprintf(stderr, "end us %.0f threads %ld growth %ld\n", now_us() - start, status_of("Threads:"),
		status_of("VmSize:") - before);
	SAY("%d failures", failures);
	end(context);
}

/* Memory that is fresh for each use: nothing is ever found. */
static void fresh_memory(void)
{
	struct ibv_context *context = begin();
	double start = now_us();
	int i;

	for (i = 0; i < 300; i++) {
		struct ibv_mr *mr;

		memory = map(BYTES);
		CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)) && !ibv_dereg_mr(mr));
		munmap(memory, BYTES);
	}
	fprintf(stderr, "us %.0f each\n", (now_us() - start) / 300);
	SAY("more than three threads: %d", status_of("Threads:") > 3);
	end(context);
}

static void discard(int unused)
{
	int before = errno;

	(void)unused;
	madvise(memory + BYTES, BYTES, MADV_DONTNEED);
	errno = before;
}

/* A handler that discards part of what is registered, while domains come and go. */
static void discards_in_a_handler(void)
{
	struct sigaction action = { .sa_handler = discard, .sa_flags = SA_RESTART };
	struct itimerval timer = { { 0, 2000 }, { 0, 2000 } };
	struct ibv_context *context = begin();
	double start = now_us();
	int i, failures = 0;

	memory = map(8 * BYTES);
	CHECK(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &timer, NULL));
	for (i = 0; i < 60; i++) {
		struct ibv_pd *own = ibv_alloc_pd(context);

		CHECK(own);
		registered_often(own, memory, 4 * BYTES);
		registered_often(pd, memory + i % 4 * BYTES, 2 * BYTES);
		failures += ibv_dealloc_pd(own) != 0;
	}
	timer = (struct itimerval){ 0 };
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	fprintf(stderr, "us %.0f each\n", (now_us() - start) / 60);
	SAY("%d failures", failures);
	end(context);
}

/* A domain with many idle registrations ends. */
static void many_idle(void)
{
	enum { MANY = 3000 };
	static struct ibv_mr *all[MANY];
	struct ibv_context *context = begin();
	double start;
	int i, round, failures = 0;

	memory = map((size_t)MANY * 4096);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < MANY; i++)
			CHECK((all[i] = ibv_reg_mr(pd, memory + (size_t)i * 4096, 4096, LOCAL)));
		for (i = 0; i < MANY; i++)
			failures += ibv_dereg_mr(all[i * 7 % MANY]) != 0;
	}
	start = now_us();
	SAY("%d failures, dealloc_pd %d", failures, ibv_dealloc_pd(pd));
	fprintf(stderr, "us %.0f\n", now_us() - start);
	SAY("close %d", ibv_close_device(context));
}

/* What a program that registers twice and no more has, counted. */
static void footprint(void)
{
	struct ibv_context *context = begin();
	long size = status_of("VmSize:");
	int i;

	memory = map(BYTES);
	for (i = 0; i < 6; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);

		CHECK(mr && !ibv_dereg_mr(mr));
		if (i == 1)
			munmap(memory, BYTES), memory = map(BYTES);
		fprintf(stderr, "%d: threads %ld growth %ld\n", i, status_of("Threads:"), status_of("VmSize:") - size);
	}
	munmap(memory, BYTES);
	end(context);
}

/* One processor, a real-time caller, a busy thread of lower real-time priority. */
static void *spin(void *unused)
{
	while (!go)
		;
	return unused;
}

static int by_size(const void *a, const void *b)
{
	return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void real_time(void)
{
	enum { ROUNDS = 9 };
	struct sched_param high = { 10 }, low = { 5 };
	pthread_attr_t attributes;
	pthread_t thread;
	cpu_set_t one;
	double us[ROUNDS];
	int i;

	begin();
	memory = map(BYTES);
	CPU_ZERO(&one);
	CPU_SET(0, &one);
	CHECK(!sched_setaffinity(0, sizeof(one), &one));
	registered_often(pd, memory, BYTES);
	CHECK(!sched_setscheduler(0, SCHED_FIFO, &high));
	CHECK(!pthread_attr_init(&attributes));
	CHECK(!pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED));
	CHECK(!pthread_attr_setschedpolicy(&attributes, SCHED_FIFO));
	CHECK(!pthread_attr_setschedparam(&attributes, &low));
	CHECK(!pthread_create(&thread, &attributes, spin, NULL));
	usleep(1000);
	for (i = 0; i < ROUNDS; i++) {
		double start;

		memory = map(BYTES);
		registered_often(pd, memory, BYTES);
		start = now_us();
		CHECK(!munmap(memory, BYTES));
		us[i] = now_us() - start;
	}
	qsort(us, ROUNDS, sizeof(*us), by_size);
	fprintf(stderr, "used: munmap %.0f\n", us[ROUNDS / 2]);
	go = 1;
	CHECK(!pthread_join(thread, NULL));
	SAY("ended");
}

/* --- limits ------------------------------------------------------------------------------------- */

static void limited(int which, const char *name, rlim_t limit)
{
	struct rlimit lowered = { limit, limit };
	struct ibv_context *context = begin();
	char *block;

	memory = map(BYTES);
	CHECK(!setrlimit(which, &lowered));
	registered_often(pd, memory, BYTES);
	SAY("%s: 8 MiB %s", name, (block = malloc(8 << 20)) ? "had" : "refused");
	free(block);
	registered_often(pd, memory, BYTES);
	end(context);
}

/* Little address space: the program has what it needs. */
static void little_address_space(void)
{
	limited(RLIMIT_AS, "address space", (status_of("VmSize:") << 10) + (24 << 20));
}

/* No descriptor is left. */
static void no_descriptors(void)
{
	struct ibv_context *context = begin();
	int next = dup(0);

	limited(RLIMIT_NOFILE, "descriptors", next + 3);
	SAY("close %d", ibv_close_device(context));
}

/* A sandbox that refuses, with an error number, what a monitor is made of. */
static void sandboxed(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(*filter), filter };
	struct ibv_context *context = begin();

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	end(context);
}

/* --- the rest of verbs -------------------------------------------------------------------------- */

/* libibverbs comes and goes as a plugin's library does. */
static void loaded_and_unloaded(void)
{
	struct ibv_context *context = begin();
	int i;

	memory = map(BYTES);
	for (i = 0; i < 20; i++) {
		void *handle = dlopen("libibverbs.so.1", RTLD_NOW | (i % 2 ? RTLD_GLOBAL : RTLD_LOCAL));

		CHECK(handle);
		registered_often(pd, memory, BYTES);
		CHECK(!dlclose(handle));
	}
	registered_often(pd, memory, BYTES);
	end(context);
}

/* A region with a window holds its domain; one without does not. */
static void windows(void)
{
	struct ibv_context *context = begin();
	struct ibv_mr *mr;
	struct ibv_mw *window;

	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL | IBV_ACCESS_MW_BIND)));
	window = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	SAY("window %d", !!window);
	SAY("dealloc_pd %d", ibv_dealloc_pd(pd));
	if (window)
		SAY("dealloc_mw %d", ibv_dealloc_mw(window));
	SAY("dereg %d", ibv_dereg_mr(mr));
	end(context);
}

/* What the device says of itself. */
static void queries(void)
{
	struct loop loop = loop_open();
	struct ibv_device_attr device;
	struct ibv_device_attr_ex extended;
	struct ibv_port_attr port;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	union ibv_gid gid;
	uint16_t pkey;

	pd = loop.pd;
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	SAY("device %d", ibv_query_device(loop.context, &device));
	SAY("regions %d", device.max_mr);
	SAY("extended %d", ibv_query_device_ex(loop.context, NULL, &extended));
	SAY("port %d", ibv_query_port(loop.context, 1, &port));
	SAY("state %d", port.state);
	SAY("gid %d", ibv_query_gid(loop.context, 1, 1, &gid));
	SAY("pkey %d", ibv_query_pkey(loop.context, 1, 0, &pkey));
	SAY("%x", pkey);
	SAY("qp %d", ibv_query_qp(loop.qp, &attr, IBV_QP_STATE, &init));
	SAY("state %d", attr.qp_state);
	loop_close(&loop);
}

static const struct a_case cases[] = {
	{ "cancelled_while_pending", cancelled_while_pending },
	{ "cancelled_in_the_middle", cancelled_in_the_middle },
	{ "cleaned_up_by_a_child", cleaned_up_by_a_child },
	{ "cleaned_up_late_by_a_child", cleaned_up_late_by_a_child },
	{ "a_child_ends_what_was_given_back", a_child_ends_what_was_given_back },
	{ "fork_and_go_on", fork_and_go_on },
	{ "children_end_beside_their_parent", children_end_beside_their_parent },
	{ "vforks", vforks },
	{ "mixed_routes", mixed_routes },
	{ "small_stacks", small_stacks },
	{ "stack_of_calls", stack_of_calls },
	{ "protected_memory", protected_memory },
	{ "keys_and_bounds", keys_and_bounds },
	{ "another_userfaultfd", another_userfaultfd },
	{ "ends_watches_of_others", ends_watches_of_others },
	{ "namespaces", namespaces },
	{ "namespaces_later", namespaces_later },
	{ "many_domains", many_domains },
	{ "fresh_memory", fresh_memory },
	{ "discards_in_a_handler", discards_in_a_handler },
	{ "many_idle", many_idle },
	{ "footprint", footprint },
	{ "real_time", real_time },
	{ "little_address_space", little_address_space },
	{ "no_descriptors", no_descriptors },
	{ "sandboxed", sandboxed },
	{ "loaded_and_unloaded", loaded_and_unloaded },
	{ "windows", windows },
	{ "queries", queries },
};

int main(int argc, char **argv)
{
	return run_case(cases, sizeof(cases) / sizeof(*cases), argc, argv);
}
