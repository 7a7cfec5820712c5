/* A program from before 2007: version 1.0 of libibverbs' functions, with the structures of that time. */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct context;
struct device;
struct pd {
	struct context *context;
	uint32_t handle;
};
struct mr {
	struct context *context;
	struct pd *pd;
	uint32_t handle, lkey, rkey;
};

struct device **ibv_get_device_list(int *count);
struct context *ibv_open_device(struct device *device);
int ibv_close_device(struct context *context);
struct pd *ibv_alloc_pd(struct context *context);
int ibv_dealloc_pd(struct pd *pd);
struct mr *ibv_reg_mr(struct pd *pd, void *addr, size_t length, int access);
int ibv_dereg_mr(struct mr *mr);

__asm__(".symver ibv_get_device_list, ibv_get_device_list@IBVERBS_1.0");
__asm__(".symver ibv_open_device, ibv_open_device@IBVERBS_1.0");
__asm__(".symver ibv_close_device, ibv_close_device@IBVERBS_1.0");
__asm__(".symver ibv_alloc_pd, ibv_alloc_pd@IBVERBS_1.0");
__asm__(".symver ibv_dealloc_pd, ibv_dealloc_pd@IBVERBS_1.0");
__asm__(".symver ibv_reg_mr, ibv_reg_mr@IBVERBS_1.0");
__asm__(".symver ibv_dereg_mr, ibv_dereg_mr@IBVERBS_1.0");

int main(void)
{
	enum { BYTES = 65536 };
	struct device **list = ibv_get_device_list(NULL);
	struct context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct pd *pd = context ? ibv_alloc_pd(context) : NULL;
	char *memory = malloc(BYTES);
	int failures = 0, i;

	if (!pd || !memory) {
		perror("no domain");
		return 1;
	}
	for (i = 0; i < 20; i++) {
		struct mr *mr = ibv_reg_mr(pd, memory, BYTES, 1);

		if (!mr) {
			perror("ibv_reg_mr");
			return 1;
		}
		failures += mr->pd != pd || mr->context != context || !mr->lkey;
		if (!i)
			printf("dealloc_pd while in use: %d\n", ibv_dealloc_pd(pd));
		failures += ibv_dereg_mr(mr);
	}
	printf("%d failures\n", failures);
	printf("dealloc_pd %d\n", ibv_dealloc_pd(pd));
	printf("close %d\n", ibv_close_device(context));
	return failures != 0;
}
