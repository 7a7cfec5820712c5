/*
 * A program that loads libibverbs itself, as plugins do.
 *
 *   private local        takes the functions from its own handle: a preloaded library sees none of it
 *   private global       lets every module see libibverbs, and takes the functions from everywhere
 */

#include "loop.h"
#include <dlfcn.h>
#undef ibv_reg_mr

enum { BYTES = 256 << 10, TIMES = 20 };

#define TAKE(name)                                                                                 \
	__typeof__(&ibv_##name) take_##name = (__typeof__(&ibv_##name))dlsym(from, "ibv_" #name);  \
	CHECK(take_##name)

int main(int argc, char **argv)
{
	int global = argc > 1 && !strcmp(argv[1], "global");
	void *handle = dlopen("libibverbs.so.1", RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
	void *from = global ? RTLD_DEFAULT : handle;
	struct ibv_device **list;
	struct ibv_context *context;
	struct ibv_pd *pd;
	char *memory = map(BYTES);
	int failures = 0, i;

	CHECK(handle);
	TAKE(get_device_list);
	TAKE(open_device);
	TAKE(alloc_pd);
	TAKE(reg_mr);
	TAKE(reg_mr_iova2);
	TAKE(dereg_mr);
	TAKE(dealloc_pd);
	TAKE(close_device);
	CHECK((list = take_get_device_list(NULL)) && list[0]);
	CHECK((context = take_open_device(list[0])));
	CHECK((pd = take_alloc_pd(context)));
	for (i = 0; i < TIMES; i++) {
		struct ibv_mr *mr = i % 2 ? take_reg_mr(pd, memory, BYTES, IBV_ACCESS_LOCAL_WRITE) :
					    take_reg_mr_iova2(pd, memory, BYTES, (uintptr_t)memory, IBV_ACCESS_LOCAL_WRITE);

		CHECK(mr);
		failures += mr->addr != memory || mr->length != BYTES || take_dereg_mr(mr);
	}
	printf("%s: %d failures\n", global ? "global" : "local", failures);
	printf("dealloc_pd %d\n", take_dealloc_pd(pd));
	printf("close %d\n", take_close_device(context));
	return failures != 0;
}
