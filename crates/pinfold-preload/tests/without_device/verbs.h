/* What the programs here need of libibverbs' ABI, for machines without its headers. */

#ifndef VERBS_H
#define VERBS_H

#include <stddef.h>
#include <stdint.h>

struct ibv_context {
	void *device;
	void *operations[32];
	int cmd_fd, async_fd, num_comp_vectors;
	/* more follows */
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

struct ibv_mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	/* more follows */
};

struct ibv_context *ibv_open_device(void *device);
int ibv_close_device(struct ibv_context *context);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access);
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access);
struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *attributes);
struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, void *buf, void *addr, size_t length, int access);
struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle);
void ibv_unimport_pd(struct ibv_pd *pd);
int ibv_dereg_mr(struct ibv_mr *mr);
int ibv_fork_init(void);
int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access);

/* How many bytes can be registered. */
void verbs_limit(size_t bytes);
/* A library's, which deregisters it as the process ends. */
void verbs_has_until_the_end(struct ibv_mr *mr);
/* What it was registered for. */
int verbs_rights(const struct ibv_mr *mr);
/* Whether what the descriptor stands for has this registration. */
int verbs_has(int device, uint32_t handle);

#endif
