/* A queue pair connected to itself on the first RDMA device, as any program would make one. */

#ifndef LOOP_H
#define LOOP_H

#include "../check.h"
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct loop {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static inline double now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static inline char *map(size_t bytes)
{
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	memset(memory, 1, bytes);
	return memory;
}

static inline struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	return context;
}

static inline void connect_to_itself(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 1, .hop_limit = 1 } },
	};
	CHECK(!ibv_query_gid(qp->context, 1, 1, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				     .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline struct loop loop_in(struct ibv_context *context, struct ibv_pd *pd)
{
	struct loop loop = { .context = context, .pd = pd };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 16, .max_recv_wr = 1,
						  .max_send_sge = 1, .max_recv_sge = 1 } };

	CHECK(pd);
	CHECK((loop.cq = ibv_create_cq(loop.context, 64, NULL, NULL, 0)));
	init.send_cq = init.recv_cq = loop.cq;
	CHECK((loop.qp = ibv_create_qp(loop.pd, &init)));
	connect_to_itself(loop.qp);
	return loop;
}

static inline struct loop loop_open(void)
{
	struct ibv_context *context = open_device();

	return loop_in(context, ibv_alloc_pd(context));
}

static inline void loop_close(struct loop *loop)
{
	CHECK(!ibv_destroy_qp(loop->qp));
	CHECK(!ibv_destroy_cq(loop->cq));
	CHECK(!ibv_dealloc_pd(loop->pd));
	CHECK(!ibv_close_device(loop->context));
}

/* Moves bytes between local memory and what a remote key names; the completion's status. */
static inline enum ibv_wc_status loop_move(struct loop *loop, enum ibv_wr_opcode opcode,
					   const struct ibv_mr *local, void *from, uint32_t bytes,
					   void *remote, uint32_t rkey)
{
	struct ibv_sge piece = { .addr = (uintptr_t)from, .length = bytes, .lkey = local->lkey };
	struct ibv_send_wr wr = { .sg_list = &piece, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int polled;

	wr.wr.rdma.remote_addr = (uintptr_t)remote;
	wr.wr.rdma.rkey = rkey;
	CHECK(!ibv_post_send(loop->qp, &wr, &bad));
	while (!(polled = ibv_poll_cq(loop->cq, 1, &wc)))
		;
	CHECK(polled == 1);
	return wc.status;
}

/* A completion's status in words. Both halves of the connection are one queue pair, so that a remote
 * refusal shows as such or, if the half that refused stops the queue pair first, as flushed. */
static inline const char *in_words(enum ibv_wc_status status)
{
	if (status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_WR_FLUSH_ERR)
		return "refused";
	return ibv_wc_status_str(status);
}

#endif
