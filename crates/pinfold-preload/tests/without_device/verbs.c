/* Stands in for libibverbs where there is no device: registrations are structures of the heap, and nothing is
 * pinned. */

#include "verbs.h"
#include <errno.h>
#include <stdlib.h>

struct ibv_context *ibv_open_device(void *device)
{
	struct ibv_context *context = calloc(1, 4096);

	context->device = device;
	context->cmd_fd = context->async_fd = -1;
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	free(context);
	return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	static uint32_t last;
	struct ibv_mr *mr = calloc(1, sizeof(*mr));

	(void)access;
	*mr = (struct ibv_mr){ pd->context, pd, addr, length, ++last, last << 8, last << 8 };
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}

/* What must be there by name. */
#define ABSENT(name)                                                                               \
	int name(void);                                                                            \
	int name(void)                                                                             \
	{                                                                                          \
		errno = ENOSYS;                                                                    \
		return -1;                                                                         \
	}

ABSENT(ibv_get_device_list)
ABSENT(ibv_free_device_list)
ABSENT(ibv_get_device_name)
ABSENT(ibv_query_device)
ABSENT(ibv_query_port)
ABSENT(ibv_query_gid)
ABSENT(ibv_create_cq)
ABSENT(ibv_destroy_cq)
ABSENT(ibv_create_comp_channel)
ABSENT(ibv_destroy_comp_channel)
ABSENT(ibv_get_cq_event)
ABSENT(ibv_ack_cq_events)
ABSENT(ibv_create_qp)
ABSENT(ibv_modify_qp)
ABSENT(ibv_query_qp)
ABSENT(ibv_destroy_qp)
ABSENT(ibv_wc_status_str)
