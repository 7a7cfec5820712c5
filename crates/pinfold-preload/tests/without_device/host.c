/*
 * A program without libibverbs that loads one.
 *
 *   host LIBRARY
 *
 * LIBRARY has one, or is one; of that it takes the functions by its handle, as NCCL does.
 */

#include "verbs.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define TAKE(name) __typeof__(&ibv_##name) name = (__typeof__(&ibv_##name))dlsym(handle, "ibv_" #name)

static int registers_by_handle(void *handle)
{
	TAKE(open_device);
	TAKE(alloc_pd);
	TAKE(reg_mr);
	TAKE(dereg_mr);
	struct ibv_pd *pd = alloc_pd(open_device(NULL));
	char *memory = aligned_alloc(4096, 64 << 10);
	int failures = 0;

	for (int i = 0; i < 4; i++) {
		struct ibv_mr *mr = reg_mr(pd, memory, 64 << 10, 1);

		failures += !mr || mr->addr != memory || dereg_mr(mr);
	}
	return failures;
}

int main(int count, char **given)
{
	void *handle = count > 1 ? dlopen(given[1], RTLD_NOW | RTLD_LOCAL) : NULL;
	int (*registers)(int);

	if (!handle) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	registers = (int (*)(int))dlsym(handle, "registers_by_itself");
	printf("%d failures\n", registers ? registers(4) : registers_by_handle(handle));
	printf("%s\n", dlclose(handle) || dlopen(given[1], RTLD_NOW | RTLD_NOLOAD) ? "stays" : "unloaded");
	return 0;
}
