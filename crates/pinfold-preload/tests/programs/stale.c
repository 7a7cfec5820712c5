/*
 * A program whose memory goes and comes between transfers; every byte that arrives is checked.
 *
 *   stale [MESSAGES [SEED [naive]]]
 *
 * With "naive" it keeps registrations by address itself and believes them, which is the bug that
 * caches have: that run must end with wrong messages. Prints one JSON object.
 */

#include "loop.h"
#include <malloc.h>

enum { BUFFERS = 8, LONGEST = 256 << 10, PAGE = 4096 };

static uint64_t state;

static uint32_t any(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 20) % below;
}

struct buffer {
	char *start;
	size_t bytes;
	int mapped;
	struct ibv_mr *kept;
};

static void make(struct buffer *buffer)
{
	buffer->bytes = PAGE * (1 + any(LONGEST / PAGE));
	buffer->mapped = any(4) != 0;
	buffer->start = buffer->mapped ? map(buffer->bytes) : malloc(buffer->bytes);
	CHECK(buffer->start);
}

static void end(struct buffer *buffer)
{
	if (buffer->mapped)
		munmap(buffer->start, buffer->bytes);
	else
		free(buffer->start);
}

/* Something that programs, allocators and libraries do to memory. */
static void change(struct buffer *buffer)
{
	size_t half = buffer->bytes / 2 / PAGE * PAGE;

	switch (any(buffer->mapped ? 6 : 1)) {
	case 0:
		end(buffer);
		malloc_trim(0);
		make(buffer);
		break;
	case 1:
		CHECK(mmap(buffer->start, buffer->bytes, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == buffer->start);
		break;
	case 2:
		CHECK(!madvise(buffer->start, buffer->bytes, MADV_DONTNEED));
		break;
	case 3:
		if (half)
			CHECK(!madvise(buffer->start + half, buffer->bytes - half, MADV_DONTNEED));
		break;
	case 4:
		buffer->start = mremap(buffer->start, buffer->bytes, buffer->bytes + PAGE, MREMAP_MAYMOVE);
		CHECK(buffer->start != MAP_FAILED);
		buffer->bytes += PAGE;
		break;
	case 5:
		if (half) {
			CHECK(!munmap(buffer->start + half, buffer->bytes - half));
			buffer->bytes = half;
		}
		break;
	}
}

static struct ibv_mr *registered(struct loop *loop, struct buffer *buffer, int naive)
{
	struct ibv_mr *kept = buffer->kept;

	if (naive && kept && kept->addr == buffer->start && kept->length >= buffer->bytes)
		return kept;
	if (naive && kept)
		CHECK(!ibv_dereg_mr(kept));
	kept = ibv_reg_mr(loop->pd, buffer->start, buffer->bytes, IBV_ACCESS_LOCAL_WRITE);
	CHECK(kept);
	buffer->kept = naive ? kept : NULL;
	return kept;
}

int main(int argc, char **argv)
{
	int messages = argc > 1 ? atoi(argv[1]) : 500, naive = argc > 3 && !strcmp(argv[3], "naive");
	unsigned long seed = argc > 2 ? strtoul(argv[2], NULL, 0) : 1;
	size_t longest = LONGEST + PAGE * (size_t)messages;
	struct loop loop = loop_open();
	struct buffer buffers[BUFFERS] = { 0 };
	char *sink = map(longest);
	struct ibv_mr *target;
	int wrong = 0, i;

	fprintf(stderr, "seed %lu\n", seed);
	state = seed * 0x9e3779b97f4a7c15u + 1;
	target = ibv_reg_mr(loop.pd, sink, longest,
			    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK(target);
	for (i = 0; i < BUFFERS; i++)
		make(&buffers[i]);
	for (i = 0; i < messages; i++) {
		struct buffer *buffer = &buffers[any(BUFFERS)];
		struct ibv_mr *mr;
		uint32_t bytes;
		int reads = any(2);

		if (any(2))
			change(buffer);
		mr = registered(&loop, buffer, naive);
		bytes = buffer->bytes;
		/* What is sent, and what must not be found where it arrives. */
		memset(reads ? sink : buffer->start, i, bytes);
		memset(reads ? buffer->start : sink, ~i, bytes);
		CHECK(loop_move(&loop, reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, mr, buffer->start,
				bytes, sink, target->rkey) == IBV_WC_SUCCESS);
		wrong += memcmp(buffer->start, sink, bytes) != 0;
		if (!naive)
			CHECK(!ibv_dereg_mr(mr));
	}
	printf("{\"messages\": %d, \"seed\": %lu, \"wrong\": %d}\n", messages, seed, wrong);
	for (i = 0; i < BUFFERS; i++) {
		if (buffers[i].kept)
			CHECK(!ibv_dereg_mr(buffers[i].kept));
		end(&buffers[i]);
	}
	CHECK(!ibv_dereg_mr(target));
	loop_close(&loop);
	return wrong != 0;
}
