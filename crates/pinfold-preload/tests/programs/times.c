/*
 * What things cost in a process in which a registration is kept: nanoseconds for each, on standard output.
 *
 *   times CELL
 *
 * The first registration that is kept, which starts a monitor, is in the cell `first_kept` and no other.
 */

#include "cases.h"
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { RANGES = 256 };

static struct ibv_context *context;
static char *memory, *other;

static void registered(struct ibv_pd *domain, char *start, size_t bytes)
{
	struct ibv_mr *mr = ibv_reg_mr(domain, start, bytes, LOCAL);

	CHECK(mr && !ibv_dereg_mr(mr));
}

/* Bytes that were never registered before, and never are again. */
static void registered_once(int i)
{
	registered(pd, memory + i % 1024 * 4096, 1 + i / 1024 * 7 + BYTES);
}

static void registered_again(int i)
{
	(void)i;
	registered(pd, other, BYTES);
}

static void fresh_memory(int i)
{
	char *own = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)i;
	CHECK(own != MAP_FAILED);
	own[0] = 1;
	registered(pd, own, BYTES);
	CHECK(!munmap(own, BYTES));
}

/* The same bytes, discarded in between: nothing is ever found. */
static void discarded_memory(int i)
{
	(void)i;
	registered(pd, memory, BYTES);
	CHECK(!madvise(memory, BYTES, MADV_DONTNEED));
}

static void from_the_heap(int i)
{
	char *own = malloc(8000 + i % 64 * 512);

	CHECK(own);
	registered(pd, own, 8000);
	free(own);
}

static void own_domain(int i)
{
	struct ibv_pd *own = ibv_alloc_pd(context);
	int k;

	(void)i;
	CHECK(own);
	for (k = 0; k < 16; k++)
		registered(own, memory + k % 4 * BYTES, BYTES);
	CHECK(!ibv_dealloc_pd(own));
}

/* A domain that ends with many registrations idle in it, each of which was used three times. */
static void domain_of_many(int i)
{
	struct ibv_pd *own = ibv_alloc_pd(context);
	int k;

	(void)i;
	CHECK(own);
	for (k = 0; k < 3 * RANGES; k++)
		registered(own, memory + k % RANGES * 4096, 4096);
	CHECK(!ibv_dealloc_pd(own));
}

static void many_live(int i)
{
	static struct ibv_mr *all[RANGES];
	int k;

	(void)i;
	for (k = 0; k < RANGES; k++)
		CHECK((all[k] = ibv_reg_mr(pd, memory + k * 4096, 4096, LOCAL)));
	for (k = 0; k < RANGES; k++)
		CHECK(!ibv_dereg_mr(all[k * 7 % RANGES]));
}

/* Memory of which nothing was ever registered. */
static void mapped_elsewhere(int i)
{
	char *own = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)i;
	CHECK(own != MAP_FAILED);
	own[0] = 1;
	CHECK(!munmap(own, BYTES));
}

static void discarded_elsewhere(int i)
{
	static char *own;

	(void)i;
	if (!own) {
		mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		own = map(BYTES);
	}
	own[0] = 1;
	CHECK(!madvise(own, BYTES, MADV_DONTNEED));
}

static void protected_elsewhere(int i)
{
	static char *own;

	if (!own)
		own = map(BYTES);
	CHECK(!mprotect(own, BYTES, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE));
}

static void system_call(int i)
{
	(void)i;
	CHECK(syscall(SYS_getppid) >= 0);
}

static void *nothing(void *unused)
{
	return unused;
}

static void thread(int i)
{
	pthread_t thread;

	(void)i;
	CHECK(!pthread_create(&thread, NULL, nothing, NULL) && !pthread_join(thread, NULL));
}

static void child(int i)
{
	pid_t child = fork();

	(void)i;
	CHECK(child >= 0);
	if (!child)
		_exit(0);
	CHECK(waitpid(child, NULL, 0) == child);
}

/* A program that does nothing: what loading a library into it costs. */
static void execution(int i)
{
	pid_t child = fork();

	(void)i;
	CHECK(child >= 0);
	if (!child) {
		execl("/bin/true", "true", NULL);
		_exit(127);
	}
	CHECK(waitpid(child, NULL, 0) == child);
}

static void first_kept(int i)
{
	(void)i;
	registered_often(pd, other, BYTES);
}

static void *sleeps(void *unused)
{
	for (;;)
		pause();
	return unused;
}

/* What is before the clock starts: nothing, a registration that is kept and idle, one that was and whose memory has
 * gone; a thread of the program's own besides. */
enum { NOTHING_KEPT, IDLE, GONE, ITS_OWN_THREAD = 4 };

static const struct {
	const char *name;
	void (*run)(int);
	int times, before;
} cells[] = {
	{ "registered_once", registered_once, 1500, IDLE }, { "registered_again", registered_again, 1500, IDLE },
	{ "fresh_memory", fresh_memory, 800, IDLE }, { "discarded_memory", discarded_memory, 800, IDLE },
	{ "from_the_heap", from_the_heap, 1500, IDLE }, { "own_domain", own_domain, 60, IDLE },
	{ "domain_of_many", domain_of_many, 8, IDLE }, { "many_live", many_live, 8, IDLE }, { "mapped_elsewhere", mapped_elsewhere, 4000, IDLE },
	{ "discarded_elsewhere", discarded_elsewhere, 4000, IDLE }, { "protected_elsewhere", protected_elsewhere, 8000, IDLE },
	{ "system_call", system_call, 40000, IDLE }, { "thread", thread, 300, IDLE },
	{ "child", child, 100, GONE | ITS_OWN_THREAD }, { "child_beside_idle", child, 100, IDLE | ITS_OWN_THREAD },
	{ "child_of_one_thread", child, 100, GONE }, { "first_kept", first_kept, 1, NOTHING_KEPT },
	{ "execution", execution, 8, NOTHING_KEPT },
};

int main(int argc, char **argv)
{
	pthread_t own_thread;
	size_t i;
	int k;

	for (i = 0; argc > 1 && i < sizeof(cells) / sizeof(*cells); i++) {
		double start;

		if (strcmp(argv[1], cells[i].name))
			continue;
		/* Which pages are huge depends on addresses that are random. */
		CHECK(!prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0));
		context = begin();
		other = map(BYTES);
		/* A neighbour that it does not become one mapping with. */
		mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memory = map((1024 + 64) * 4096);
		if (cells[i].before & ITS_OWN_THREAD)
			CHECK(!pthread_create(&own_thread, NULL, sleeps, NULL));
		if (cells[i].before != NOTHING_KEPT)
			registered_often(pd, other, BYTES);
		if (cells[i].before & GONE) {
			CHECK(!munmap(other, BYTES));
			await_pinned_kib(0);
		}
		for (k = 0; k < cells[i].times / 4; k++)
			cells[i].run(k);
		start = now_us();
		for (; k < cells[i].times + cells[i].times / 4; k++)
			cells[i].run(k);
		printf("%.0f\n", (now_us() - start) * 1000 / cells[i].times);
		return 0;
	}
	for (i = 0; argc < 2 && i < sizeof(cells) / sizeof(*cells); i++)
		puts(cells[i].name);
	return argc < 2 ? 0 : 2;
}
