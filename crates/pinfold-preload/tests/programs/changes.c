/*
 * What legal programs do to their memory, their domains and their processes while something is registered, or was: the
 * lines must be the same with and without a library in the process.
 *
 *   changes CASE
 *
 * Each case is a process of its own. What a machine may do differently each time goes to standard error.
 */

#include "cases.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>

static char *memory;

/* Where messages go: memory that stays, and its registration. */
static char *sink;
static struct ibv_mr *target;

static void open_sink(struct loop *loop)
{
	pd = loop->pd;
	sink = map(BYTES);
	CHECK((target = ibv_reg_mr(pd, sink, BYTES, REMOTE)));
}

static void close_sink(struct loop *loop)
{
	CHECK(!ibv_dereg_mr(target) && !munmap(sink, BYTES));
	loop_close(loop);
}

static void anew(char *start, size_t bytes)
{
	CHECK(mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start);
}

/* --- memory that others change ------------------------------------------------------------------ */

static void take_pages_away_in_a_child(int file)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (!child) {
		CHECK(file < 0 ? !madvise(memory, BYTES, MADV_REMOVE) : !ftruncate(file, 0) && !ftruncate(file, BYTES));
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && !status);
}

/* Memory that a child shares loses its pages there, between one use and the next. */
static void changed_by_a_child(void)
{
	static const char *kinds[] = { "shared", "a file, shared", "a file, private" };
	struct loop loop = loop_open();
	int file = memfd_create("changed", MFD_CLOEXEC), kind, i;

	CHECK(file >= 0 && !ftruncate(file, BYTES));
	open_sink(&loop);
	for (kind = 0; kind < 3; kind++) {
		int flags = kind == 2 ? MAP_PRIVATE : MAP_SHARED, stale = 0;

		memory = kind ? mmap(NULL, BYTES, PROT_READ | PROT_WRITE, flags, file, 0) :
				mmap(NULL, BYTES, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
		CHECK(memory != MAP_FAILED);
		for (i = 1; i < 12; i++) {
			struct ibv_mr *mr;

			memset(memory, i, BYTES);
			CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
			CHECK(!loop_move(&loop, IBV_WR_RDMA_WRITE, mr, memory, BYTES, sink, target->rkey));
			stale += !!memcmp(sink, memory, BYTES);
			CHECK(!ibv_dereg_mr(mr));
			take_pages_away_in_a_child(kind ? file : -1);
		}
		SAY("%s: %d stale", kinds[kind], stale);
		CHECK(!munmap(memory, BYTES));
	}
	close_sink(&loop);
}

/* A registration stays what it was when its memory has gone, and the next one has the new memory. */
static void changed_while_live(void)
{
	struct loop loop = loop_open();
	struct ibv_mr *old, *new;

	open_sink(&loop);
	memory = map(BYTES);
	registered_often(pd, memory, BYTES);
	memset(memory, 0x11, BYTES);
	CHECK((old = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	CHECK(!munmap(memory + BYTES / 2, BYTES / 2));
	anew(memory + BYTES / 2, BYTES / 2);
	memset(memory + BYTES / 2, 0x22, BYTES / 2);
	CHECK((new = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
	SAY("one key %d, one handle %d", old->lkey == new->lkey, old == new);
	CHECK(!loop_move(&loop, IBV_WR_RDMA_WRITE, old, memory, BYTES, sink, target->rkey));
	SAY("the old: %x %x", sink[0], sink[BYTES - 1]);
	CHECK(!loop_move(&loop, IBV_WR_RDMA_WRITE, new, memory, BYTES, sink, target->rkey));
	SAY("the new: %x %x", sink[0], sink[BYTES - 1]);
	SAY("dereg %d", ibv_dereg_mr(old));
	CHECK(!loop_move(&loop, IBV_WR_RDMA_WRITE, new, memory, BYTES, sink, target->rkey));
	SAY("the new: %x %x", sink[0], sink[BYTES - 1]);
	SAY("dereg %d", ibv_dereg_mr(new));
	close_sink(&loop);
}

/* --- threads ------------------------------------------------------------------------------------ */

enum { MOVERS = 3, ROUNDS = 40, HANDED_OVER = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { struct ibv_mr *mr; char *memory; } handed_over[HANDED_OVER];
static int waiting, movers_left;
static long stale, moves;

static int hand_over(struct ibv_mr *mr, char *own)
{
	int is_room;

	pthread_mutex_lock(&lock);
	if ((is_room = waiting < HANDED_OVER)) {
		handed_over[waiting].mr = mr;
		handed_over[waiting++].memory = own;
	}
	pthread_mutex_unlock(&lock);
	return is_room;
}

/* Ends what other threads registered, before the memory goes and behind it. */
static void *ends_registrations(void *unused)
{
	int is_last = 0, i;

	for (i = 0; !is_last; i++) {
		struct ibv_mr *mr = NULL;
		char *own = NULL;

		pthread_mutex_lock(&lock);
		if (waiting) {
			mr = handed_over[--waiting].mr;
			own = handed_over[waiting].memory;
		} else {
			is_last = !movers_left;
		}
		pthread_mutex_unlock(&lock);
		if (!mr) {
			sched_yield();
			continue;
		}
		if (i % 2)
			CHECK(!munmap(own, BYTES) && !ibv_dereg_mr(mr));
		else
			CHECK(!ibv_dereg_mr(mr) && !munmap(own, BYTES));
	}
	return unused;
}

/* Discards, maps over or moves memory of which a registration lives. */
static char *change(char *own, unsigned *seed)
{
	char *moved;

	switch (rand_r(seed) % 6) {
	case 0:
	case 1:
		CHECK(!madvise(own, BYTES, MADV_DONTNEED));
		break;
	case 2:
		anew(own + 8192, 16384);
		break;
	case 3:
		moved = mremap(own, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
		if (moved != MAP_FAILED) {
			CHECK(!munmap(own, BYTES));
			return moved;
		}
	}
	return own;
}

static void *moves_messages(void *argument)
{
	struct loop *loop = argument;
	char *own_sink = map(BYTES);
	struct ibv_mr *own_target = ibv_reg_mr(pd, own_sink, BYTES, REMOTE), *mr;
	unsigned seed = loop->qp->qp_num;
	int round, i;

	CHECK(own_target);
	for (round = 0; round < ROUNDS; round++) {
		char *own = map(BYTES);

		for (i = 0; i < 4; i++) {
			size_t offset = rand_r(&seed) % 40000, bytes = 1 + rand_r(&seed) % 20000;
			int differs;

			memset(own, rand_r(&seed), BYTES);
			/* What is registered again and again is found. */
			CHECK((mr = ibv_reg_mr(pd, own + offset % 4 * 4096, 20000, LOCAL)) && !ibv_dereg_mr(mr));
			CHECK((mr = ibv_reg_mr(pd, own + offset, bytes, LOCAL)));
			CHECK(!loop_move(loop, IBV_WR_RDMA_WRITE, mr, own + offset, bytes, own_sink, own_target->rkey));
			differs = !!memcmp(own_sink, own + offset, bytes);
			__atomic_add_fetch(&stale, differs, __ATOMIC_RELAXED);
			__atomic_add_fetch(&moves, 1, __ATOMIC_RELAXED);
			own = change(own, &seed);
			CHECK(!ibv_dereg_mr(mr));
		}
		CHECK((mr = ibv_reg_mr(pd, own, BYTES, LOCAL)));
		if (!hand_over(mr, own))
			CHECK(!ibv_dereg_mr(mr) && !munmap(own, BYTES));
	}
	CHECK(!ibv_dereg_mr(own_target) && !munmap(own_sink, BYTES));
	pthread_mutex_lock(&lock);
	movers_left--;
	pthread_mutex_unlock(&lock);
	return NULL;
}

/* Threads of one domain, each with memory that changes, and one that ends what the others registered. */
static void moved_by_threads(void)
{
	struct ibv_context *context = begin();
	struct loop loops[MOVERS];
	pthread_t threads[MOVERS + 1];
	int i;

	movers_left = MOVERS;
	for (i = 0; i < MOVERS; i++) {
		loops[i] = loop_in(context, pd);
		CHECK(!pthread_create(&threads[i], NULL, moves_messages, &loops[i]));
	}
	CHECK(!pthread_create(&threads[MOVERS], NULL, ends_registrations, NULL));
	for (i = 0; i <= MOVERS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	for (i = 0; i < MOVERS; i++)
		CHECK(!ibv_destroy_qp(loops[i].qp) && !ibv_destroy_cq(loops[i].cq));
	SAY("%ld of %ld stale", stale, moves);
	end(context);
}

static pthread_key_t key;
static pthread_barrier_t all_have_one;
static __thread int destroyed;

/* A destructor of thread-specific data ends a registration and makes another, as often as it is called again. */
static void destroy(void *mr)
{
	struct ibv_mr *next;

	if (ibv_dereg_mr(mr))
		SAY("dereg failed");
	if (++destroyed == 4)
		return;
	CHECK((next = ibv_reg_mr(pd, memory + destroyed * BYTES, BYTES, LOCAL)));
	CHECK(!pthread_setspecific(key, next));
}

static void *has_a_key(void *unused)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, BYTES, LOCAL);

	CHECK(mr && !pthread_setspecific(key, mr));
	/* The C library's allocator has as many arenas, of 64 MiB of addresses each, as threads ask it at one time. */
	pthread_barrier_wait(&all_have_one);
	return unused;
}

static void keys_of_threads(void)
{
	struct ibv_context *context = begin();
	pthread_t threads[4];
	int i, k;

	memory = map(4 * BYTES);
	CHECK(!pthread_key_create(&key, destroy) && !pthread_barrier_init(&all_have_one, NULL, 4));
	for (i = 0; i < 20; i++) {
		for (k = 0; k < 4; k++)
			CHECK(!pthread_create(&threads[k], NULL, has_a_key, NULL));
		for (k = 0; k < 4; k++)
			CHECK(!pthread_join(threads[k], NULL));
	}
	end(context);
}

/* --- processes, domains, devices ---------------------------------------------------------------- */

/* Each process opens the device for itself, registers, and forks the next. */
static void generations(void)
{
	enum { LAST = 8 };
	int generation, status = 0;

	memory = map(BYTES);
	for (generation = 0;; generation++) {
		struct ibv_context *context = begin();
		struct ibv_mr *mr;
		pid_t child = 0;

		memset(memory, generation, BYTES);
		registered_often(pd, memory, BYTES / 8);
		CHECK((mr = ibv_reg_mr(pd, memory, BYTES, LOCAL)));
		if (generation < LAST) {
			CHECK((child = fork()) >= 0);
			if (!child)
				continue;
			CHECK(waitpid(child, &status, 0) == child);
		}
		SAY("generation %d: status %d, dereg %d", generation, status, ibv_dereg_mr(mr));
		end(context);
		if (!generation)
			return;
		_exit(0);
	}
}

/* Devices are opened and closed, and the program leaves open in them what it likes. */
static void devices_again_and_again(void)
{
	int i, failures = 0;

	memory = map(16 * BYTES);
	for (i = 0; i < 60; i++) {
		struct ibv_context *context = open_device();
		struct ibv_pd *one = ibv_alloc_pd(context), *other = ibv_alloc_pd(context);
		struct ibv_mr *mr;

		CHECK(one && other);
		registered_often(one, memory + i % 16 * 4096, BYTES);
		CHECK((mr = ibv_reg_mr(other, memory, BYTES, LOCAL)));
		if (i % 3)
			CHECK(!ibv_dereg_mr(mr));
		if (i % 3 == 1)
			failures += ibv_dealloc_pd(one) || ibv_dealloc_pd(other);
		failures += !!ibv_close_device(context);
		if (i % 7 == 0)
			anew(memory, 16 * BYTES);
	}
	SAY("%d failures", failures);
}

/* Many domains, in little address space, of which the program wants most. */
static void domains_in_little_space(void)
{
	enum { MANY = 300 };
	static struct ibv_pd *domains[MANY];
	rlim_t left = (status_of("VmSize:") << 10) + (136 << 20);
	struct rlimit limit = { left, left };
	struct ibv_context *context = begin();
	int i, failures = 0;
	char *block;

	memory = map(BYTES);
	CHECK(!setrlimit(RLIMIT_AS, &limit));
	for (i = 0; i < MANY; i++) {
		CHECK((domains[i] = ibv_alloc_pd(context)));
		registered_often(domains[i], memory, BYTES);
	}
	SAY("100 MiB %s", (block = malloc(100 << 20)) ? "had" : "refused");
	free(block);
	CHECK(!munmap(memory, BYTES));
	for (i = 0; i < MANY; i++)
		failures += !!ibv_dealloc_pd(domains[i]);
	SAY("%d failures", failures);
	end(context);
}

/* --- mappings ----------------------------------------------------------------------------------- */

static long lines_of_maps(void)
{
	FILE *file = fopen("/proc/self/maps", "r");
	long lines = 0;
	int byte;

	CHECK(file);
	while ((byte = fgetc(file)) != EOF)
		lines += byte == '\n';
	fclose(file);
	return lines;
}

/* Every other page of a mapping is registered: it stays one mapping, and there is room for the program's own. */
static void many_mappings(void)
{
	enum { PAGES = 2048, OWN = 3000 };
	static struct ibv_mr *all[PAGES];
	struct ibv_context *context = begin();
	int i, round, failures = 0;

	memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(memory != MAP_FAILED && !madvise(memory, PAGES * 4096, MADV_NOHUGEPAGE));
	for (round = 0; round < 3; round++) {
		for (i = 0; i < PAGES; i += 2)
			CHECK((all[i] = ibv_reg_mr(pd, memory + i * 4096, 4096, LOCAL)));
		for (i = 0; i < PAGES && round < 2; i += 2)
			CHECK(!ibv_dereg_mr(all[i]));
	}
	fprintf(stderr, "used: mappings %ld\n", lines_of_maps());
	for (i = 0; i < OWN; i++) {
		char *own = mmap(NULL, 8192, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		failures += own == MAP_FAILED || mprotect(own, 4096, PROT_NONE);
	}
	SAY("%d failures, munmap %d", failures, munmap(memory, PAGES * 4096));
	for (i = 0; i < PAGES; i += 2)
		failures += !!ibv_dereg_mr(all[i]);
	SAY("%d failures", failures);
	end(context);
}

/* A program uses the whole pool: what is pinned of it when the program has given it back is missing there. */
static void huge_page_pool(void)
{
	enum { WANTED = 8, HUGE_PAGE = 2 << 20 };
	const char *pool = "/proc/sys/vm/nr_hugepages";
	int before = 0, pages = 0, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB;
	struct ibv_context *context = begin();
	FILE *file = fopen(pool, "r");
	size_t bytes;
	pid_t child;
	int i;

	CHECK(file && fscanf(file, "%d", &before) == 1 && !fclose(file));
	CHECK((file = fopen(pool, "w")) && fprintf(file, "%d\n", before + WANTED) > 0 && !fclose(file));
	CHECK((file = fopen(pool, "r")) && fscanf(file, "%d", &pages) == 1 && !fclose(file) && pages > 0);
	/* All that others have not reserved. */
	bytes = (size_t)pages * HUGE_PAGE;
	while (bytes && (memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0)) == MAP_FAILED)
		bytes -= HUGE_PAGE;
	CHECK(bytes && !munmap(memory, bytes));
	for (i = 0; i < 3; i++) {
		CHECK((memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0)) != MAP_FAILED);
		memset(memory, 1, bytes);
		registered_often(pd, memory, bytes);
		CHECK(!munmap(memory, bytes));
	}
	CHECK((memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0)) != MAP_FAILED);
	memset(memory, 2, bytes);
	registered_often(pd, memory, bytes);
	CHECK(!madvise(memory, bytes, MADV_DONTNEED));
	memset(memory, 3, bytes);
	registered_often(pd, memory, bytes);
	SAY("mapped over %d", mmap(memory, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0) == memory);
	memset(memory, 4, bytes);
	registered_often(pd, memory, bytes);
	fflush(stdout);
	if (!(child = fork()))
		_exit(0);
	SAY("fork %d", child > 0 && waitpid(child, NULL, 0) == child);
	CHECK(!munmap(memory, bytes) && (file = fopen(pool, "w")));
	CHECK(fprintf(file, "%d\n", before) > 0 && !fclose(file));
	end(context);
}

/* --- signal handlers ---------------------------------------------------------------------------- */

static volatile long handled;

static void map_anew(int unused)
{
	(void)unused;
	munmap(memory + 2 * BYTES, BYTES);
	anew(memory + 2 * BYTES, BYTES);
	handled++;
}

static void nothing(int unused)
{
	(void)unused;
	handled++;
}

/* Registrations that a handler comes in between of, which changes a part of what is registered, or interrupts calls. */
static void beside_a_handler(void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	struct itimerval timer = { { 0, 3000 }, { 0, 3000 } };
	struct ibv_context *context = begin();
	long i, failures = 0;

	memory = map(16 * BYTES);
	CHECK(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &timer, NULL));
	for (i = 0; i < 400; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory + i * 40960 % (11 * BYTES), 4 * BYTES, LOCAL);
		struct ibv_pd *own;

		failures += !mr || ibv_dereg_mr(mr);
		if (i % 50)
			continue;
		CHECK((own = ibv_alloc_pd(context)));
		registered_often(own, memory, 4 * BYTES);
		failures += !!ibv_dealloc_pd(own);
	}
	timer = (struct itimerval){ 0 };
	CHECK(!setitimer(ITIMER_REAL, &timer, NULL));
	fprintf(stderr, "handled %ld\n", handled);
	SAY("%ld failures", failures);
	end(context);
}

static void mapped_anew_in_a_handler(void) { beside_a_handler(map_anew, SA_RESTART); }
static void interrupted(void) { beside_a_handler(nothing, 0); }

static const struct a_case cases[] = {
	{ "changed_by_a_child", changed_by_a_child },
	{ "changed_while_live", changed_while_live },
	{ "moved_by_threads", moved_by_threads },
	{ "keys_of_threads", keys_of_threads },
	{ "generations", generations },
	{ "devices_again_and_again", devices_again_and_again },
	{ "domains_in_little_space", domains_in_little_space },
	{ "many_mappings", many_mappings },
	{ "huge_page_pool", huge_page_pool },
	{ "mapped_anew_in_a_handler", mapped_anew_in_a_handler },
	{ "interrupted", interrupted },
};

int main(int argc, char **argv)
{
	return run_case(cases, sizeof(cases) / sizeof(*cases), argc, argv);
}
