/* A library with a libibverbs of its own, for programs that load it for itself alone. */

#include "verbs.h"
#include <stdlib.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

void opens_by_itself(void);
void opens_by_itself(void)
{
	context = ibv_open_device(NULL);
	pd = ibv_alloc_pd(context);
}

/* Without any, what it calls first ends the domain. */
int registers_by_itself(int times);
int registers_by_itself(int times)
{
	char *memory = aligned_alloc(4096, 64 << 10);
	int failures = times ? ibv_fork_init() : 0;

	for (int i = 0; i < times; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, 64 << 10, 1);

		failures += !mr || mr->addr != memory || !verbs_has(context->cmd_fd, mr->handle) || ibv_dereg_mr(mr);
	}
	return failures + ibv_dealloc_pd(pd) + ibv_close_device(context);
}
