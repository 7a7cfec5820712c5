/* A plugin that uses verbs and leaves nothing behind. */

#include "cases.h"

int use_verbs(void);

int use_verbs(void)
{
	struct ibv_context *context = begin();
	char *memory = map(BYTES);
	int failures;

	registered_often(pd, memory, BYTES);
	munmap(memory, BYTES);
	failures = ibv_dealloc_pd(pd) != 0;
	failures += ibv_close_device(context) != 0;
	return failures;
}
