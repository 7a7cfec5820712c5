/*
 * A program that registers and deregisters around every transfer, as one does that knows no cache.
 *
 *   reuse [BYTES [MESSAGES]]
 *
 * Sends MESSAGES of BYTES from one buffer, then as many from one registration, then measures what
 * registering a buffer costs: the first time, at once again, and once more after another buffer's
 * turn; in many rounds, each with fresh memory. Prints one JSON object; times are medians.
 */

#include "loop.h"

enum { ROUNDS = 41 };

static int by_value(const void *a, const void *b)
{
	double left = *(const double *)a, right = *(const double *)b;

	return (left > right) - (left < right);
}

static double median(double *values, int count)
{
	qsort(values, count, sizeof(*values), by_value);
	return values[count / 2];
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

static void send(struct loop *loop, struct ibv_mr *mr, char *source, size_t bytes, struct ibv_mr *target)
{
	CHECK(loop_move(loop, IBV_WR_RDMA_WRITE, mr, source, bytes, target->addr, target->rkey) == IBV_WC_SUCCESS);
}

int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 0) : 65536;
	int messages = argc > 2 ? atoi(argv[2]) : 200;
	double first[ROUNDS], second[ROUNDS], later[ROUNDS], first_end[ROUNDS], later_end[ROUNDS], unused;
	double *each = calloc(messages, sizeof(*each)), *steady = calloc(messages, sizeof(*steady));
	struct loop loop = loop_open();
	char *source = map(bytes), *sink = map(bytes);
	struct ibv_mr *target, *mr;
	int wrong = 0, i;

	CHECK(messages > 0 && each && steady);
	target = ibv_reg_mr(loop.pd, sink, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(target);
	for (i = 0; i < messages; i++) {
		double start;

		memset(source, i, bytes);
		start = now_us();
		CHECK((mr = ibv_reg_mr(loop.pd, source, bytes, IBV_ACCESS_LOCAL_WRITE)));
		send(&loop, mr, source, bytes, target);
		CHECK(!ibv_dereg_mr(mr));
		each[i] = now_us() - start;
		wrong += memcmp(source, sink, bytes) != 0;
	}
	CHECK((mr = ibv_reg_mr(loop.pd, source, bytes, IBV_ACCESS_LOCAL_WRITE)));
	for (i = 0; i < messages; i++) {
		double start = now_us();

		send(&loop, mr, source, bytes, target);
		steady[i] = now_us() - start;
	}
	CHECK(!ibv_dereg_mr(mr));
	for (i = 0; i < ROUNDS; i++) {
		char *fresh = map(bytes);

		first[i] = timed_registration(loop.pd, fresh, bytes, &first_end[i]);
		second[i] = timed_registration(loop.pd, fresh, bytes, &unused);
		timed_registration(loop.pd, source, bytes, &unused);
		later[i] = timed_registration(loop.pd, fresh, bytes, &later_end[i]);
		munmap(fresh, bytes);
	}
	printf("{\"bytes\": %zu, \"messages\": %d, \"wrong\": %d, \"message_us\": %.1f, \"steady_us\": %.1f, "
	       "\"first_us\": %.2f, \"second_us\": %.2f, \"later_us\": %.2f, \"first_end_us\": %.2f, "
	       "\"later_end_us\": %.2f}\n",
	       bytes, messages, wrong, median(each, messages), median(steady, messages),
	       median(first, ROUNDS), median(second, ROUNDS), median(later, ROUNDS),
	       median(first_end, ROUNDS), median(later_end, ROUNDS));
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
	return wrong != 0;
}
