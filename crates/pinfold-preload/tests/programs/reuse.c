/*
 * A program that registers and deregisters around every transfer, as one does that knows no cache.
 *
 *   reuse [BYTES [MESSAGES]]
 *
 * Sends MESSAGES of BYTES from one buffer, then measures what registering a buffer costs the first
 * and the second time, each time with fresh memory. Prints one JSON object.
 */

#include "loop.h"

enum { ROUNDS = 41 };

static int by_value(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double median(double *values)
{
	qsort(values, ROUNDS, sizeof(*values), by_value);
	return values[ROUNDS / 2];
}

static double timed_registration(struct ibv_pd *pd, char *buffer, size_t bytes, double *end)
{
	double start = now_us(), registered;
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, bytes, IBV_ACCESS_LOCAL_WRITE);

	registered = now_us();
	CHECK(mr);
	CHECK(!ibv_dereg_mr(mr));
	*end = now_us() - registered;
	return registered - start;
}

int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 0) : 65536;
	int messages = argc > 2 ? atoi(argv[2]) : 200;
	double first[ROUNDS], second[ROUNDS], first_end[ROUNDS], second_end[ROUNDS], start, seconds;
	struct loop loop = loop_open();
	char *source = map(bytes), *sink = map(bytes);
	struct ibv_mr *target, *mr;
	int wrong = 0, i;

	target = ibv_reg_mr(loop.pd, sink, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(target);
	start = now_us();
	for (i = 0; i < messages; i++) {
		memset(source, i, bytes);
		CHECK((mr = ibv_reg_mr(loop.pd, source, bytes, IBV_ACCESS_LOCAL_WRITE)));
		CHECK(loop_move(&loop, IBV_WR_RDMA_WRITE, mr, source, bytes, sink, target->rkey) == IBV_WC_SUCCESS);
		CHECK(!ibv_dereg_mr(mr));
		wrong += memcmp(source, sink, bytes) != 0;
	}
	seconds = (now_us() - start) / 1e6;
	for (i = 0; i < ROUNDS; i++) {
		char *fresh = map(bytes);

		first[i] = timed_registration(loop.pd, fresh, bytes, &first_end[i]);
		second[i] = timed_registration(loop.pd, fresh, bytes, &second_end[i]);
		munmap(fresh, bytes);
	}
	printf("{\"bytes\": %zu, \"messages\": %d, \"wrong\": %d, \"seconds\": %.3f, \"first_us\": %.2f, "
	       "\"second_us\": %.2f, \"first_end_us\": %.2f, \"second_end_us\": %.2f}\n",
	       bytes, messages, wrong, seconds, median(first), median(second), median(first_end),
	       median(second_end));
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
	return wrong != 0;
}
