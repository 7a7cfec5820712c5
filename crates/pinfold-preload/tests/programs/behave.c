/*
 * What libibverbs says and does, line by line: the lines must be the same with and without Pinfold.
 *
 *   behave CASE...       every case if none is named
 */

#include "loop.h"
#include <pthread.h>
#include <sys/wait.h>

enum { BYTES = 64 << 10 };

#define LOCAL IBV_ACCESS_LOCAL_WRITE
#define REMOTE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

#define SAY(...) (printf(__VA_ARGS__), putchar('\n'), fflush(stdout))

/* Registered before main, in a constructor. */
static struct loop early;
static struct ibv_mr *early_mr;
static char *early_memory;

__attribute__((constructor)) static void before_main(void)
{
	if (!getenv("BEHAVE_EARLY"))
		return;
	early = loop_open();
	early_memory = map(BYTES);
	early_mr = ibv_reg_mr(early.pd, early_memory, BYTES, LOCAL);
	CHECK(early_mr);
}

/* One message through a loop of its own region to a region of ours; whether it arrived. */
static int arrives(struct loop *loop, const struct ibv_mr *mr, char *from, size_t bytes)
{
	char *sink = map(bytes);
	struct ibv_mr *target = ibv_reg_mr(loop->pd, sink, bytes, REMOTE);
	enum ibv_wc_status status;
	int same;

	CHECK(target);
	memset(from, rand(), bytes);
	status = loop_move(loop, IBV_WR_RDMA_WRITE, mr, from, bytes, sink, target->rkey);
	same = !memcmp(from, sink, bytes);
	CHECK(!ibv_dereg_mr(target));
	munmap(sink, bytes);
	return status == IBV_WC_SUCCESS && same;
}

static void early_case(void)
{
	char *self[] = { "/proc/self/exe", "early", NULL };

	if (!early_mr) {
		pid_t child = fork();
		int status;

		CHECK(child >= 0);
		if (!child) {
			setenv("BEHAVE_EARLY", "1", 1);
			execv(self[0], self);
			_exit(127);
		}
		CHECK(waitpid(child, &status, 0) == child);
		SAY("early: exit status %d", WEXITSTATUS(status));
		return;
	}
	SAY("early: %s", arrives(&early, early_mr, early_memory, BYTES) ? "arrives" : "lost");
	CHECK(!ibv_dereg_mr(early_mr));
	loop_close(&early);
}

static void fields(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES);
	struct ibv_mr *mr = ibv_reg_mr(loop.pd, memory + 100, 1000, LOCAL), *again;

	CHECK(mr);
	SAY("fields: pd %d context %d addr %td length %zu", mr->pd == loop.pd,
	    mr->context == loop.context, (char *)mr->addr - memory, mr->length);
	again = ibv_reg_mr(loop.pd, memory + 100, 1000, LOCAL);
	CHECK(again);
	SAY("fields: the same again is %s structure", again == mr ? "the same" : "another");
	SAY("fields: dereg %d", ibv_dereg_mr(mr));
	SAY("fields: the other one %s", arrives(&loop, again, memory + 100, 1000) ? "works" : "fails");
	SAY("fields: dereg %d", ibv_dereg_mr(again));
	munmap(memory, BYTES);
	loop_close(&loop);
}

static void busy(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = map(BYTES);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);

	CHECK(mr);
	SAY("busy: dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("busy: dereg %d", ibv_dereg_mr(mr));
	SAY("busy: dealloc_pd %d", ibv_dealloc_pd(pd));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("busy: in a new domain, pd %d", mr->pd == pd);
	SAY("busy: dereg %d", ibv_dereg_mr(mr));
	SAY("busy: dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("busy: close %d", ibv_close_device(context));
	munmap(memory, BYTES);
}

static void refused(struct ibv_pd *pd, const char *what, void *memory, size_t bytes, int access)
{
	struct ibv_mr *mr;

	errno = 0;
	mr = ibv_reg_mr(pd, memory, bytes, access);
	SAY("errors: %s: %s %d", what, mr ? "registered" : "refused", errno);
	if (mr)
		SAY("errors: %s: dereg %d", what, ibv_dereg_mr(mr));
}

static void errors(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = map(BYTES), *gone = map(BYTES), *hole = map(3 * BYTES), *fresh = map(BYTES);

	munmap(gone, BYTES);
	munmap(hole + BYTES, BYTES);
	refused(pd, "all is well", memory, BYTES, LOCAL);
	refused(pd, "all is well again", memory, BYTES, LOCAL);
	refused(pd, "unmapped", gone, BYTES, LOCAL);
	refused(pd, "a hole", hole, 3 * BYTES, LOCAL);
	refused(pd, "no bytes", memory, 0, LOCAL);
	refused(pd, "null", NULL, BYTES, LOCAL);
	refused(pd, "the kernel's", (void *)0xffff800000000000, BYTES, LOCAL);
	refused(pd, "wraps", memory, (size_t)-1, LOCAL);
	refused(pd, "remote write without local", memory, BYTES, IBV_ACCESS_REMOTE_WRITE);
	refused(pd, "unknown rights", memory, BYTES, LOCAL | 1 << 15);
	refused(pd, "windows", memory, BYTES, LOCAL | IBV_ACCESS_MW_BIND);
	refused(pd, "relaxed", memory, BYTES, LOCAL | IBV_ACCESS_RELAXED_ORDERING);
	refused(pd, "on demand", memory, BYTES, LOCAL | IBV_ACCESS_ON_DEMAND);
	CHECK(!mprotect(fresh, BYTES, PROT_READ));
	refused(pd, "read-only, to write", fresh, BYTES, LOCAL);
	refused(pd, "read-only, to read", fresh, BYTES, 0);
	munmap(fresh, BYTES);
	CHECK(mmap(fresh, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == fresh);
	refused(pd, "no access", fresh, BYTES, 0);
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	munmap(fresh, BYTES);
	munmap(memory, BYTES);
}

static void rights(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES), *sink = map(BYTES), *page = map(4096);
	struct ibv_mr *mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL);
	struct ibv_mr *target = ibv_reg_mr(loop.pd, sink + 64, 4096, REMOTE);
	struct ibv_mr *reader = ibv_reg_mr(loop.pd, page, 4096, 0);

	CHECK(mr && target && reader);
	SAY("rights: in bounds: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 4096, sink + 64, target->rkey)));
	SAY("rights: sent from memory to read: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, reader, page, 4096, sink + 64, target->rkey)));
	SAY("rights: a byte behind: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 4096, sink + 65, target->rkey)));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(target) && !ibv_dereg_mr(reader));
	loop_close(&loop);

	loop = loop_open();
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, LOCAL)));
	SAY("rights: remotely into local memory: %s", in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, 4096, sink, target->rkey)));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(target));
	loop_close(&loop);

	loop = loop_open();
	CHECK((reader = ibv_reg_mr(loop.pd, page, 4096, 0)));
	CHECK((target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE)));
	SAY("rights: read into memory to read: %s", in_words(loop_move(&loop, IBV_WR_RDMA_READ, reader, page, 4096, sink, target->rkey)));
	CHECK(!ibv_dereg_mr(reader) && !ibv_dereg_mr(target));
	loop_close(&loop);
	munmap(memory, BYTES);
	munmap(sink, BYTES);
	munmap(page, 4096);
}

static void iova(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES), *sink = map(BYTES);
	struct ibv_mr *target = ibv_reg_mr(loop.pd, sink, BYTES, REMOTE);
	int offset;

	CHECK(target);
	for (offset = 0; offset < 2; offset++) {
		uint64_t start = offset ? 1 << 20 : (uintptr_t)memory;
		struct ibv_mr *mr = ibv_reg_mr_iova(loop.pd, memory, BYTES, start, LOCAL);

		CHECK(mr);
		memset(memory, offset + 7, BYTES);
		SAY("iova: %s addr %d: %s", offset ? "elsewhere" : "in place", mr->addr == memory,
		    in_words(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, (void *)start, BYTES, sink, target->rkey)));
		SAY("iova: the bytes %s", memcmp(memory, sink, BYTES) ? "differ" : "are there");
		SAY("iova: dereg %d", ibv_dereg_mr(mr));
	}
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
	munmap(memory, BYTES);
	munmap(sink, BYTES);
}

static void rereg(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES), *other = map(BYTES);
	struct ibv_mr *mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL);
	int status;

	CHECK(mr);
	errno = 0;
	status = ibv_rereg_mr(mr, 1 << 7, NULL, NULL, 0, 0);
	SAY("rereg: no such flag: %d errno %d", status, errno);
	SAY("rereg: still %s", arrives(&loop, mr, memory, BYTES) ? "works" : "fails");
	errno = 0;
	status = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, BYTES / 2, 0);
	SAY("rereg: elsewhere: %d errno %d addr %d length %zu", status, errno,
	    mr->addr == (status ? memory : other), mr->length);
	SAY("rereg: now %s", arrives(&loop, mr, mr->addr, mr->length) ? "works" : "fails");
	status = ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, REMOTE);
	SAY("rereg: other rights: %d", status);
	SAY("rereg: now %s", arrives(&loop, mr, mr->addr, mr->length) ? "works" : "fails");
	SAY("rereg: dereg %d", ibv_dereg_mr(mr));
	loop_close(&loop);
	munmap(memory, BYTES);
	munmap(other, BYTES);
}

static void forks(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES);
	struct ibv_mr *mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL);
	pid_t child;
	int status;

	CHECK(mr && !ibv_dereg_mr(mr));
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct loop own = loop_open();

		memset(memory, 3, BYTES);
		CHECK((mr = ibv_reg_mr(own.pd, memory, BYTES, LOCAL)));
		status = !arrives(&own, mr, memory, BYTES);
		CHECK(!ibv_dereg_mr(mr));
		CHECK((mr = ibv_reg_mr(own.pd, memory, BYTES, LOCAL)));
		status += !arrives(&own, mr, memory, BYTES);
		CHECK(!ibv_dereg_mr(mr));
		loop_close(&own);
		exit(status);
	}
	CHECK(waitpid(child, &status, 0) == child);
	SAY("forks: the child's messages %s", status ? "are lost" : "arrive");
	SAY("forks: the parent's %s", arrives(&loop, mr, memory, BYTES) ? "arrive" : "are lost");
	SAY("forks: dereg %d", ibv_dereg_mr(mr));
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	SAY("forks: once more %s", arrives(&loop, mr, memory, BYTES) ? "arrive" : "are lost");
	SAY("forks: dereg %d", ibv_dereg_mr(mr));
	munmap(memory, BYTES);
	loop_close(&loop);
}

/* A child uses what its parent had registered and given back, however the kernel copies. */
static void fork_init(void)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (!child) {
		struct loop loop;
		struct ibv_mr *mr;
		char *memory;

		status = ibv_fork_init();
		SAY("fork_init: %d", status);
		loop = loop_open();
		memory = map(BYTES);
		CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
		SAY("fork_init: %s", arrives(&loop, mr, memory, BYTES) ? "arrives" : "lost");
		CHECK(!ibv_dereg_mr(mr));
		child = fork();
		if (!child) {
			memset(memory, 1, BYTES);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		SAY("fork_init: a child with the memory ends with %d", status);
		loop_close(&loop);
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	SAY("fork_init: %d", status);
}

struct worker {
	struct ibv_pd *pd;
	char *memory;
	int failures;
};

static void *register_often(void *argument)
{
	struct worker *worker = argument;
	unsigned seed = (uintptr_t)worker;
	int i;

	for (i = 0; i < 300; i++) {
		size_t start = rand_r(&seed) % BYTES, bytes = 1 + rand_r(&seed) % (BYTES - start);
		struct ibv_mr *mr = ibv_reg_mr(worker->pd, worker->memory + start, bytes, i % 3 ? LOCAL : 0);

		worker->failures += !mr || mr->addr != worker->memory + start || mr->length != bytes ||
				    ibv_dereg_mr(mr);
		if (i % 50 == 0)
			worker->failures += madvise(worker->memory, 4096, MADV_DONTNEED) != 0;
	}
	return NULL;
}

static void threads(void)
{
	struct loop loop = loop_open();
	char *memory = map(BYTES);
	struct worker workers[4];
	pthread_t ids[4];
	struct ibv_mr *mr;
	int failures = 0, i;

	for (i = 0; i < 4; i++) {
		workers[i] = (struct worker){ .pd = loop.pd, .memory = memory };
		CHECK(!pthread_create(&ids[i], NULL, register_often, &workers[i]));
	}
	for (i = 0; i < 4; i++) {
		CHECK(!pthread_join(ids[i], NULL));
		failures += workers[i].failures;
	}
	CHECK((mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL)));
	SAY("threads: %d failures, then %s", failures, arrives(&loop, mr, memory, BYTES) ? "arrives" : "lost");
	CHECK(!ibv_dereg_mr(mr));
	munmap(memory, BYTES);
	loop_close(&loop);
}

static long pinned_kib(void)
{
	char line[256];
	long kib = -1;
	FILE *file = fopen("/proc/self/status", "r");

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		sscanf(line, "VmPin: %ld", &kib);
	fclose(file);
	return kib;
}

static void close_case(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = map(BYTES), *other = map(BYTES);

	CHECK(ibv_reg_mr(pd, memory, BYTES, LOCAL));
	CHECK(ibv_reg_mr(pd, memory, BYTES, REMOTE));
	CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, other, BYTES, LOCAL)));
	SAY("close: with regions and a domain: %d", ibv_close_device(context));
	SAY("close: %ld KiB stay pinned", pinned_kib());
	munmap(memory, BYTES);
	munmap(other, BYTES);
	context = open_device();
	CHECK((pd = ibv_alloc_pd(context)));
	memory = map(BYTES);
	CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("close: opened again: dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("close: close %d", ibv_close_device(context));
	munmap(memory, BYTES);
}

/* Domains come and go, and their addresses come again. */
static void domains(void)
{
	struct ibv_context *context = open_device();
	char *memory = map(BYTES);
	int failures = 0, i;

	for (i = 0; i < 30; i++) {
		struct ibv_pd *pd = ibv_alloc_pd(context), *other = ibv_alloc_pd(context);
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);
		struct ibv_mr *second = ibv_reg_mr(other, memory, BYTES, LOCAL);

		CHECK(mr && second);
		failures += mr->pd != pd || second->pd != other || mr->lkey == second->lkey;
		failures += ibv_dereg_mr(mr) || ibv_dealloc_pd(pd) || ibv_dereg_mr(second) || ibv_dealloc_pd(other);
	}
	SAY("domains: %d failures", failures);
	SAY("domains: close %d", ibv_close_device(context));
	munmap(memory, BYTES);
}

/* More regions at a time than a program is expected to have. */
static void many(void)
{
	enum { MANY = 3000 };
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	char *memory = map((size_t)MANY * 4096);
	static struct ibv_mr *mrs[MANY];
	int failures = 0, i;

	for (i = 0; i < MANY; i++)
		CHECK((mrs[i] = ibv_reg_mr(pd, memory + (size_t)i * 4096, 4096, LOCAL)));
	SAY("many: dealloc_pd %d", ibv_dealloc_pd(pd));
	for (i = 0; i < MANY; i++)
		failures += mrs[i]->addr != memory + (size_t)i * 4096 || ibv_dereg_mr(mrs[i]);
	SAY("many: %d failures", failures);
	SAY("many: dealloc_pd %d", ibv_dealloc_pd(pd));
	SAY("many: close %d", ibv_close_device(context));
	munmap(memory, (size_t)MANY * 4096);
}

/* Memory that no monitor sees. */
static void shared(void)
{
	struct loop loop = loop_open();
	char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int i;

	CHECK(memory != MAP_FAILED);
	for (i = 0; i < 3; i++) {
		struct ibv_mr *mr = ibv_reg_mr(loop.pd, memory, BYTES, LOCAL);

		CHECK(mr);
		SAY("shared: %s", arrives(&loop, mr, memory, BYTES) ? "arrives" : "lost");
		SAY("shared: dereg %d", ibv_dereg_mr(mr));
	}
	munmap(memory, BYTES);
	loop_close(&loop);
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "early", early_case }, { "fields", fields }, { "busy", busy },       { "errors", errors },
	{ "rights", rights },    { "iova", iova },     { "rereg", rereg },     { "forks", forks },
	{ "fork_init", fork_init }, { "threads", threads }, { "close", close_case }, { "domains", domains },
	{ "many", many },        { "shared", shared },
};

int main(int argc, char **argv)
{
	size_t i;
	int j;

	/* Before anything is registered. */
	for (i = sizeof(cases) / sizeof(cases[0]); argc < 2 && i-- > 0;)
		if (!strcmp(cases[i].name, "fork_init"))
			cases[i].run();
	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int wanted = argc < 2 && strcmp(cases[i].name, "fork_init");

		for (j = 1; j < argc; j++)
			wanted |= !strcmp(argv[j], cases[i].name);
		if (wanted)
			cases[i].run();
	}
	return 0;
}
