/* A library with a libibverbs of its own, which it opens in a constructor and closes in a destructor. */

#include "verbs.h"
#include <stdlib.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

__attribute__((constructor)) static void opens(void)
{
	context = ibv_open_device(NULL);
	pd = ibv_alloc_pd(context);
}

__attribute__((destructor)) static void closes(void)
{
	if (ibv_dealloc_pd(pd) || ibv_close_device(context))
		abort();
}

int registers_in_between(void);
int registers_in_between(void)
{
	char *memory = aligned_alloc(4096, 64 << 10);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 64 << 10, 1);

	return !mr || ibv_dereg_mr(mr);
}
