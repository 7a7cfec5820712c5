/* A library whose constructor has a thread register, and waits for it: the thread that loads it holds the dynamic linker's
 * lock meanwhile. */

#include "verbs.h"
#include <pthread.h>
#include <stdlib.h>

static char memory[64 << 10] __attribute__((aligned(4096)));

static void *registers(void *unused)
{
	struct ibv_pd *pd = ibv_alloc_pd(ibv_open_device(NULL));

	for (int i = 0; i < 4; i++)
		if (ibv_dereg_mr(ibv_reg_mr(pd, memory, sizeof(memory), 1)))
			abort();
	return unused;
}

__attribute__((constructor)) static void construct(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, registers, NULL) || pthread_join(thread, NULL))
		abort();
}
