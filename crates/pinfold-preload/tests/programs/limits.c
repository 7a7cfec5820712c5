/*
 * What happens at the limits, seen from the program.
 *
 *   limits memlock       registrations that only fit if what is idle makes room
 *   limits domains       two protection domains in turns, with room for the memory of one
 *   limits twice         a region deregistered twice (libibverbs itself would touch freed memory)
 *   limits unplugged     waits for a line on standard input while a region lives: the device may go
 */

#include "loop.h"

#define LOCAL IBV_ACCESS_LOCAL_WRITE

static void memlock(struct ibv_pd *pd)
{
	/* Of 8 MiB. */
	size_t bytes = 5 << 20;
	char *first = map(bytes), *second = map(bytes);
	struct ibv_mr *mr;
	int i;

	for (i = 0; i < 3; i++) {
		CHECK((mr = ibv_reg_mr(pd, first, bytes, LOCAL)));
		CHECK(!ibv_dereg_mr(mr));
		CHECK((mr = ibv_reg_mr(pd, second, bytes, LOCAL | (i ? IBV_ACCESS_REMOTE_WRITE : 0))));
		CHECK(!ibv_dereg_mr(mr));
	}
	CHECK((mr = ibv_reg_mr(pd, first, bytes, LOCAL)));
	errno = 0;
	CHECK(!ibv_reg_mr(pd, second, bytes, LOCAL));
	printf("memlock: another does not fit: %d\n", errno);
	CHECK(!ibv_dereg_mr(mr));
}

/* Of 8 MiB for all. */
static void domains(struct ibv_pd *one, struct ibv_pd *other)
{
	size_t bytes = 5 << 20;
	char *first = map(bytes), *second = map(bytes);
	struct ibv_mr *mr;
	int i;

	for (i = 0; i < 4; i++) {
		CHECK((mr = ibv_reg_mr(i % 2 ? other : one, i % 2 ? second : first, bytes, LOCAL)));
		CHECK(!ibv_dereg_mr(mr));
	}
	CHECK(!ibv_dealloc_pd(other));
}

static void twice(struct ibv_pd *pd)
{
	char *memory = map(4096);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 4096, LOCAL);

	CHECK(mr);
	printf("twice: %d\n", ibv_dereg_mr(mr));
	printf("twice: %d\n", ibv_dereg_mr(mr));
}

static void unplugged(struct ibv_pd *pd)
{
	char *memory = map(65536), line[8];
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 65536, LOCAL), *idle;

	CHECK(mr);
	CHECK((idle = ibv_reg_mr(pd, map(65536), 65536, LOCAL)));
	CHECK(!ibv_dereg_mr(idle));
	puts("unplugged: registered");
	fflush(stdout);
	CHECK(fgets(line, sizeof(line), stdin));
	printf("unplugged: dereg %d\n", ibv_dereg_mr(mr));
	errno = 0;
	mr = ibv_reg_mr(pd, memory, 65536, LOCAL);
	printf("unplugged: reg %s\n", mr ? "works" : "fails");
	munmap(memory, 65536);
}

int main(int argc, char **argv)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	const char *what = argc > 1 ? argv[1] : "";

	CHECK(pd);
	if (!strcmp(what, "memlock"))
		memlock(pd);
	else if (!strcmp(what, "domains"))
		domains(pd, ibv_alloc_pd(context));
	else if (!strcmp(what, "twice"))
		twice(pd);
	else if (!strcmp(what, "unplugged"))
		unplugged(pd);
	printf("dealloc_pd %d\n", ibv_dealloc_pd(pd));
	printf("close %d\n", ibv_close_device(context));
	return 0;
}
